"""Runs sequences over a Runner in plain loops, with no scheduler and blocks dealt in order."""

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import ModelConfig, SchedulerConfig
from headrace_common.ids import SequenceId, SlotId
from headrace_common.layout import MemoryLayout
from headrace_common.plan import Begin, Chunk, Drawn, StepPlan
from headrace_common.sampling import Sampling
from headrace_engine.models.registry import family
from headrace_engine.runner.attention import NaiveAttention
from headrace_engine.runner.inputs import pack
from headrace_engine.runner.load import load_runner
from headrace_engine.runner.runner import Runner
from headrace_engine.runner.storage import CacheStorage
from headrace_engine.weights.weights import load_weights
from headrace_kernels import choose_instructions
from tools.harness.device import DEVICE

GREEDY = Sampling(temperature=0)
# A GPU adds in another order than the CPU, and models of random weights amplify the difference.
# In float32, the logits of some tiny models err by 7e-4 compared with float64.
ROUNDING = 1 if DEVICE == "cpu" else 10


def tiny_runner(folder: Path, lane: str = "auto", **config: object) -> Runner:
    """A loaded runner with one thread and room for eight sequences."""
    settings = {
        "device": DEVICE,
        "threads": 1,
        "lane": lane,
        "max_model_len": 1024,
        "scheduler": SchedulerConfig(max_num_seqs=8),
    }
    return load_runner(ModelConfig(**(settings | config)), folder)[0]  # type: ignore[arg-type]


