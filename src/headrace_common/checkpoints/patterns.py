"""Matches regular expressions from downloaded files in a process that can be killed."""

import json
import subprocess
import sys
from collections.abc import Sequence

from headrace_common.checkpoints import pattern_matcher
from headrace_common.errors import ModelError

# Limit on wall time. The program also limits its processor time.
_MAX_SECONDS = 20


def first_matches(patterns: Sequence[str], names: Sequence[str], where: str) -> list[int]:
    """Return for each name the index of the first pattern that matches the whole name, or -1.

    Raises ModelError if a pattern is not a regular expression. Also raises ModelError if matching
    exceeds the limits on time or memory. The message names the file `where`.
    """
    command = [sys.executable, "-I", "-S", "-W", "ignore", pattern_matcher.__file__]
    question = json.dumps({"patterns": list(patterns), "names": list(names)}).encode()
    try:
        done = subprocess.run(
            command,
            input=question,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_MAX_SECONDS,
            check=True,
        )
    except (subprocess.SubprocessError, OSError):
        raise ModelError(
            f"The regular expressions in {where} take too long to match {len(names)} "
            "module names; write plain names instead."
        ) from None
    answer: list[int] | int = json.loads(done.stdout)
    if isinstance(answer, int):
        raise ModelError(f"{patterns[answer][:80]!r} in {where} is not a regular expression.")
    return answer
