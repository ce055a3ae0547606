"""Defines ids as distinct types, so that the type checker finds mix-ups."""

from typing import NewType

StreamId = NewType("StreamId", str)
"""An admitted generation request. The response has this id in the field `id`."""

SequenceId = NewType("SequenceId", int)
"""One choice of a request during generation. The engine client assigns the number."""

BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)
