"""Where batches live: small records that are replaced whole, and blobs that only grow."""

from typing import NamedTuple, Protocol

NOBODY = ""


class ClaimLost(Exception):
    """Another server works on this batch now, or may have done so since."""


class Records(Protocol):
    """Records by kind and id. All but reading raises StoreStalled while nothing can be stored."""

    async def put(self, kind: str, id: str, record: bytes, holder: str = NOBODY) -> None:
        """Durable when it returns, whole or not at all.

        ClaimLost if another server holds the batch `holder`, or nobody does.
        """

    async def get(self, kind: str, id: str) -> bytes | None: ...

    async def all(self, kind: str) -> list[bytes]:
        """In no order."""

    async def remove(self, kind: str, id: str) -> None:
        """Unknown ones are ignored."""

    async def claim(self, id: str, is_held: bool = False) -> bool:
        """Whether this server works on the batch: for some seconds more, or as long as it lives.

        With `is_held` it only goes on with it: what lapsed may have been another server's since.
        """


class Blobs(Protocol):
    """Bytes by id. What was appended is durable, and stays behind whatever is lost in a kill."""

    async def append(self, id: str, data: bytes, holder: str = NOBODY) -> None:
        """Adds whole lines, all of them or none.

        StoreStalled if it cannot now; a holder asks again with the same data, which is then there
        once. ClaimLost if another server holds the batch `holder`, or nobody does.
        """

    async def read(self, id: str, start: int, most: int) -> bytes:
        """May be fewer than `most`; empty at the end, and where there is no such blob."""

    async def remove(self, id: str) -> None:
        """Unknown ones are ignored."""


class Shelf(NamedTuple):
    """One place for both."""

    records: Records
    blobs: Blobs
