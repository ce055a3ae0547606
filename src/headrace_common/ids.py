"""Names of things, each its own type, so that a wrong one is a type error."""

from typing import NewType

StreamId = NewType("StreamId", str)
"""One admitted generation request: the `id` of its response."""

SequenceId = NewType("SequenceId", int)
"""One choice being generated: a small integer that the engine client gave to (stream, choice)."""

BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)
