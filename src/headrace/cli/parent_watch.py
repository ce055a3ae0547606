"""Runs the command and ends it when its parent process has ended for any reason."""

import os
import signal
import threading

from headrace.cli.load_lines import LoadView
from headrace.cli.main import main


def _end_with_parent() -> None:
    # The parent never writes, so `read` returns when the parent has ended.
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    # The parent draws the progress of the load on its own terminal.
    LoadView.write_for_program()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main()
