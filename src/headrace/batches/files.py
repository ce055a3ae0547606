"""Stores the files of API keys, and enforces a size limit per file and a quota per key."""

import asyncio
from collections import Counter

import msgspec

from headrace.batches.records import (
    FILE,
    FileRecord,
    encode_record,
    in_slices,
    new_id,
    read_record,
)
from headrace.batches.store import BatchStore
from headrace_common.config.settings import BatchConfig
from headrace_common.errors import RequestError

MAX_FILES = 1000
"""The maximum number of files per API key."""
# The bytes that a running upload collects in memory before it writes them.
_PIECE = 1 << 18
_DAY_S = 24 * 3600
LEAST_S, MOST_S = 3600, 30 * _DAY_S


class Files:
    def __init__(self, shelf: BatchStore, config: BatchConfig) -> None:
        self.config = config
        self._batch_store = shelf
        # The bytes of running uploads, by owner.
        self._uploading: Counter[str] = Counter()
        # Held while counting a key's files and adding a new file.
        self._adding = asyncio.Lock()

    async def of(self, owner: str) -> list[FileRecord]:
        """Return the files of a key, newest first."""
        files = in_slices(await self._batch_store.records.all(FILE), FileRecord)
        mine = [file async for file in files if file.owner == owner]
        return sorted(mine, key=lambda file: (file.created_at, file.id), reverse=True)

    async def get(self, owner: str, id: str) -> FileRecord:
        """Return a file. Raises RequestError if the API key has no such file."""
        file = read_record(await self._batch_store.records.get(FILE, id), FileRecord)
        if file is None or file.owner != owner:
            raise RequestError("file_not_found", "There is no such file, or it has expired.", "id")
        return file

    async def begin(self, owner: str) -> "Upload":
        """Start an upload. Raises RequestError if the API key has too many files."""
        return Upload(self, self._batch_store, owner, await self._used(owner))

    async def add(self, file: FileRecord) -> None:
        """Add a file to its API key.

        Raises RequestError if the key would then have too many files or too many bytes. Both limits
        are checked again here, because other uploads may have ended since this upload started.
        """
        async with self._adding:
            self.check_quota(await self._used(file.owner) + file.num_bytes)
            await self.put(file)

    def check_quota(self, num_bytes: int) -> None:
        """Raise RequestError if `num_bytes` exceeds the limit for all files of an API key."""
        if num_bytes > self.config.key_file_bytes:
            raise RequestError(
                "quota_exceeded",
                f"The files of this key would have {num_bytes} bytes, and the limit is "
                f"{self.config.key_file_bytes}; delete some, or raise --key-file-bytes.",
                "file",
            )

    async def _used(self, owner: str) -> int:
        """Return the bytes of an API key's files.

        Raises RequestError if the key already has the maximum number of files.
        """
        files = await self.of(owner)
        if len(files) >= MAX_FILES:
            message = f"This key has {len(files)} files, and the limit is {MAX_FILES}; delete some."
            raise RequestError("quota_exceeded", message, "file")
        return sum(file.num_bytes for file in files)

    async def put(self, file: FileRecord) -> FileRecord:
        await self._batch_store.records.put(FILE, file.id, encode_record(file))
        return file

    async def resized(self, id: str, num_bytes: int) -> None:
        """Record the new size of a file that holds results."""
        file = read_record(await self._batch_store.records.get(FILE, id), FileRecord)
        if file is not None:
            await self.put(msgspec.structs.replace(file, num_bytes=num_bytes))

    async def remove(self, id: str) -> None:
        await self._batch_store.records.remove(FILE, id)
        await self._batch_store.blobs.remove(id)

    async def sweep(self, in_use: set[str]) -> None:
        """Delete expired files, except files that an unfinished batch reads or writes."""
        now = await self._batch_store.records.now()
        async for file in in_slices(await self._batch_store.records.all(FILE), FileRecord):
            if file.expires_at <= now and file.id not in in_use:
                await self.remove(file.id)

    async def new(self, owner: str, name: str, purpose: str, num_bytes: int = 0) -> FileRecord:
        """Make the record of a new file. The file expires after the default time."""
        now = await self._batch_store.records.now()
        expires_at = now + int(self.config.keep_files_days * _DAY_S)
        return FileRecord(new_id("file-"), owner, name, purpose, num_bytes, now, expires_at)

    def coming(self, owner: str) -> int:
        """Return the bytes received so far in an API key's running uploads."""
        return self._uploading[owner]

    def count(self, owner: str, num_bytes: int) -> None:
        """Count `num_bytes` more bytes in a key's running uploads; the number may be negative."""
        self._uploading[owner] += num_bytes
        if not self._uploading[owner]:
            del self._uploading[owner]


class Upload:
    """Receives the bytes of one file. As a context manager, it deletes an unfinished file."""

    def __init__(self, files: Files, shelf: BatchStore, owner: str, used: int) -> None:
        self.num_bytes = 0
        self._files = files
        self._batch_store = shelf
        self._owner = owner
        # The bytes of the files that the API key had when the upload started.
        self._used = used
        self._id = new_id("file-")
        self._buffer = bytearray()
        self._is_finished = False

    async def __aenter__(self) -> "Upload":
        return self

    async def __aexit__(self, *why: object) -> None:
        self._files.count(self._owner, -self.num_bytes)
        if not self._is_finished:
            # The file's record may be stored although the store has not confirmed it.
            await self._files.remove(self._id)

    async def write(self, data: bytes) -> None:
        """Add bytes.

        Raises RequestError if the file exceeds the size limit, or the API key its quota.
        """
        config, total = self._files.config, self.num_bytes + len(data)
        if total > config.max_file_bytes:
            raise RequestError(
                "request_too_large",
                f"The file is larger than the {config.max_file_bytes} bytes that this server "
                "accepts; split it, or raise --max-file-bytes.",
                "file",
            )
        self._files.check_quota(self._used + self._files.coming(self._owner) + len(data))
        self.num_bytes = total
        self._files.count(self._owner, len(data))
        self._buffer += data
        if len(self._buffer) >= _PIECE:
            await self._flush()

    async def finish(self, name: str, purpose: str, keep_s: int | None = None) -> FileRecord:
        """Finish the upload and make the file visible.

        Raises RequestError if other uploads have used up the API key's quota meanwhile.
        """
        await self._flush()
        file = await self._files.new(self._owner, name, purpose, self.num_bytes)
        expires_at = file.created_at + keep_s if keep_s else file.expires_at
        file = msgspec.structs.replace(
            file, id=self._id, expires_at=expires_at, is_listed=purpose != "messages"
        )
        await self._files.add(file)
        self._is_finished = True
        return file

    async def _flush(self) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        if data:
            await self._batch_store.blobs.append(self._id, data)
