"""Records the answers of a checkout's server, and compares two such recordings."""

import argparse
import sys
import time
from pathlib import Path

from stress.recording.compare import compare
from stress.recording.record import ROOT, record
from stress.recording.state import make_state, read_state


def main() -> int:
    parser = argparse.ArgumentParser(prog="stress.recording", description=__doc__)
    parser.add_argument(
        "--code", type=Path, default=ROOT, help="folder of the checkout whose server is run"
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    helps = {
        "record": ("file", "record the answers to all requests in a file"),
        "compare": ("one other", "print the differences; exit code 1 if there are any"),
        "state": ("folder", "store streams, responses and batches in a folder"),
        "state-read": ("folder file", "record what a server answers from a folder of `state`"),
    }
    for verb, (names, text) in helps.items():
        added = verbs.add_parser(verb, help=text)
        for name in names.split():
            added.add_argument(name, type=Path)
    given = parser.parse_args()
    began = time.monotonic()
    if given.verb == "compare":
        return 1 if compare(given.one, given.other) else 0
    if given.verb == "state":
        make_state(given.code, given.folder)
        return 0
    if given.verb == "record":
        number = record(given.code, given.file)
    else:
        number = read_state(given.code, given.folder, given.file)
    print(f"{number} answers in {given.file}, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
