"""Assigns requests to replicas in order of arrival and priority. Pure: no clock, no engine.

A replica has `max_num_seqs` sequence slots, each for one running sequence. A request reserves
slots on one replica. The slots become free again when the engine has ended the request's
sequences. A record of earlier assignments predicts where a prompt's prefix is cached. The record
forgets the least recently used prefixes first.
"""

import bisect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ReplicaId = int
# Identifies a part: one prompt of a request, with all choices of this prompt.
PartId = int


class PlacementRequest(NamedTuple):
    """The resources that one prompt needs: sequence slots for the choices, and blocks of memory.

    `names` identify the full blocks of the prompt (see `prefix_names`). `due` is the arrival
    time, shifted by the priority; the request with the lowest `due` is assigned first.
    """

    num_places: int
    num_blocks: int
    names: tuple[int, ...] = ()
    due: float = 0.0


class Assignment(NamedTuple):
    """The assignment of a part to a replica.

    The first `num_shared` blocks of the prompt are probably cached on the replica.
    """

    part: PartId
    replica: ReplicaId
    num_shared: int


def prefix_names(token_ids: bytes, block_size: int, salt: str) -> tuple[int, ...]:
    """Return one hash per full block of a prompt; each hash also covers all earlier blocks.

    `token_ids` are packed int32. Two prompts with a common prefix have the same hashes for the
    blocks of this prefix. The hashes are only valid in this process. A hash collision can cost
    time, but never gives a wrong answer.
    """
    size, name = 4 * block_size, hash(salt)
    names = []
    for end in range(size, len(token_ids) + 1, size):
        name = hash((name, token_ids[end - size : end]))
        names.append(name)
    return tuple(names)


