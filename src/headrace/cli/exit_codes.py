"""Exit codes, which tell service managers why the command ended."""

DONE = 0
# The command failed.
FAILED = 1
# A flag, a variable or a file is wrong.
CONFIG = 2
# The model cannot be served.
MODEL = 3
# The engine failed too often.
ENGINE = 4
# The port or the state directory is in use.
IN_USE = 5
# A part of the server failed; the server must be restarted.
BROKEN = 6
INTERRUPTED = 130
