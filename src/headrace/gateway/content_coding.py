"""Decodes request bodies according to their Content-Encoding: gzip, zstd or none."""

import sys
import zlib
from collections.abc import AsyncIterator, Iterator

from starlette.datastructures import Headers

from headrace.workers.loop_slices import slice_of_loop
from headrace_common.errors import RequestError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ACCEPTED = "gzip, zstd, identity"
# Maximum number of bytes to read or produce at a time.
_STEP = 64 << 10
_GZIP = 16 + zlib.MAX_WBITS
# The decoder allocates the window, which RFC 9659 limits to 8 MiB.
_WINDOW_LOG = 23
# An empty frame of 9 bytes costs a new decoder, so the number of frames is limited.
_MAX_FRAMES = 100


class BodyDecoder:
    """Decodes one body piece by piece.

    Raises RequestError with status 415 if the Content-Encoding is unknown.
    """

    def __init__(self, headers: Headers) -> None:
        coding = ", ".join(headers.getlist("content-encoding")).strip().lower()
        self._inflater: _Gzip | _Zstd | None
        match coding:
            case "" | "identity":
                self._inflater = None
            case "gzip" | "x-gzip":
                self._inflater = _Gzip()
            case "zstd":
                self._inflater = _Zstd()
            case _:
                raise RequestError(
                    "unsupported_media_type",
                    f"The body's Content-Encoding is {coding[:64]}; this server accepts "
                    f"{ACCEPTED}. Send the body with one of these codings.",
                )

    async def feed(self, data: bytes) -> AsyncIterator[bytes]:
        """Yield the decoded bytes.

        A coded body is decoded in pieces of at most 64 KiB. Between two pieces, requests of other
        keys can continue.
        """
        if self._inflater is None:
            yield data
            return
        for start in range(0, len(data), _STEP):
            for piece in self._inflater.inflate(data[start : start + _STEP]):
                await slice_of_loop()
                yield piece

    def finish(self) -> None:
        """Raise RequestError if the coded data of the body is incomplete."""
        if self._inflater is not None and not self._inflater.is_whole:
            raise _malformed(self._inflater.NAME, "is cut off")


class _Gzip:
    """Decodes one gzip member.

    Further members are refused, because many empty members would cost much time.
    """

    NAME = "gzip"

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(_GZIP)

    @property
    def is_whole(self) -> bool:
        return self._decoder.eof

    def inflate(self, data: bytes) -> Iterator[bytes]:
        decoder, is_all_out = self._decoder, False
        while not is_all_out:
            if decoder.eof and data:
                raise _malformed(self.NAME, "has bytes after its end")
            try:
                piece = decoder.decompress(data, _STEP)
            except zlib.error:
                raise _malformed(self.NAME) from None
            yield piece
            data = decoder.unconsumed_tail or decoder.unused_data
            is_all_out = not data and len(piece) < _STEP


class _Zstd:
    """Decodes the frames of a zstd body one after another, as RFC 8878 describes."""

    NAME = "zstd"

    def __init__(self) -> None:
        self._decoder = _frame_decoder()
        self._num_frames = 1

    @property
    def is_whole(self) -> bool:
        return self._decoder.eof

    def inflate(self, data: bytes) -> Iterator[bytes]:
        is_all_out = not data
        while not is_all_out:
            if self._decoder.eof:
                self._next_frame()
            try:
                piece = self._decoder.decompress(data, _STEP)
            except zstd.ZstdError as error:
                raise self._refused(error) from None
            yield piece
            # The decoder keeps the part of a frame that it has not decoded yet.
            is_whole = self._decoder.eof
            data = self._decoder.unused_data if is_whole else b""
            is_all_out = not data if is_whole else self._decoder.needs_input

    def _next_frame(self) -> None:
        if self._num_frames == _MAX_FRAMES:
            why = f"has more than {_MAX_FRAMES} frames; compress the body as one frame"
            raise _malformed(self.NAME, why)
        self._num_frames += 1
        self._decoder = _frame_decoder()

    def _refused(self, error: zstd.ZstdError) -> RequestError:
        """Return the error for the client. Only the library's message names a window's size."""
        if "too much memory" in str(error):
            why = "needs a window of more than 8 MiB; compress the body with a level of at most 19"
            return _malformed(self.NAME, why)
        return _malformed(self.NAME)


def _frame_decoder() -> zstd.ZstdDecompressor:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})


def _malformed(name: str, why: str = "is malformed") -> RequestError:
    message = f"The body's Content-Encoding is {name}, but the {name} data {why}; send it again."
    return RequestError("invalid_value", message)
