"""Places requests on replicas: first come, first served. Knows no clock and no engine.

A replica has places, one for each sequence that it runs at once. Who goes there claims places and
holds them until the engine has let go. What was placed where also tells where a prompt's beginning
is likely to be cached; that record forgets the prefixes that were used least recently.
"""

import bisect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ReplicaId = int
PartId = int  # of a request's part: a prompt with its choices


class Want(NamedTuple):
    """The needs of a request: places, and blocks of memory for a prompt.

    `names` are those of its prompt's full blocks (see `prefix_names`). The lowest `due` goes
    first: when it came, or later for what is less urgent.
    """

    num_places: int
    num_blocks: int
    names: tuple[int, ...] = ()
    due: float = 0.0


class Placed(NamedTuple):
    """A claim: so many blocks of the prompt are likely to be cached there."""

    part: PartId
    replica: ReplicaId
    num_shared: int


def prefix_names(token_ids: bytes, block_size: int, salt: str) -> tuple[int, ...]:
    """A name for each full block of a prompt (packed int32), and for all that is before it.

    Names mean something in this process alone. Two prompts share a name where they share a prefix;
    a collision costs time and no correctness.
    """
    size, name = 4 * block_size, hash(salt)
    names = []
    for end in range(size, len(token_ids) + 1, size):
        name = hash((name, token_ids[end - size : end]))
        names.append(name)
    return tuple(names)


class PrefixRecord:
    """Names of blocks that a replica is likely to have, at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: OrderedDict[int, None] = OrderedDict()

    def num_shared(self, names: Sequence[int]) -> int:
        """Length of the longest prefix that it has, in blocks."""
        for number, name in enumerate(names):
            if name not in self._names:
                return number
        return len(names)

    def note(self, names: Sequence[int]) -> None:
        """These were used; a head is forgotten after its tails."""
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._most:
            self._names.popitem(last=False)


@dataclass(slots=True)
class _Replica:
    num_places: int
    blocks_free: int  # by what the engine said last, less what was placed since
    prefixes: PrefixRecord
    takes_more: bool = True
    num_taken: int = 0
    claims: dict[PartId, "_Claim"] = field(default_factory=dict)

    def has_room(self, want: Want) -> bool:
        return self.takes_more and self.num_taken + self.share(want) <= self.num_places

    def share(self, want: Want) -> int:
        """Places that it takes here; more choices than there are places wait in the engine."""
        return min(want.num_places, self.num_places)


@dataclass(slots=True)
class _Claim:
    num_left: int  # sequences that the engine has not let go
    num_held: int  # places, never more than that


class Placement:
    """Tell it what happens, then ask `next` until it is None.

    Nobody passes the first in line, not even one who would fit: so whoever waits for many places
    gets them.
    """

    def __init__(self) -> None:
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._where: dict[PartId, ReplicaId] = {}
        self._wants: dict[PartId, Want] = {}  # of those that wait
        self._line: list[tuple[float, PartId]] = []  # sorted

    def open(self, replica: ReplicaId, num_places: int, num_blocks: int) -> None:
        """Adds a replica that takes requests from now on; its memory is empty."""
        assert replica not in self._replicas
        self._replicas[replica] = _Replica(num_places, num_blocks, PrefixRecord(num_blocks))

    def close(self, replica: ReplicaId) -> list[PartId]:
        """Removes a replica, and returns the parts whose claims go with it; none if not open."""
        gone = self._replicas.pop(replica, None)
        lost = list(gone.claims) if gone else []
        for part in lost:
            del self._where[part]
        return lost

    def drain(self, replica: ReplicaId) -> None:
        """Lets a replica take no more requests; those that it has keep their places."""
        self._replicas[replica].takes_more = False

    def set_free_blocks(self, replica: ReplicaId, blocks_free: int) -> None:
        """Takes the number of free blocks that a replica's engine reports."""
        self._replicas[replica].blocks_free = blocks_free

    def ask(self, part: PartId, want: Want) -> None:
        """Puts a request in line; `next` says when its turn comes."""
        assert part not in self._wants and part not in self._where
        self._wants[part] = want
        bisect.insort(self._line, (want.due, part))

    def leave(self, part: PartId) -> Want | None:
        """Gives up waiting; returns the want, or None if it does not wait, since it was placed."""
        if (want := self._wants.pop(part, None)) is not None:
            del self._line[bisect.bisect_left(self._line, (want.due, part))]
        return want

    def release(self, part: PartId) -> None:
        """The engine has let go of one of its sequences; nothing if all are gone already."""
        if (place := self._where.get(part)) is None:
            return
        replica = self._replicas[place]
        claim = replica.claims[part]
        claim.num_left -= 1
        replica.num_taken -= claim.num_held
        claim.num_held = min(claim.num_held, claim.num_left)
        replica.num_taken += claim.num_held
        if not claim.num_left:
            del replica.claims[part], self._where[part]

    def next(self) -> Placed | None:
        """Claims places for the first in line; None if it has to wait, or nobody does."""
        if not self._line:
            return None
        _, part = self._line[0]
        want = self._wants[part]
        number = self._choose(want)
        if number is None:
            return None
        del self._line[0], self._wants[part]
        replica = self._replicas[number]
        num_shared = replica.prefixes.num_shared(want.names)
        share = replica.share(want)
        replica.num_taken += share
        assert replica.num_taken <= replica.num_places
        replica.claims[part] = _Claim(want.num_places, share)
        replica.blocks_free -= max(0, want.num_blocks - num_shared)
        replica.prefixes.note(want.names)
        self._where[part] = number
        return Placed(part, number, num_shared)

    def replica_of(self, part: PartId) -> ReplicaId | None:
        """None while it waits, and once it is gone."""
        return self._where.get(part)

    def waiting(self) -> list[PartId]:
        """The line, first one first."""
        return [part for _, part in self._line]

    def num_taken(self, replica: ReplicaId) -> int:
        """Places of a replica that are claimed; 0 if it is not open."""
        return self._replicas[replica].num_taken if replica in self._replicas else 0

    def _choose(self, want: Want) -> ReplicaId | None:
        able = {number: it for number, it in self._replicas.items() if it.has_room(want)}
        if not able:
            return None
        least = min(it.num_taken for it in able.values())

        def worth(number: ReplicaId) -> tuple[bool, int, int, int, int]:
            it = able[number]
            shared = it.prefixes.num_shared(want.names)
            has_memory = it.blocks_free >= want.num_blocks - shared
            # A short prefix, as of a system prompt that all have, must not draw everybody to one
            # replica, nor any prefix to one that is far busier than another: it soon is at both.
            is_long = 2 * shared >= len(want.names)
            is_busy = 2 * (it.num_taken - least) > it.num_places
            counted = shared if is_long and not is_busy else 0
            return has_memory, counted, -it.num_taken, shared, it.blocks_free

        return max(able, key=worth)
