"""One engine of several that run a model, and what all of them say as one engine."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from headrace.core.messages import Ready, Status, Submit
from headrace.engine.client import EngineClient, EngineUp


class Replica:
    """The state of one replica; `up` is None while it is down."""

    def __init__(self, number: int, client: EngineClient) -> None:
        self.number = number
        self.client = client
        self.up: EngineUp | None = None
        self.was_up = asyncio.Event()
        self.emptied = asyncio.Event()  # no place was claimed when it was last looked at
        self.status: Status | None = None  # of its engine's present life
        self.num_starts = 0
        self.num_taken = 0  # places that are claimed
        self.rested_at = 0.0  # when it was last seen with something to do

    def came_up(self, news: EngineUp, now: float) -> None:
        self.up, self.status, self.rested_at = news, None, now
        self.num_starts += 1
        self.was_up.set()


class Retired:
    """Counts of engines that have died, kept so that totals never go back."""

    def __init__(self) -> None:
        self.num_steps = self.num_preemptions = 0
        self.missed: Counter[str] = Counter()

    def count(self, replica: Replica) -> None:
        status, replica.status = replica.status, None
        if status is not None:
            self.num_steps += status.num_steps
            self.num_preemptions += status.num_preemptions
            self.missed += Counter(status.missed)


def ready_of(known: Iterable[Ready]) -> Ready:
    """Limits of all of them; of a request those of the smallest, since it may move there."""
    first, *others = known
    whole, layout = first, first.layout
    for it in others:
        layout = msgspec.structs.replace(
            layout,
            num_blocks=layout.num_blocks + it.layout.num_blocks,
            num_slots=layout.num_slots + it.layout.num_slots,
            num_snapshots=layout.num_snapshots + it.layout.num_snapshots,
        )
        whole = msgspec.structs.replace(
            whole,
            max_num_seqs=whole.max_num_seqs + it.max_num_seqs,
            max_model_len=min(whole.max_model_len, it.max_model_len),
            layout=layout,
        )
    return whole


def status_of(known: Sequence[Status], retired: Retired, line: Sequence[Submit]) -> Status:
    """Their sum, and behind their queues the `line` before all of them."""
    missed = sum((Counter(it.missed) for it in known), retired.missed)
    heads = tuple(part.sequences[0].sequence_id for part in line)
    return Status(
        num_running=sum(it.num_running for it in known),
        num_waiting=sum(it.num_waiting for it in known) + sum(len(it.sequences) for it in line),
        num_waiting_tokens=sum(it.num_waiting_tokens for it in known)
        + sum(len(part.prompts[0]) // 4 for part in line),
        blocks_free=sum(it.blocks_free for it in known),
        slots_free=sum(it.slots_free for it in known),
        num_steps=sum(it.num_steps for it in known) + retired.num_steps,
        queue=tuple(id for it in known for id in it.queue) + heads,
        prompt_tokens_per_s=sum(it.prompt_tokens_per_s for it in known),
        missed=dict(missed),
        num_preemptions=sum(it.num_preemptions for it in known) + retired.num_preemptions,
    )
