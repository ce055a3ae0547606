"""Output does not depend on how its steps were cut, nor on how often it was preempted."""

from array import array
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from headrace_common.config.settings import ModelConfig, SchedulerConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import NewSequence, Submit
from headrace_common.plan import Chunk, StepPlan
from headrace_common.sampling import Sampling
from headrace_engine.load import load
from headrace_engine.runner.runner import Runner
from headrace_engine.scheduler.scheduler import Scheduler
from tests.kernels.own_kernels import needs_own_kernels
from tests.scheduler.builders import Engine
from tools.harness.device import DEVICE
from tools.harness.tiny_models import make_tiny_model

GREEDY = Sampling(temperature=0, max_tokens=60, ignore_eos=True)
NUM_STREAMS = 32
MIROSTAT = ("temperature", "mirostat")


class Case(NamedTuple):
    """bfloat16 in sizes that a processor's matrix unit takes, where there is one."""

    dtype: torch.dtype
    head_dim: int
    block_size: int
    few: int
    """Blocks in which so many streams get in each other's way."""
    kv_cache_dtype: str = "auto"

    @property
    def position_bytes(self) -> int:
        is_int8 = self.kv_cache_dtype == "int8"
        each = self.head_dim + 4 if is_int8 else self.head_dim * self.dtype.itemsize
        return 3 * 2 * 2 * each  # layers, kv heads, keys and values


CASES = [
    Case(torch.float32, 16, 16, 11),
    pytest.param(Case(torch.bfloat16, 32, 32, 6), marks=needs_own_kernels),
    pytest.param(Case(torch.bfloat16, 32, 32, 6, "int8"), marks=needs_own_kernels),
]
NO_TARGET = {"max_stall_ms": "off", "max_step_ms": "off"}


class RealEngine(Engine):
    """Computes its steps with a runner and lets the clock say that each took `seconds`."""

    def __init__(self, scheduler: Scheduler, runner: Runner, seconds: float) -> None:
        super().__init__(scheduler)
        self.num_begun: Counter[int] = Counter()
        self.num_steps = 0
        self.lane_id = runner.lane.traits.id
        self.chunks: list[Chunk] = []
        self._runner, self._seconds = runner, seconds

    def commit(self, plan: StepPlan, *_: object) -> None:
        self.num_begun.update(begin.sequence_id for begin in plan.begun)
        self.num_steps += 1
        self.chunks += plan.chunks
        self.now += self._seconds
        self.scheduler.commit(plan, self._runner.launch(plan).result(), self.now)
        self.take()


def served(
    folder: Path,
    case: Case,
    num_blocks: int = 100,
    num_streams: int = NUM_STREAMS,
    sampling: Sampling = GREEDY,
    lane: str = "auto",
    **scheduler: object,
) -> RealEngine:
    config = ModelConfig(
        model=str(folder),
        lane=lane,  # type: ignore[arg-type]
        device=DEVICE,
        threads=1,
        max_model_len=160,
        block_size=case.block_size,
        kv_cache_dtype=case.kv_cache_dtype,
        kv_cache_memory_bytes=num_blocks * case.block_size * case.position_bytes,
        scheduler=SchedulerConfig(max_num_seqs=NUM_STREAMS, **scheduler),  # type: ignore[arg-type]
    )
    runner, real, *_ = load(config)
    engine = RealEngine(real, runner, seconds=0.01)
    for number in range(num_streams):
        prompt = array("i", range(number + 1, number + 12 + 9 * (number % 5))).tobytes()
        sequence = NewSequence(SequenceId(number), 0, 0)
        engine.add(Submit(StreamId(str(number)), (prompt,), (sequence,), sampling, arrival=0.0))
    engine.run()
    return engine


@pytest.mark.parametrize("case", CASES, ids=str)
def test_greedy_output_is_the_same_with_the_budget_on_off_and_after_ten_preemptions(
    case: Case, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "tiny", head_dim=case.head_dim, dtype=case.dtype)
    whole = served(folder, case, max_stall_ms="off", max_step_ms="off")
    assert len(whole.tokens) == NUM_STREAMS and set(map(len, whole.tokens.values())) == {60}
    cut = served(folder, case, max_stall_ms=0.5, max_step_ms=1.0)
    # On a GPU, a step of a tiny model takes the same time for any number of tokens.
    assert cut.num_steps > whole.num_steps or DEVICE == "cuda"
    assert cut.tokens == whole.tokens
    short_of_memory = served(folder, case, num_blocks=case.few)
    assert sum(short_of_memory.num_begun.values()) - NUM_STREAMS >= 10
    assert short_of_memory.tokens == whole.tokens


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"mirostat": 1, "samplers": MIROSTAT}, marks=pytest.mark.slow),
        {"mirostat": 2, "samplers": MIROSTAT},
        {"dry_multiplier": 2.0, "dry_allowed_length": 0, "samplers": ("dry", "temperature")},
    ],
    ids=["mirostat 1", "mirostat 2", "dry"],
)
def test_samplers_go_on_with_their_state_after_ten_preemptions(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    case = Case(torch.float32, 16, 16, 11)
    folder = make_tiny_model(tmp_path / "tiny")
    sampling = Sampling(seed=5, max_tokens=60, ignore_eos=True, **asked)
    whole = served(folder, case, sampling=sampling, **NO_TARGET)
    pressed = served(folder, case, case.few, sampling=sampling, **NO_TARGET)
    assert sum(pressed.num_begun.values()) - NUM_STREAMS >= 10
    assert pressed.tokens == whole.tokens


@pytest.mark.parametrize(
    ("architecture", "lane"),
    [
        ("Qwen3MoeForCausalLM", "native-text"),
        ("Gemma3ForCausalLM", "native-text"),
        ("GptOssForCausalLM", "native-text"),
        ("Olmo2ForCausalLM", "generic-text"),
    ],
)
def test_other_models_on_blocks_say_the_same_in_small_steps_and_after_ten_preemptions(
    architecture: str, lane: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "tiny", architecture, pad_token_id=0)
    case = Case(torch.float32, 16, 16, 11)
    whole = served(folder, case, num_streams=16, lane=lane, **NO_TARGET)
    assert whole.lane_id == lane and set(map(len, whole.tokens.values())) == {60}
    pressed = served(folder, case, case.few, 16, lane=lane, max_step_tokens=40, **NO_TARGET)
    assert sum(pressed.num_begun.values()) - 16 >= 10
    assert pressed.tokens == whole.tokens
