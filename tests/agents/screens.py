"""Print the last screen of each recorded terminal; build/aider-venv has pyte, which this needs."""

import sys
from pathlib import Path

import pyte  # type: ignore[import-not-found]

from tests.agents.terminal import COLUMNS, ROWS


def main() -> None:
    for record in sorted(Path(sys.argv[1]).iterdir()):
        screen = pyte.HistoryScreen(COLUMNS, ROWS, history=1000)
        pyte.ByteStream(screen).feed(record.read_bytes())
        print(f"==== {record.name}", *(line.rstrip() for line in screen.display), sep="\n")


if __name__ == "__main__":
    main()
