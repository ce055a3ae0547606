"""Exit codes, so that service managers can tell one end from another."""

DONE = 0
FAILED = 1  # the verb failed, or anything else
CONFIG = 2  # a wrong flag, variable or file
MODEL = 3  # the model cannot be served
ENGINE = 4  # the engine was given up
IN_USE = 5  # the port, or the state directory
BROKEN = 6  # a part of the server ended by itself; start it again
INTERRUPTED = 130
