"""Passes images to the engine in an in-memory file that both processes can open."""

import os
import tempfile
from typing import NamedTuple

from headrace.workers.pool import JobRunner
from headrace_common.messages import Ready
from headrace_common.plan import PromptInputs
from headrace_common.system.memory_file import can_open_anew, open_memory_file
from headrace_common.worker_jobs import SeeImages


class PixelFile:
    """A file for the prepared images of one request.

    On Linux the file is in memory and disappears with the process, however the process ends. On
    other systems the file is a temporary file.
    """

    def __init__(self) -> None:
        self._fd: int | None
        self._is_named = not can_open_anew()
        if self._is_named:
            self._fd, self.path = tempfile.mkstemp(prefix="headrace-pixels-")
        else:
            self._fd = open_memory_file("pixels")
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def num_bytes(self) -> int:
        return 0 if self._fd is None else os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            if self._is_named:
                os.unlink(self.path)

    def __del__(self) -> None:
        self.close()


class Admitted(NamedTuple):
    """The packed int32 ids of each prompt, and other data for the engine and the record."""

    prompts: tuple[bytes, ...]
    # The value in the stream's record: "one-shot", "streamed" or "given".
    tokenization: str | None = None
    inputs: tuple[PromptInputs, ...] = ()
    pixels: PixelFile | None = None
    # The packed prompts as sent, from which the images can be prepared again.
    images: bytes = b""
    # Changes to messages that the chat template had refused without the changes.
    changes: tuple[str, ...] = ()
    # The engine's report when it became ready. It has the limits that admission checked.
    ready: Ready | None = None

    @property
    def num_pixel_bytes(self) -> int:
        return 0 if self.pixels is None else self.pixels.num_bytes

    def close(self) -> None:
        if self.pixels is not None:
            self.pixels.close()


async def prepare_images(work: JobRunner, packed: bytes, model: str) -> Admitted:
    """Prepare the only prompt in `packed`, which is a chat with images.

    If an image cannot be used, raises RequestError with the image's place in the request.
    """
    pixels = PixelFile()
    seen = await work.do(SeeImages(pixels.path, model), [packed])
    inputs = (seen.inputs,)
    return Admitted((seen.token_ids,), "one-shot", inputs, pixels, packed, seen.changes)