class Drive:
    """Sequences side by side, each with a slot and blocks of its own."""

    def __init__(self, runner: Runner, room: int = 1024, block_size: int = 16) -> None:
        self.runner = runner
        self._blocks_each = -(-room // block_size)
        self.tokens: dict[int, list[int]] = {}
        self.drawn: dict[int, list[Drawn]] = {}
        self.adapters: dict[int, str] = {}  # fingerprints, of those that have one

    def begin(
        self, number: int, prompt: Sequence[int], sampling: Sampling = GREEDY, generated: int = 0
    ) -> None:
        """The last `generated` tokens of `prompt` count as drawn before."""
        begin = Begin(SequenceId(number), array("i", prompt), len(prompt) - generated, 0, sampling)
        self.tokens[number], self.drawn[number] = list(prompt), []
        self.runner.launch(StepPlan(begun=(begin,))).result()

    def step(self, *shares: tuple[int, int, int], rows: int | None = None) -> None:
        """One step of chunks (sequence, start, length); those that reach the last token draw."""
        chunks = tuple(self.chunk(*share, rows=rows) for share in shares)
        result = self.runner.launch(StepPlan(chunks=chunks)).result()
        for chunk, part in zip(chunks, result.chunks, strict=True):
            for drawn in part.drawn:
                self.drawn[chunk.sequence_id].append(drawn)
                self.tokens[chunk.sequence_id].extend(drawn.token_ids)

    def chunk(self, number: int, start: int, length: int, rows: int | None = None) -> Chunk:
        is_last = start + length == len(self.tokens[number])
        draws = (SequenceId(number),) if is_last else ()
        first = number * self._blocks_each
        blocks = array("i", range(first, first + self._blocks_each))
        num_rows = int(is_last) if rows is None else min(rows, length)
        slot_id, adapter = SlotId(number), self.adapters.get(number, "")
        return Chunk(
            SequenceId(number), start, length, num_rows, draws, blocks, slot_id, adapter=adapter
        )

    def ids(self, number: int) -> "array[int]":
        """All its tokens but the last."""
        return array("i", self.tokens[number][:-1])

    def prefill(self, number: int, chunk: int = 1 << 20, start: int = 0) -> None:
        end = len(self.tokens[number])
        for first in range(start, end, chunk):
            self.step((number, first, min(chunk, end - first)))

    def decode(self, numbers: Iterable[int], num_steps: int) -> None:
        """All of them at once, one token a step."""
        for _ in range(num_steps):
            self.step(*((n, len(self.tokens[n]) - 1, 1) for n in numbers))


def generate(
    runner: Runner,
    prompt: Sequence[int],
    num: int,
    chunk: int = 1 << 20,
    sampling: Sampling = GREEDY,
) -> list[int]:
    """`num` tokens of one prompt, which is taken in chunks of at most `chunk`."""
    drive = Drive(runner)
    drive.begin(0, prompt, sampling)
    drive.prefill(0, chunk)
    drive.decode([0], num - 1)
    return drive.tokens[0][len(prompt) :]


def row_logits(
    runner: Runner, prompt: Sequence[int], chunk: int = 1 << 20, adapter: str = ""
) -> torch.Tensor:
    """Logits of every token of a prompt, [tokens, vocab]."""
    return logits_of(runner, [prompt], chunk, adapter)[0]


@torch.inference_mode()
def logits_of(
    runner: Runner, prompts: Sequence[Sequence[int]], cap: int = 1 << 20, adapter: str = ""
) -> list[torch.Tensor]:
    """Return the logits of every token of each prompt, [tokens, vocab].

    A step has at most `cap` tokens, in equal shares for the prompts that have tokens left. `cap` is
    at least the number of prompts.
    """
    drive = Drive(runner)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    for number, prompt in enumerate(prompts):
        drive.tokens[number], drive.adapters[number] = [*prompt, 0], adapter
    while left := [n for n, prompt in enumerate(prompts) if done[n] < len(prompt)]:
        chunks, ids = [], []
        for n in left:
            length = min(cap // len(left), len(prompts[n]) - done[n])
            chunks.append(drive.chunk(n, done[n], length, rows=length))
            ids.append(array("i", prompts[n][done[n] : done[n] + length]))
            done[n] += length
        logits = runner.lane.logits(runner.forward(chunks, ids)).cpu()
        for n, part in zip(left, logits.split([chunk.length for chunk in chunks]), strict=True):
            parts[n].append(part)
    return [torch.cat(rows) for rows in parts]


@torch.inference_mode()
def naive_logits(folder: Path, prompt: Sequence[int]) -> torch.Tensor:
    """Logits of every token by the model as it is written, over the naive attention."""
    spec, cpu = read_spec(folder), torch.device("cpu")
    make = family(spec.architecture)
    with torch.device("meta"):
        model = make(make.read(spec.config))
    load_weights(model, make.weights, spec, torch.float32, cpu)
    num_blocks = -(-len(prompt) // 16)
    layout = MemoryLayout(block_size=16, num_blocks=num_blocks, num_slots=1)
    storage = CacheStorage(model.cache, layout, torch.float32, cpu)
    blocks = array("i", range(num_blocks))
    chunk = Chunk(SequenceId(0), 0, len(prompt), len(prompt), (), blocks, SlotId(0))
    batch = pack([chunk], [array("i", prompt)], 16, cpu)
    return model.logits(model(batch.token_ids, NaiveAttention(storage, model.sinks).step(batch)))


def error_of(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest error of a logit, as a share of the largest logit of its row."""
    errors = (ours.cpu() - reference).abs().amax(-1) / reference.abs().amax(-1)
    return float(errors.max())


def assert_close(ours: torch.Tensor, reference: torch.Tensor, tolerance: float = 1e-4) -> None:
    tolerance *= ROUNDING
    error = error_of(ours, reference)
    assert error <= tolerance, f"{error:.2e} > {tolerance:.0e}"


@torch.inference_mode()
def assert_greedy(tokens: list[int], num_prompt: int, reference: torch.nn.Module) -> int:
    """Every token after the prompt is the reference's best, given those before it.

    Excused are places where the reference's best two are closer than rounding can tell, and at
    most one in a hundred. Returns the number of excused tokens.
    """
    logits = reference(torch.tensor([tokens[:-1]])).logits[0, num_prompt - 1 :]
    best = logits.topk(2, dim=-1)
    is_close = best.values[:, 0] - best.values[:, 1] < 1e-3 * logits.abs().amax(-1)
    is_wrong = best.indices[:, 0] != torch.tensor(tokens[num_prompt:])
    assert not (is_wrong & ~is_close).any()
    num_excused = int((is_wrong & is_close).sum())
    assert num_excused <= len(logits) / 100
    return num_excused


def reference_of(folder: Path, architecture: str) -> torch.nn.Module:
    """Load the folder by the class of transformers with that name."""
    model_class = getattr(transformers, architecture)
    reference: torch.nn.Module = model_class.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return reference


@torch.inference_mode()
def assert_equals_transformers(
    folder: Path, architecture: str, prompt: list[int], num_tokens: int, tolerance: float = 1e-4
) -> None:
    """Compare logits, of the whole prompt and in chunks, and greedy tokens."""
    runner = tiny_runner(folder, "native-text")
    reference = reference_of(folder, architecture)
    expected = reference(torch.tensor([prompt])).logits[0]
    assert_close(naive_logits(folder, prompt), expected, tolerance)
    assert_close(row_logits(runner, prompt), expected, tolerance)
    assert_close(row_logits(runner, prompt, chunk=33), expected, tolerance)
    assert_greedy(prompt + generate(runner, prompt, num_tokens), len(prompt), reference)


@torch.inference_mode()
def assert_errs_no_more_than_transformers(
    folder: Path, architecture: str, prompt: list[int]
) -> None:
    """Compare a folder in bfloat16 with the same values computed in float32."""
    load = getattr(transformers, architecture).from_pretrained
    tokens = torch.tensor([prompt])
    exact = load(folder, dtype=torch.float32)(tokens).logits[0]
    theirs = load(folder, dtype=torch.bfloat16)(tokens).logits[0].float()
    ours = row_logits(tiny_runner(folder, "native-text"), prompt)
    assert (ours - exact).abs().mean() <= 1.5 * (theirs - exact).abs().mean()


def assert_errs_no_more_than_bfloat16(
    found: torch.Tensor, file: Path, prompt: list[int]
) -> tuple[float, float]:
    """Compare the logits of a GGUF file, in its own types, with its values in bfloat16.

    If two experts have nearly the same score, rounding may change the choice. So for models with
    experts, the error is the median of the rows. Returns both errors.
    """
    exact, plain = (
        row_logits(tiny_runner(file, **settings), prompt)
        for settings in ({"dtype": "float32"}, {"kernels": "plain"})
    )
    of_rows = torch.median if "num_experts" in read_spec(file).config else torch.norm
    ours, theirs = (float(of_rows((rows - exact).norm(dim=-1))) for rows in (found, plain))
    # On AVX2, products with 4-bit weights round their inputs to bytes.
    most = 2 if choose_instructions("auto", torch.bfloat16)[0] == "avx2" else 1.2
    assert ours < most * theirs, f"{ours:.2e} > {most} * {theirs:.2e}"
    return ours, theirs


def assert_neighbours_change_nothing(runner: Runner, prompt: list[int], answer: list[int]) -> None:
    """Generate the same answer in a batch with three other prompts, read in chunks."""
    drive = Drive(runner, room=256)
    for number in range(4):
        drive.begin(number, prompt if number == 2 else random_prompt(20, seed=number))
        drive.prefill(number, chunk=64)
    drive.decode(range(4), len(answer) - 1)
    assert drive.tokens[2][len(prompt) :] == answer


def random_prompt(length: int, vocab_size: int = 320, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()
