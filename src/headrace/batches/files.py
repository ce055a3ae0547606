"""Files of keys: taken in piece by piece, within a size and a quota, kept for a while."""

import asyncio
from collections import Counter

import msgspec

from headrace.batches.records import (
    FILE,
    FileRecord,
    encode_record,
    in_slices,
    new_id,
    now_s,
    read_record,
)
from headrace.batches.shelf import Shelf
from headrace_common.config.settings import BatchConfig
from headrace_common.errors import RequestError

MAX_FILES = 1000
"""Files that one key may have."""
_PIECE = 1 << 18  # bytes that each running upload holds in memory
_DAY_S = 24 * 3600
LEAST_S, MOST_S = 3600, 30 * _DAY_S


class Files:
    def __init__(self, shelf: Shelf, config: BatchConfig) -> None:
        self.config = config
        self._shelf = shelf
        self._coming: Counter[str] = Counter()  # bytes of uploads under way, by owner
        self._adding = asyncio.Lock()  # from counting a key's files to there being one more

    async def of(self, owner: str) -> list[FileRecord]:
        """The files of a key, newest first."""
        files = in_slices(await self._shelf.records.all(FILE), FileRecord)
        mine = [file async for file in files if file.owner == owner]
        return sorted(mine, key=lambda file: (file.created_at, file.id), reverse=True)

    async def get(self, owner: str, id: str) -> FileRecord:
        """RequestError if this key has no such file."""
        file = read_record(await self._shelf.records.get(FILE, id), FileRecord)
        if file is None or file.owner != owner:
            raise RequestError("file_not_found", "There is no such file, or it has expired.", "id")
        return file

    async def begin(self, owner: str) -> "Upload":
        """A file that is to come; RequestError if the key has no room for any."""
        return Upload(self, self._shelf, owner, await self._used(owner))

    async def add(self, file: FileRecord) -> None:
        """Another file of its key; RequestError beyond the number or the quota.

        An upload that began before others ended knows nothing of those, so it is asked here again.
        """
        async with self._adding:
            self.check_quota(await self._used(file.owner) + file.num_bytes)
            await self.put(file)

    def check_quota(self, num_bytes: int) -> None:
        """RequestError if that is more than all files of a key may have."""
        if num_bytes > self.config.key_file_bytes:
            raise RequestError(
                "quota_exceeded",
                f"The files of this key would have {num_bytes} bytes, and it may have "
                f"{self.config.key_file_bytes}; delete some, or raise --key-file-bytes.",
                "file",
            )

    async def _used(self, owner: str) -> int:
        """Bytes of a key's files; RequestError if it can have no further one."""
        files = await self.of(owner)
        if len(files) >= MAX_FILES:
            message = f"This key has {len(files)} files, and {MAX_FILES} are kept; delete some."
            raise RequestError("quota_exceeded", message, "file")
        return sum(file.num_bytes for file in files)

    async def put(self, file: FileRecord) -> FileRecord:
        await self._shelf.records.put(FILE, file.id, encode_record(file))
        return file

    async def resized(self, id: str, num_bytes: int) -> None:
        """Notes how large a file of results has become."""
        file = read_record(await self._shelf.records.get(FILE, id), FileRecord)
        if file is not None:
            await self.put(msgspec.structs.replace(file, num_bytes=num_bytes))

    async def remove(self, id: str) -> None:
        await self._shelf.records.remove(FILE, id)
        await self._shelf.blobs.remove(id)

    async def sweep(self, in_use: set[str]) -> None:
        """Removes what has expired, but for what a batch still reads or writes."""
        now = now_s()
        async for file in in_slices(await self._shelf.records.all(FILE), FileRecord):
            if file.expires_at <= now and file.id not in in_use:
                await self.remove(file.id)

    def new(self, owner: str, name: str, purpose: str, num_bytes: int = 0) -> FileRecord:
        """A file that is kept as long as files are."""
        now = now_s()
        expires_at = now + int(self.config.keep_files_days * _DAY_S)
        return FileRecord(new_id("file-"), owner, name, purpose, num_bytes, now, expires_at)

    def coming(self, owner: str) -> int:
        """Bytes of a key's uploads that are under way."""
        return self._coming[owner]

    def count(self, owner: str, num_bytes: int) -> None:
        """Counts bytes that come, or that do no longer."""
        self._coming[owner] += num_bytes
        if not self._coming[owner]:
            del self._coming[owner]


class Upload:
    """The bytes of one file on their way; use it as a context, which drops what is not finished."""

    def __init__(self, files: Files, shelf: Shelf, owner: str, used: int) -> None:
        self.num_bytes = 0
        self._files = files
        self._shelf = shelf
        self._owner = owner
        self._used = used  # by the files that the key had
        self._id = new_id("file-")
        self._held = bytearray()
        self._is_finished = False

    async def __aenter__(self) -> "Upload":
        return self

    async def __aexit__(self, *why: object) -> None:
        self._files.count(self._owner, -self.num_bytes)
        if not self._is_finished:
            await self._shelf.blobs.remove(self._id)

    async def write(self, data: bytes) -> None:
        """RequestError beyond the size or the quota."""
        config, total = self._files.config, self.num_bytes + len(data)
        if total > config.max_file_bytes:
            raise RequestError(
                "request_too_large",
                f"The file is larger than the {config.max_file_bytes} bytes that this server "
                "takes; split it, or raise --max-file-bytes.",
                "file",
            )
        self._files.check_quota(self._used + self._files.coming(self._owner) + len(data))
        self.num_bytes = total
        self._files.count(self._owner, len(data))
        self._held += data
        if len(self._held) >= _PIECE:
            await self._flush()

    async def finish(self, name: str, purpose: str, keep_s: int | None = None) -> FileRecord:
        """The file, which is there from now on; RequestError if others took its room meanwhile."""
        await self._flush()
        file = self._files.new(self._owner, name, purpose, self.num_bytes)
        expires_at = file.created_at + keep_s if keep_s else file.expires_at
        file = msgspec.structs.replace(
            file, id=self._id, expires_at=expires_at, is_listed=purpose != "messages"
        )
        await self._files.add(file)
        self._is_finished = True
        return file

    async def _flush(self) -> None:
        data = bytes(self._held)
        self._held.clear()
        if data:
            await self._shelf.blobs.append(self._id, data)
