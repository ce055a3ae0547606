"""/v1/files: stores files during the upload; lists, sends and deletes the files of a key."""

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp

from headrace.batches.batches import Batches
from headrace.batches.files import LEAST_S, MOST_S, Upload
from headrace.batches.lines import PIECE
from headrace.batches.records import FileRecord
from headrace.batches.store import Blobs
from headrace.gateway.auth import Auth
from headrace.gateway.content_coding import BodyDecoder
from headrace.gateway.http_responses import answer
from headrace.gateway.listing import Paging, page
from headrace.gateway.multipart import (
    MAX_FIELDS,
    STEP_BYTES,
    FormParser,
    PartHead,
    PartNews,
    boundary_of,
)
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.errors import RequestError
from headrace_common.system import awake

_MAX_FIELD_BYTES = 1024
# Maximum number of bytes of a form, apart from its file: fields, headers and boundaries.
_MAX_BESIDE = 64 << 10
_PURPOSES = ("batch",)
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_PAGING = Paging(most=10_000, usual=10_000)


class FileRoutes:
    def __init__(self, batches: Batches, blobs: Blobs, auth: Auth, pause_s: float) -> None:
        """Set up the routes; an upload may pause for `pause_s` seconds."""
        self._batches = batches
        self._files = batches.files
        self._blobs = blobs
        self._auth = auth
        self._pause_s = pause_s

    async def create(self, request: Request) -> ASGIApp:
        owner = self._auth.owner(request.headers)
        self._auth.check_simple(request.headers)
        parser = FormParser(boundary_of(request.headers.get("content-type", "")))
        decoder = BodyDecoder(request.headers)
        length = request.headers.get("content-length", "")
        if length.isdecimal():
            self._check_size(int(length[:20]))
        async with await self._files.begin(owner) as upload:
            form = _Form(upload)
            async for data in self._pieces(request, decoder):
                for start in range(0, len(data), STEP_BYTES):
                    await slice_of_loop()
                    for news in parser.feed(data[start : start + STEP_BYTES]):
                        await form.take(news)
            if not parser.is_done:
                raise RequestError(
                    "invalid_value", "The form ends before its last boundary; send it again."
                )
            file = await upload.finish(form.filename(), *form.settings())
        return answer(_described(file))

    def _check_size(self, num_bytes: int) -> None:
        """Raise RequestError if a form of this size is too large.

        The limit is the maximum size of a file plus `_MAX_BESIDE`. All bytes of the form count,
        also the bytes before, between and after the form's parts.
        """
        most = self._files.config.max_file_bytes
        if num_bytes > most + _MAX_BESIDE:
            raise RequestError(
                "request_too_large",
                f"The form is too large; the limit is {most} bytes for the file and {_MAX_BESIDE} "
                "bytes for everything else. Split the file, or start the server with a larger "
                "--max-file-bytes.",
                "file",
            )

    async def _pieces(self, request: Request, decoder: BodyDecoder) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; raise RequestError if the body is too large or too slow."""
        num_received, num_bytes, has_more = 0, 0, True
        while has_more:
            try:
                async with awake.within(self._pause_s):
                    message = await request.receive()
            except TimeoutError:
                text = f"No data arrived for {self._pause_s:g} s; send the file again."
                raise RequestError("body_timeout", text) from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            data = message.get("body", b"")
            num_received += len(data)
            async for piece in decoder.feed(data):
                num_bytes += len(piece)
                self._check_size(max(num_bytes, num_received))
                yield piece
            has_more = message.get("more_body", False)
        decoder.finish()

    async def list(self, request: Request) -> ASGIApp:
        files = [it for it in await self._files.of(self._owner(request)) if it.is_listed]
        purpose = request.query_params.get("purpose")
        if purpose is not None:
            files = [it for it in files if it.purpose == purpose]
        if request.query_params.get("order") == "asc":
            files.reverse()
        return answer(page(request, files, _described, _PAGING))

    async def read(self, request: Request) -> ASGIApp:
        return answer(_described(await self._find(request)))

    async def content(self, request: Request) -> ASGIApp:
        file = await self._find(request)
        return content_of(self._blobs, file)

    async def delete(self, request: Request) -> ASGIApp:
        id = request.path_params["id"]
        await self._batches.remove_file(self._owner(request), id)
        return answer({"id": id, "object": "file", "deleted": True})

    async def _find(self, request: Request) -> FileRecord:
        return await self._files.get(self._owner(request), request.path_params["id"])

    def _owner(self, request: Request) -> str:
        return self._auth.owner(request.headers)


class FileGone(Exception):
    """Raised when a file is deleted while its bytes are being sent."""


def content_of(
    blobs: Blobs, file: FileRecord, media_type: str = "application/octet-stream"
) -> ASGIApp:
    """Send the bytes of a file. If the file is still growing, send the bytes that exist.

    If the file is deleted meanwhile, FileGone cuts the connection. After a regular end, the
    client would believe that the file is complete.
    """

    async def pieces() -> AsyncIterator[bytes]:
        at = 0
        while piece := await blobs.read(file.id, at, PIECE):
            at += len(piece)
            yield piece
        if at < file.num_bytes:
            raise FileGone(f"{file.id}: {at} of {file.num_bytes} bytes were sent.")

    return StreamingResponse(pieces(), media_type=media_type)


class _Form:
    """Collects the parts of an upload.

    The file is written immediately, and the few short fields are kept.
    """

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._name, self._is_file = "", False
        self._filename: str | None = None
        self._fields: dict[str, bytearray] = {}

    async def take(self, news: PartNews) -> None:
        if isinstance(news, PartHead):
            self._name, self._is_file = news.name, news.name == "file"
            if self._is_file and self._filename is not None:
                raise RequestError("invalid_value", "The form has two files; send one.", "file")
            if self._is_file:
                self._filename = news.filename or "file"
            else:
                self._fields[news.name] = bytearray()
                self._bound()
        elif isinstance(news, bytearray) and self._is_file:
            await self._upload.write(bytes(news))
        elif isinstance(news, bytearray):
            self._fields[self._name] += news
            self._bound()

    def _bound(self) -> None:
        """Raise RequestError if the fields and their names exceed the size limit."""
        size = sum(len(name) + len(value) for name, value in self._fields.items())
        if size > _MAX_FIELD_BYTES:
            text = f"Apart from the file, the form's fields and their names have {size} bytes; the "
            text += f"limit is {_MAX_FIELD_BYTES} bytes in {MAX_FIELDS} fields. Send less."
            raise RequestError("invalid_value", text, self._name[:64])

    def filename(self) -> str:
        if self._filename is None:
            raise RequestError(
                "missing_required_parameter",
                "The form has no file; send it as the part named file.",
                "file",
            )
        return self._filename[:255]

    def settings(self) -> tuple[str, int | None]:
        """Return the purpose, and the number of seconds to keep the file (None if not given)."""
        fields = {name: value.decode(errors="replace") for name, value in self._fields.items()}
        purpose = fields.get("purpose", "")
        if purpose not in _PURPOSES:
            raise RequestError(
                "invalid_value", f"purpose must be {' or '.join(_PURPOSES)}.", "purpose"
            )
        if _SECONDS not in fields and _ANCHOR not in fields:
            return purpose, None
        seconds = fields.get(_SECONDS, "")
        is_number = seconds.isdecimal() and len(seconds) < 10
        if not is_number or not LEAST_S <= int(seconds) <= MOST_S:
            text = "expires_after needs the anchor created_at and a number of seconds from "
            text += f"{LEAST_S} to {MOST_S}."
            raise RequestError("invalid_value", text, "expires_after")
        return purpose, int(seconds)


def _described(file: FileRecord) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }
