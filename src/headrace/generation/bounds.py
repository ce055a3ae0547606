"""What may be admitted now: the server's state, and how many may wait."""

from collections.abc import Iterable

from headrace.core.errors import RequestError
from headrace.generation.served import ServedModel
from headrace.generation.stream import Stream

_OVERLOADED_RETRY_S = 5.0


def check_can_serve(state: str) -> None:
    """RequestError unless the engine runs or is about to run again."""
    if state == "loading":
        raise RequestError("model_loading", "Loading model", retry_after_s=2)
    if state == "draining":
        raise RequestError("server_shutdown", "The server is shutting down.", retry_after_s=5)
    if state == "dead":
        raise RequestError("engine_failed", "The engine stopped for good.", retry_after_s=30)


def check_queue(
    streams: Iterable[Stream], num_opening: int, model: ServedModel, bound: int
) -> None:
    """Refuses what would wait behind a full queue; to take a free place is no waiting.

    A request of many choices may fill the queue beyond its bound, or it could never be served.
    """
    num_waiting = num_live = num_opening
    for stream in streams:
        num_waiting += stream.num_waiting
        num_live += stream.num_live
    has_place = model.ready is not None and num_live < model.ready.max_num_seqs
    if num_waiting >= bound and not has_place:
        raise RequestError(
            "server_overloaded",
            f"{num_waiting} choices are waiting, and --max-num-queued-reqs is {bound}; "
            "try again later.",
            retry_after_s=_OVERLOADED_RETRY_S,
        )
