"""Images on their way to the engine: a file in memory that both sides can open."""

import os
import tempfile
from typing import NamedTuple

from headrace.workers.pool import Work
from headrace_common.jobs import SeeImages
from headrace_common.plan import PromptInputs
from headrace_common.system.memory_file import can_open_anew, open_memory_file


class PixelFile:
    """In memory on Linux, where it ends with its owner, however that ends; else a temporary one."""

    def __init__(self) -> None:
        self._fd: int | None
        self._is_named = not can_open_anew()
        if self._is_named:
            self._fd, self.path = tempfile.mkstemp(prefix="headrace-pixels-")
        else:
            self._fd = open_memory_file("pixels")
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            if self._is_named:
                os.unlink(self.path)

    def __del__(self) -> None:
        self.close()


class Admitted(NamedTuple):
    """Packed int32 ids of each prompt, and what goes with them."""

    prompts: tuple[bytes, ...]
    tokenization: str | None = None  # as in the record
    inputs: tuple[PromptInputs, ...] = ()
    pixels: PixelFile | None = None
    images: bytes = b""  # the prompts as they were sent, to do this again
    changes: tuple[str, ...] = ()  # made in messages that the chat template refused

    def close(self) -> None:
        if self.pixels is not None:
            self.pixels.close()


async def see_images(work: Work, packed: bytes, model: str) -> Admitted:
    """The one prompt in `packed`, a chat with images; RequestError names the image at fault."""
    pixels = PixelFile()
    seen = await work.do(SeeImages(pixels.path, model), [packed])
    inputs = (seen.inputs,)
    return Admitted((seen.token_ids,), "one-shot", inputs, pixels, packed, seen.changes)
