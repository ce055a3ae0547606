"""Tests the choice of streams to evict: by age, then the least recently read ones."""

from headrace.streams.store import Retention, Totals
from headrace.streams.stores.sweep import Kept, choose
from headrace_common.ids import StreamId

NOW = 1000.0


def kept(stream_id: str, ended_at: float | None, read_at: float, num_bytes: int = 10) -> Kept:
    return Kept(StreamId(stream_id), num_bytes, read_at, ended_at)


def evicted(*streams: Kept, **limits: float) -> str:
    return "".join(choose(streams, Retention(**limits), NOW)[0])


def test_a_stream_that_is_too_old_is_evicted_even_if_read_recently() -> None:
    streams = kept("a", 100, 990), kept("b", 950, 960), kept("c", None, 1)
    assert evicted(*streams, keep_s=100) == "a"


def test_streams_evicted_by_age_do_not_count_toward_the_cap() -> None:
    streams = kept("a", 100, 990), kept("b", 950, 960)
    assert evicted(*streams, keep_s=100, max_streams=1) == "a"


def test_the_least_recently_read_streams_are_evicted_until_the_cap_holds() -> None:
    streams = kept("a", 1, 3), kept("b", 1, 1), kept("c", 1, 2)
    assert evicted(*streams, keep_s=NOW, max_streams=2) == "b"
    assert evicted(*streams, keep_s=NOW, max_bytes=10) == "bc"
    assert evicted(*streams, keep_s=NOW, max_bytes=0) == "bca"


def test_live_streams_are_kept_and_count_toward_the_cap() -> None:
    streams = [kept("a", None, 1), kept("b", 1, 2), kept("c", None, 3)]
    chosen, left = choose(streams, Retention(keep_s=NOW, max_streams=1), NOW)
    assert (chosen, left) == (["b"], Totals(num_live=2, num_streams=2, num_bytes=20))
