"""Checks that clients saw parts of each final log, and that later reads never contain less.

Each observation states when it began and ended, and which events it returned. All of the following
must hold, whichever gateways answered:

1. Each observation is a part of the final log, unchanged.
2. A snapshot that began after another observation had ended contains at least as many events.
3. A stream that was seen once is found until it is deleted.
4. Only clients with the key of a stream see the stream.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from stress.compare import Violation

_MAX_SHOWN = 5


class Observation(msgspec.Struct, frozen=True):
    """Events of one log, as received by one client.

    `start` is the number of the first event, and `hashes` has one entry for each event. A snapshot
    contains all events that existed when it was made. `via` names the gateway or the balancer.
    """

    stream_id: str
    began: float
    ended: float
    start: int
    hashes: tuple[bytes, ...]
    is_snapshot: bool = False
    via: str = ""
    # Whether the client had the key of another owner.
    is_foreign: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)


def hash_of(event: Mapping[str, Any]) -> bytes:
    """Return a hash of everything that an event contains."""
    return hashlib.sha256(msgspec.json.encode(event, order="sorted")).digest()[:8]


def check(
    observations: Iterable[Observation], finals: Mapping[str, Sequence[bytes]]
) -> list[Violation]:
    """Return the violations; `finals` has the hashes of the final log of each stream."""
    by_stream: defaultdict[str, list[Observation]] = defaultdict(list)
    found = []
    for seen in observations:
        if seen.is_foreign:
            what = f"{seen.stream_id}: a client with another key saw {len(seen.hashes)} events"
            found.append(Violation("wrong failure", 1, what))
        else:
            by_stream[seen.stream_id].append(seen)
    for stream_id, seen_here in by_stream.items():
        if (final := finals.get(stream_id)) is not None:
            found += _is_part(seen_here, final)
        found += _only_grows(seen_here)
    return found


def _is_part(seen_here: Sequence[Observation], final: Sequence[bytes]) -> list[Violation]:
    found = []
    for seen in seen_here:
        if tuple(final[seen.start : seen.end]) == seen.hashes:
            continue
        if seen.end > len(final):
            what = f"saw event {seen.end - 1}, but the log ends at {len(final) - 1}"
            found.append(Violation("lost", seen.end - len(final), _line(seen, what)))
        else:
            pairs = zip(seen.hashes, final[seen.start :], strict=False)
            number = next(i for i, (one, other) in enumerate(pairs) if one != other)
            what = f"event {seen.start + number} differs from the final log"
            found.append(Violation("changed", 1, _line(seen, what)))
    return found[:_MAX_SHOWN]


def _only_grows(seen_here: Sequence[Observation]) -> list[Violation]:
    """Check each snapshot against everything that had been received before it began."""
    ends = sorted((seen.ended, seen.end) for seen in seen_here)
    found: list[Violation] = []
    known, number = 0, 0
    for seen in sorted((it for it in seen_here if it.is_snapshot), key=lambda it: it.began):
        while number < len(ends) and ends[number][0] < seen.began:
            known = max(known, ends[number][1])
            number += 1
        if seen.end < known:
            what = f"a snapshot has {seen.end} events after a client had received {known}"
            found.append(Violation("lost", known - seen.end, _line(seen, what)))
    return found[:_MAX_SHOWN]


def _line(seen: Observation, what: str) -> str:
    times = f"{seen.began:.3f} to {seen.ended:.3f}"
    return f"{seen.stream_id} via {seen.via or 'the balancer'}, {times}: {what}"
