"""Plants a fault in a server: its process misbehaves once the file PLANTED_AT is there.

Python imports this at the start of each process whose PYTHONPATH names this folder.
"""

import os
import re
import signal
import sys
import threading
import time


def _ends() -> None:
    os._exit(6)


def _stalls() -> None:
    """Holds the interpreter's lock, as a regular expression in a client's file would."""
    re.match("(a|a)*b", "a" * 27)


def _grows() -> None:
    kept = bytearray(b"x") * 800_000_000
    time.sleep(3600.0)
    del kept


def _complains() -> None:
    print("Traceback (most recent call last):", file=sys.stderr, flush=True)


def _hears_again() -> None:
    """Obeys SIGTERM, but late."""
    while signal.SIGTERM not in signal.sigpending():
        time.sleep(0.1)
    time.sleep(8.0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    time.sleep(3600.0)


FAULTS = {
    "ends": _ends,
    "stalls": _stalls,
    "grows": _grows,
    "complains": _complains,
    "is deaf": _hears_again,
}


def _later(fault: str) -> None:
    while not os.path.exists(os.environ["PLANTED_AT"]):
        time.sleep(0.1)
    FAULTS[fault]()


if "serve" in sys.orig_argv and (planted := os.environ.get("PLANTED")):
    if planted == "is deaf":  # before there are threads: each begins with the mask of its maker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_later, args=(planted,), daemon=True).start()
