"""Defines the batch store: small records, which are replaced whole, and blobs, which only grow."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

NOBODY = ""
NO_SIZES: Mapping[str, int] = {}


class ClaimLost(Exception):
    """Another server runs the batch, or may have run the batch since this server's claim lapsed."""


class Records(Protocol):
    """Stores records by kind and id. Writes raise StoreStalled while nothing can be stored."""

    async def put(
        self,
        kind: str,
        id: str,
        record: bytes,
        holder: str = NOBODY,
        sizes: Mapping[str, int] = NO_SIZES,
    ) -> None:
        """Store a record durably, completely or not at all.

        Without a holder, a BATCH record can only be created and not replaced in a shared store.
        `holder` is the id of a batch, or NOBODY for a write that needs no claim. Raises ClaimLost
        if this server does not hold the claim on the batch.

        A failover of a shared store can lose bytes. So ClaimLost is also raised if a blob has fewer
        bytes than `sizes` says.
        """

    async def get(self, kind: str, id: str) -> bytes | None: ...

    async def now(self) -> int:
        """Return the time in unix seconds. All servers of a shared store read the same clock.

        So a server with a wrong clock does not delete files, or end batches, of other servers.
        """

    async def all(self, kind: str) -> list[bytes]:
        """Return all records of a kind, in no particular order."""

    async def remove(self, kind: str, id: str) -> None:
        """Delete a record; unknown ids are ignored."""

    async def claim(self, id: str, is_held: bool = False) -> bool:
        """Claim a batch for this server; return whether this server holds the claim.

        In a shared store, a claim lasts some seconds and must be renewed. In other stores, a claim
        lasts as long as the server. With `is_held`, only a claim that has not lapsed is renewed.
        After a lapse, another server may have run the batch.
        """


class Blobs(Protocol):
    """Stores byte strings by id. Appended bytes are durable, even if the server is killed."""

    async def append(self, id: str, data: bytes, holder: str = NOBODY) -> None:
        """Append complete lines: all of them or none.

        `holder` is the id of a batch, or NOBODY for a write that needs no claim. Raises ClaimLost
        if this server does not hold the claim on the batch. Raises StoreStalled if the lines cannot
        be stored now. A holder may repeat the call: the same data is stored only once.
        """

    async def read(self, id: str, start: int, most: int) -> bytes:
        """Return up to `most` bytes, perhaps fewer.

        Return no bytes at the end of the blob, or if the blob does not exist.
        """

    async def remove(self, id: str) -> None:
        """Delete a blob; unknown ids are ignored."""


class BatchStore(NamedTuple):
    """The records and the blobs of all batches."""

    records: Records
    blobs: Blobs
