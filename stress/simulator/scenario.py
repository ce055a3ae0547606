"""The whole input of a schedule, drawn from a seed: requests, faults, limits and layout."""

from array import array
from dataclasses import dataclass, field
from random import Random

import msgspec

from headrace.generation.submission import salt_of
from headrace_common.adapter import Adapter
from headrace_common.config.settings import SchedulerConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import Cancel, FinishReason, NewSequence, Submit
from headrace_common.plan import EncoderInput, PromptInputs
from headrace_common.request import BACKGROUND
from headrace_common.sampling import Sampling
from headrace_engine.scheduler.budget import Limits
from stress.simulator.fake_disk import DiskFaults

END_TOKEN = 2
HUGE = 600_000
ADAPTER = Adapter("adapter", "", "0123456789abcdef")
# The end of an encoder input on which every token depends.
ALL = 1 << 40


@dataclass
class Faults:
    """How often each fault happens, and which sequences always fail."""

    step_error: float = 0.0
    slow_step: float = 0.0
    out_of_memory: float = 0.0
    death: float = 0.0
    # Every step that contains one of these sequences fails.
    poisoned: set[int] = field(default_factory=set)
    # Maps a sequence to the number of tokens after which its row fails.
    row_error_at: dict[int, int] = field(default_factory=dict)


@dataclass
class Scenario:
    seed: int
    layout: MemoryLayout
    limits: Limits
    config: SchedulerConfig
    depth: int
    submits: list[Submit]
    cancels: list[tuple[float, Cancel]]
    faults: Faults
    # The fraction of speculative tokens that are correct.
    right_guesses: float = 0.0
    disk: DiskFaults | None = None


def make_scenario(seed: int) -> Scenario:
    rng = Random(seed)
    is_huge = rng.random() < 0.01
    layout = _layout(rng, is_huge)
    limits = Limits(
        max_num_seqs=layout.num_slots or rng.choice([1, 2, 3, 8]),
        max_step_tokens=65536 if is_huge else rng.choice([1, 4, 8, 16, 32, 64]),
        max_model_len=1_000_000 if is_huge else rng.choice([24, 50, 90]),
        max_stall_s=None if is_huge else rng.choice([None, 0.03, 0.1]),
        max_step_s=None if is_huge else rng.choice([None, 0.2, 1.0]),
        max_guess=Random(seed + 4).choice([0, 1, 4, 8]),
    )
    if limits.max_guess and layout.num_blocks:
        max_draft = Random(seed + 8).choice([0, 30, 2_000_000])
        limits = msgspec.structs.replace(limits, max_draft=max_draft)
    config = SchedulerConfig(
        patience=rng.choice([0.0, 4.0, 100.0]), max_open_prompts=rng.choice([1, 2, 4])
    )
    if limits.max_stall_s is not None and Random(seed + 7).random() < 0.5:
        limits = msgspec.structs.replace(limits, is_default=True)
    submits = _with_inputs(Random(seed + 2), _submits(rng, is_huge), is_dense=not layout.num_blocks)
    submits = _with_batches(Random(seed + 6), submits)
    return Scenario(
        seed,
        layout,
        limits,
        config,
        depth=rng.choice([1, 1, 2]),
        submits=submits,
        cancels=_cancels(rng, submits),
        faults=_faults(rng, submits),
        disk=_disk(Random(seed + 5), layout),
        right_guesses=Random(seed + 3).choice([0.0, 0.5, 0.9, 1.0]),
    )


def _disk(rng: Random, layout: MemoryLayout) -> DiskFaults | None:
    """In half of the schedules, return a disk with few blocks per segment, else None."""
    if not layout.num_blocks or layout.block_size > 1000 or rng.random() < 0.5:
        return None
    blocks_per_segment = rng.choice([1, 2, 4])
    if layout.num_slots:
        blocks_per_segment = layout.snapshot_every // layout.block_size
    return DiskFaults(
        blocks_per_segment,
        rng.choice([1e-5, 1e-3, 0.02]),
        slow_read=rng.choice([0.0, 0.0, 0.1, 1.0]),
        lost_read=rng.choice([0.0, 0.0, 0.2]),
        lost_write=rng.choice([0.0, 0.0, 0.3]),
    )


def _layout(rng: Random, is_huge: bool) -> MemoryLayout:
    kind = rng.choice(["blocks", "blocks", "blocks", "hybrid", "dense"])
    num_slots = rng.choice([1, 2, 4, 8])
    if kind == "dense":
        return MemoryLayout(
            num_slots=num_slots, max_positions=HUGE + 100 if is_huge else 60, forward_per_chunk=True
        )
    if is_huge:
        return MemoryLayout(block_size=8192, num_blocks=rng.choice([80, 160]))
    block_size = rng.choice([1, 2, 4, 16])
    num_blocks = rng.choice([4, 6, 10, 24]) * (4 if block_size < 4 else 1)
    if kind == "blocks":
        return MemoryLayout(block_size=block_size, num_blocks=num_blocks)
    return MemoryLayout(
        block_size=block_size,
        num_blocks=num_blocks,
        num_slots=num_slots,
        num_snapshots=rng.choice([0, 1, 2, 6]),
        snapshot_every=block_size * rng.choice([1, 2, 4]),
    )


