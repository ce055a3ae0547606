"""Decodes request bodies according to their Content-Encoding, which is gzip or none."""

import zlib
from collections.abc import AsyncIterator, Iterator

from starlette.datastructures import Headers

from headrace.workers.loop_slices import slice_of_loop
from headrace_common.errors import RequestError

ACCEPTED = "gzip, identity"
# Maximum number of bytes to read or produce at a time.
_STEP = 64 << 10
_GZIP = 16 + zlib.MAX_WBITS


class BodyDecoder:
    """Decodes one body piece by piece.

    Raises RequestError with status 415 if the Content-Encoding is unknown.
    """

    def __init__(self, headers: Headers) -> None:
        coding = ", ".join(headers.getlist("content-encoding")).strip().lower()
        if coding not in ("", "identity", "gzip", "x-gzip"):
            raise RequestError(
                "unsupported_media_type",
                f"The body's Content-Encoding is {coding[:64]}; this server accepts "
                f"{ACCEPTED}. Send the body with one of these codings.",
            )
        self._inflater = zlib.decompressobj(_GZIP) if "gzip" in coding else None

    async def feed(self, data: bytes) -> AsyncIterator[bytes]:
        """Yield the decoded bytes.

        A gzip body is decoded in pieces of at most 64 KiB. Between two pieces, requests of other
        keys can continue. Only one gzip member is accepted, because many empty members would cost
        much time.
        """
        if self._inflater is None:
            yield data
            return
        for start in range(0, len(data), _STEP):
            for piece in self._inflate(self._inflater, data[start : start + _STEP]):
                await slice_of_loop()
                yield piece

    def _inflate(self, inflater: "zlib._Decompress", data: bytes) -> Iterator[bytes]:
        is_all_out = False
        while not is_all_out:
            if inflater.eof and data:
                raise _not_gzip("has bytes after its end")
            try:
                piece = inflater.decompress(data, _STEP)
            except zlib.error:
                raise _not_gzip("is malformed") from None
            yield piece
            data = inflater.unconsumed_tail or inflater.unused_data
            is_all_out = not data and len(piece) < _STEP

    def finish(self) -> None:
        """Raise RequestError if the gzip data of the body is incomplete."""
        if self._inflater is not None and not self._inflater.eof:
            raise _not_gzip("is cut off")


def _not_gzip(why: str) -> RequestError:
    message = f"The body's Content-Encoding is gzip, but the gzip data {why}; send it again."
    return RequestError("invalid_value", message)