class PrefixRecord:
    """Records up to `most` blocks that a replica probably has in its cache."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: OrderedDict[int, None] = OrderedDict()

    def num_shared(self, names: Sequence[int]) -> int:
        """Return how many blocks at the start of a prompt are probably cached."""
        for number, name in enumerate(names):
            if name not in self._names:
                return number
        return len(names)

    def note(self, names: Sequence[int]) -> None:
        """Record a use of these blocks. The last blocks of a prompt are forgotten first."""
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._most:
            self._names.popitem(last=False)


@dataclass(slots=True)
class _Replica:
    num_places: int
    # The last number that the engine reported, minus the blocks of requests that were assigned
    # after this report.
    blocks_free: int
    prefixes: PrefixRecord
    takes_more: bool = True
    num_taken: int = 0
    reservations: dict[PartId, "_Reservation"] = field(default_factory=dict)

    def has_room(self, request: PlacementRequest) -> bool:
        return self.takes_more and self.num_taken + self.num_needed(request) <= self.num_places

    def num_needed(self, request: PlacementRequest) -> int:
        """Return the number of sequence slots that a request needs on this replica.

        If a request has more choices than the replica has slots, the request needs all slots. The
        engine queues the remaining choices.
        """
        return min(request.num_places, self.num_places)


@dataclass(slots=True)
class _Reservation:
    # The number of sequences that have not ended in the engine.
    num_left: int
    # The number of reserved sequence slots, at most `num_left`.
    num_reserved: int


class Placement:
    """Assigns queued requests to replicas.

    The caller reports each event, and then calls `next` until the result is None. No request
    overtakes the first request in the queue, even if a replica has room for the later request. So
    small requests cannot starve a request that needs many slots.
    """

    def __init__(self) -> None:
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._assigned: dict[PartId, ReplicaId] = {}
        # The queued requests. Each key is the id of a part.
        self._requests: dict[PartId, PlacementRequest] = {}
        # Pairs of a due time and the id of a part, sorted by due time.
        self._queue: list[tuple[float, PartId]] = []

    def open(self, replica: ReplicaId, num_places: int, num_blocks: int) -> None:
        """Add a replica with empty memory that accepts requests."""
        assert replica not in self._replicas
        self._replicas[replica] = _Replica(num_places, num_blocks, PrefixRecord(num_blocks))

    def close(self, replica: ReplicaId) -> list[PartId]:
        """Remove a replica and return the parts that were assigned to the replica.

        An unknown replica is ignored.
        """
        gone = self._replicas.pop(replica, None)
        lost = list(gone.reservations) if gone else []
        for part in lost:
            del self._assigned[part]
        return lost

    def drain(self, replica: ReplicaId) -> None:
        """Stop assigning requests to a replica; its current requests keep their slots."""
        self._replicas[replica].takes_more = False

    def set_free_blocks(self, replica: ReplicaId, blocks_free: int) -> None:
        """Set the number of free blocks that the replica's engine has reported."""
        self._replicas[replica].blocks_free = blocks_free

    def ask(self, part: PartId, request: PlacementRequest) -> None:
        """Queue a request until `next` assigns it to a replica."""
        assert part not in self._requests and part not in self._assigned
        self._requests[part] = request
        bisect.insort(self._queue, (request.due, part))

    def leave(self, part: PartId) -> PlacementRequest | None:
        """Remove a request from the queue and return the request.

        Returns None if the request is not queued.
        """
        if (request := self._requests.pop(part, None)) is not None:
            del self._queue[bisect.bisect_left(self._queue, (request.due, part))]
        return request

    def release(self, part: PartId) -> None:
        """Record that the engine has ended one sequence of a part; an unknown part is ignored."""
        if (number := self._assigned.get(part)) is None:
            return
        replica = self._replicas[number]
        reservation = replica.reservations[part]
        reservation.num_left -= 1
        replica.num_taken -= reservation.num_reserved
        reservation.num_reserved = min(reservation.num_reserved, reservation.num_left)
        replica.num_taken += reservation.num_reserved
        if not reservation.num_left:
            del replica.reservations[part], self._assigned[part]

    def next(self) -> Assignment | None:
        """Assign the first queued request and return the assignment.

        Returns None if the queue is empty or no replica has room.
        """
        if not self._queue:
            return None
        _, part = self._queue[0]
        request = self._requests[part]
        number = self._choose(request)
        if number is None:
            return None
        del self._queue[0], self._requests[part]
        replica = self._replicas[number]
        num_shared = replica.prefixes.num_shared(request.names)
        num_needed = replica.num_needed(request)
        replica.num_taken += num_needed
        assert replica.num_taken <= replica.num_places
        replica.reservations[part] = _Reservation(request.num_places, num_needed)
        replica.blocks_free -= max(0, request.num_blocks - num_shared)
        replica.prefixes.note(request.names)
        self._assigned[part] = number
        return Assignment(part, number, num_shared)

    def replica_of(self, part: PartId) -> ReplicaId | None:
        """Return the replica that runs a part; None if the part waits or has ended."""
        return self._assigned.get(part)

    def waiting(self) -> list[PartId]:
        """Return the queued parts in the order in which they will be assigned."""
        return [part for _, part in self._queue]

    def num_taken(self, replica: ReplicaId) -> int:
        """Return the number of reserved sequence slots of a replica; 0 for an unknown replica."""
        return self._replicas[replica].num_taken if replica in self._replicas else 0

    def _choose(self, request: PlacementRequest) -> ReplicaId | None:
        candidates = {number: it for number, it in self._replicas.items() if it.has_room(request)}
        if not candidates:
            return None
        least = min(it.num_taken for it in candidates.values())

        def preference(number: ReplicaId) -> tuple[bool, int, int, int, int]:
            it = candidates[number]
            shared = it.prefixes.num_shared(request.names)
            has_memory = it.blocks_free >= request.num_blocks - shared
            # Prefer the replica that has cached the longest part of the prompt, with two
            # exceptions. A short prefix does not count: all requests may begin with the same
            # system prompt, and must not all go to one replica. A prefix does not count either if
            # its replica is far busier than another replica: soon both replicas will have cached
            # the prefix.
            is_long = 2 * shared >= len(request.names)
            is_busy = 2 * (it.num_taken - least) > it.num_places
            counted = shared if is_long and not is_busy else 0
            return has_memory, counted, -it.num_taken, shared, it.blocks_free

        return max(candidates, key=preference)