def _submits(rng: Random, is_huge: bool) -> list[Submit]:
    bases = [[rng.randrange(3, 20) for _ in range(120)] for _ in range(3)]
    submits: list[Submit] = []
    arrival = number = 0
    # All requests arrive at the same time, close together, or one by one.
    pace = rng.choice([0.0, 0.02, 0.3])
    # A small limit makes most prompts short.
    prompt_cap = rng.choice([4, 12, 30, 80])
    for stream in range(rng.choice([1, 2, 3, 3, 4, 8])):
        arrival += rng.random() * pace
        prompts = [_prompt(rng, bases, prompt_cap) for _ in range(rng.choice([1, 1, 1, 2]))]
        if is_huge and stream == 0:
            prompts = [array("i", [7]) * HUGE]
        sequences = []
        for index in range(len(prompts)):
            for choice in range(rng.choice([1, 1, 1, 2, 3, 8])):
                sequences.append(NewSequence(SequenceId(number), index, choice))
                number += 1
        submits.append(
            Submit(
                StreamId(str(stream)),
                tuple(prompt.tobytes() for prompt in prompts),
                tuple(sequences),
                _sampling(rng, is_huge),
                arrival,
                priority=rng.choice([0, 0, 0, 0, -1, 1, 3]),
                salt=salt_of("", "", adapter := rng.choice([None, None, None, ADAPTER])),
                adapter=adapter,
                use_prefix=rng.random() < 0.9,
                client=rng.choice(["", "", "a", "b"]),
            )
        )
    return submits


def _with_batches(rng: Random, submits: list[Submit]) -> list[Submit]:
    """In half of the schedules, turns some of the streams into requests of batches."""
    share = rng.choice([0.0, 0.0, 0.3, 0.7])
    are_lines = (rng.random() < share for _ in submits)
    return [
        msgspec.structs.replace(submit, priority=BACKGROUND) if is_line else submit
        for submit, is_line in zip(submits, are_lines, strict=True)
    ]


def _with_inputs(rng: Random, submits: list[Submit], is_dense: bool) -> list[Submit]:
    """In half of the schedules, adds sources to encode, or images among the tokens of prompts."""
    if rng.random() < 0.5:
        return submits
    make = _source if is_dense and rng.random() < 0.5 else _images
    share, added = rng.choice([0.3, 1.0]), []
    for submit in submits:
        has_inputs = rng.random() < share and submit.sampling.num_prompt_logprobs is None
        inputs = tuple(make(rng, len(p) // 4) for p in submit.prompts) if has_inputs else ()
        added.append(msgspec.structs.replace(submit, inputs=inputs))
    return added


def _source(rng: Random, num_tokens: int) -> PromptInputs:
    size, num_units = rng.choice([1, 7, 50, 400]), rng.choice([1, 2, 6])
    is_whole = rng.random() < 0.3
    return PromptInputs((EncoderInput(0, ALL, size, num_units, is_whole, is_source=True),))


def _images(rng: Random, num_tokens: int) -> PromptInputs:
    works, spans, position = [], [], 0
    is_whole, is_span = rng.random() < 0.3, rng.random() < 0.5
    for _ in range(rng.choice([0, 1, 1, 3])):
        start = position + rng.choice([0, 0, 1, 5])
        position = start + rng.choice([1, 3, 10])
        if position > num_tokens:
            break
        units = 1 if is_whole else rng.choice([1, 2, 6])
        size = rng.choice([4, 60, 300])
        # Images with the same mark have the same length.
        mark = bytes([10 * (position - start) + rng.randrange(3)])
        works.append(EncoderInput(start, position, size, units, is_whole, mark=mark))
        if is_span:
            spans.append((start, position))
    return PromptInputs(tuple(works), tuple(spans))


def _prompt(rng: Random, bases: list[list[int]], cap: int) -> "array[int]":
    if rng.random() < 0.02:
        return array("i")
    head = rng.choice(bases)[: rng.randrange(0, cap + 1)]
    tail = [rng.randrange(3, 20) for _ in range(rng.choice([0, 0, 1, 5]))]
    return array("i", (head + tail) or [5])


def _sampling(rng: Random, is_huge: bool) -> Sampling:
    return Sampling(
        max_tokens=rng.choice([0, 1, 2, 5, 9, 20] if is_huge else [0, 1, 2, 5, 9, 20, 50, None]),
        end_token_ids=(END_TOKEN,),
        seed=rng.randrange(1 << 30),
        ignore_eos=rng.random() < 0.3,
        num_prompt_logprobs=1 if rng.random() < 0.1 and not is_huge else None,
    )


def _cancels(rng: Random, submits: list[Submit]) -> list[tuple[float, Cancel]]:
    cancels = []
    share = rng.choice([0.0, 0.2, 0.6])
    for submit in submits:
        for new in submit.sequences:
            if rng.random() < share:
                at = submit.arrival + rng.random() * rng.choice([0.0, 0.1, 2.0])
                finish = rng.choice([FinishReason.CANCELLED, FinishReason.STOP])
                ids = [n.sequence_id for n in submit.sequences] if rng.random() < 0.3 else []
                cancels.append((at, Cancel((new.sequence_id, *ids), finish)))
    return sorted(cancels, key=lambda item: item[0])


def _faults(rng: Random, submits: list[Submit]) -> Faults:
    ids = [new.sequence_id for submit in submits for new in submit.sequences]
    faults = Faults()
    if rng.random() < 0.4:
        faults.row_error_at = {i: rng.randrange(6) for i in ids if rng.random() < 0.2}
    if rng.random() < 0.3:
        faults.step_error = rng.choice([0.02, 0.2])
    if rng.random() < 0.2:
        faults.poisoned = {i for i in ids if rng.random() < 0.15}
    if rng.random() < 0.2:
        faults.death = 0.03
    if rng.random() < 0.1:
        faults.out_of_memory = 0.05
    if rng.random() < 0.3:
        faults.slow_step = 0.1
    return faults
