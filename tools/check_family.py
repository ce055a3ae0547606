"""Compares a model with transformers, and checks that chunks, batches and kills change nothing.

    python -m tools.check_family FOLDER [--gguf FILE]
    python -m tools.check_family --tiny Gemma3ForCausalLM

Prints a row for each check, and exits with 1 if one fails. `--tiny` first writes a tiny model with
random weights, and a GGUF file of it if Headrace knows the family's names in GGUF files.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.gguf_folder import FAMILIES as GGUF_FAMILIES
from headrace_common.checkpoints.gguf_names import GPT_OSS
from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import ModelConfig, SchedulerConfig
from headrace_common.messages import Ready
from headrace_common.sampling import Sampling
from headrace_engine.load import load
from headrace_engine.models.registry import family
from headrace_engine.runner.lanes.mtp import mtp_layer
from headrace_engine.runner.load import load_runner
from headrace_engine.runner.runner import Runner
from headrace_engine.scheduler.sequence import Sequence
from headrace_engine.weights.weights import text_headers
from tools.harness.drive import (
    assert_close,
    assert_errs_no_more_than_bfloat16,
    assert_greedy,
    assert_neighbours_change_nothing,
    error_of,
    generate,
    logits_of,
    random_prompt,
    reference_of,
    row_logits,
    tiny_runner,
)
from tools.harness.engine_runs import Prophet, run_engine, run_prompts, submits_of
from tools.harness.gguf_files import compare_values, make_tiny_file, unmapped_names
from tools.harness.gpt_oss_files import gpt_oss_to_gguf
from tools.harness.servers import running_server, stream_text
from tools.harness.tiny_models import CHAT_TEMPLATE, END, add_mtp_layer, make_tiny_model

LENGTHS = (150, 7, 41, 16)
CAPS = (512, 16)
CHUNKS = (1, 4, 33, 64)
NUM_TOKENS = 60
GREEDY = Sampling(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
NUM_STREAMS = 16
# Not enough memory for all streams at the same time.
NUM_POSITIONS = 192
COARSE = ModelConfig(
    device="cpu",
    threads=1,
    lane="native-text",
    dtype="bfloat16",
    max_model_len=256,
    kv_cache_memory_bytes=1 << 27,
    scheduler=SchedulerConfig(max_num_seqs=NUM_STREAMS, max_stall_ms="off", max_step_ms="off"),
)


class Skipped(Exception):
    """Says why a check cannot run here."""


class Kit:
    """The checks of a model folder, and the results that they compare.

    A check returns a figure to print. It raises an exception if it finds a difference. `has_twin`
    says that the GGUF file and the folder hold the same values.
    """

    def __init__(
        self, folder: Path, file: Path | None, tolerance: float, has_twin: bool = False
    ) -> None:
        self.folder, self.file, self.tolerance = folder, file, tolerance
        self.has_twin = has_twin
        self.spec = read_spec(folder)
        self.prompts, self.short = (
            [random_prompt(length, self.spec.vocab_size, seed) for seed, length in enumerate(each)]
            for each in (LENGTHS, [10 + number % 5 for number in range(NUM_STREAMS)])
        )

    @cached_property
    def runner(self) -> Runner:
        return tiny_runner(self.folder, "native-text", dtype="float32")

    @cached_property
    def reference(self) -> torch.nn.Module:
        return reference_of(self.folder, self.spec.architecture)

    @cached_property
    @torch.inference_mode()
    def expected(self) -> list[torch.Tensor]:
        return [self.reference(torch.tensor([prompt])).logits[0] for prompt in self.prompts]

    @cached_property
    def coarse(self) -> tuple[Runner, Ready]:
        """A runner in bfloat16. In Headrace's own products, no row depends on another row."""
        return load_runner(msgspec.structs.replace(COARSE, draft="off"), self.folder)

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        for cap in CAPS:
            yield f"logits of transformers, alone, cap {cap}", partial(self.alone, cap)
            yield f"logits of transformers, batched, cap {cap}", partial(self.batched, cap)
        yield "greedy tokens of transformers", self.greedy
        for chunk in CHUNKS:
            yield f"chunks of {chunk} against the whole", partial(self.chunked, chunk)
        yield "beside neighbours", self.neighbours
        yield "preempted and continued", self.preempted
        yield "guesses on and off", self.guessed
        yield "drafts on and off", self.drafted
        yield "killed and recovered", self.killed
        if self.file is not None:
            file = find_model(str(self.file))
            yield "GGUF: names mapped", partial(self.gguf_names, file)
            yield "GGUF: exact values", partial(self.gguf_values, file)
            if self.has_twin:
                yield "GGUF: logits of the folder", partial(self.gguf_logits, file)
            yield "GGUF: own types against bfloat16", partial(self.gguf_types, file)
            yield "GGUF: best token of llama.cpp", partial(self.gguf_llama_cpp, file)

    def alone(self, cap: int) -> str:
        found = [row_logits(self.runner, prompt, cap) for prompt in self.prompts]
        return self._close(found, self.expected)

    def batched(self, cap: int) -> str:
        return self._close(logits_of(self.runner, self.prompts, cap), self.expected)

    def _close(self, found: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs, self.tolerance)
        largest = max(map(error_of, found, expected))
        return f"{largest:.1e} in {sum(map(len, found))} positions"

    def greedy(self) -> str:
        tokens = generate(self.runner, self.prompts[0], NUM_TOKENS)
        num_excused = assert_greedy(self.prompts[0] + tokens, LENGTHS[0], self.reference)
        return f"{NUM_TOKENS} tokens, {num_excused} close calls"

    def chunked(self, chunk: int) -> str:
        whole = row_logits(self.runner, self.prompts[0])
        return self._close([row_logits(self.runner, self.prompts[0], chunk)], [whole])

    def neighbours(self) -> str:
        answer = generate(self.runner, self.prompts[0], NUM_TOKENS)
        assert_neighbours_change_nothing(self.runner, self.prompts[0], answer)
        return f"{NUM_TOKENS} tokens"

    def preempted(self) -> str:
        runner, ready = self.coarse
        num_blocks = NUM_POSITIONS // ready.layout.block_size
        few = msgspec.structs.replace(ready.layout, num_blocks=num_blocks)
        whole, pressed = (
            run_prompts(runner, layout, self.short, GREEDY) for layout in (ready.layout, few)
        )
        assert pressed.status.num_preemptions, "nothing was preempted"
        assert pressed.answers == whole.answers, "other tokens"
        return f"{pressed.status.num_preemptions} preemptions"

    def guessed(self) -> str:
        runner, ready = self.coarse
        if ready.kernels == "plain":
            raise Skipped("torch's products depend on the number of rows")

        def prophet(sequence: Sequence) -> Prophet:
            return Prophet(sequence, whole.answers, 0.8)

        prompts = self.short[:4]  # the most streams for which the scheduler guesses
        whole = run_prompts(runner, ready.layout, prompts, GREEDY)
        told = run_prompts(runner, ready.layout, prompts, GREEDY, prophet)
        assert told.status.num_accepted, "no guess was accepted"
        assert told.answers == whole.answers, "other tokens"
        return f"{told.status.num_accepted} of {told.status.num_guessed} accepted"

    def drafted(self) -> str:
        """Compare tokens with and without drafts by the MTP layer, or else by the model itself."""
        runner, ready = self.coarse
        if ready.kernels == "plain":
            raise Skipped("torch's products depend on the number of rows")
        has_mtp = mtp_layer(self.spec) is not None
        if ready.layout.num_slots and not has_mtp:
            raise Skipped("a model with states cannot be a draft model")
        prompts = self.short[:4]
        whole = run_prompts(runner, ready.layout, prompts, GREEDY)
        draft = "mtp" if has_mtp else str(self.folder)
        config = msgspec.structs.replace(COARSE, model=str(self.folder), draft=draft)
        loaded = load(config)
        told = run_engine(loaded.scheduler, loaded.runner, submits_of(prompts, GREEDY))
        assert told.status.num_drafted, "nothing was drafted"
        assert told.answers == whole.answers, "other tokens"
        return f"{told.status.num_drafted_right} of {told.status.num_drafted} right"

    def killed(self) -> str:
        body = {"prompt": self.prompts[2], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        with running_server(str(self.folder), "--threads", "1", "--max-model-len", "512") as server:
            whole = stream_text(server, body)
            assert stream_text(server, body, kill_after=30) == whole, "another text"
        return "200 tokens"

    def gguf_names(self, file: Path) -> str:
        unmapped = unmapped_names(file)
        assert not unmapped, ", ".join(unmapped)
        return f"{len(text_headers(read_spec(file)))} tensors"

    def gguf_values(self, file: Path) -> str:
        return f"{compare_values(file):,} values"

    def gguf_logits(self, file: Path) -> str:
        found = row_logits(tiny_runner(file, dtype="float32"), self.prompts[0])
        return self._close([found], [row_logits(self.runner, self.prompts[0])])

    def gguf_types(self, file: Path) -> str:
        runner = tiny_runner(file)
        if not runner.lane.has_kernels:
            raise Skipped("this processor has no kernels for them")
        found = row_logits(runner, self.prompts[0])
        ours, theirs = assert_errs_no_more_than_bfloat16(found, file, self.prompts[0])
        return f"{ours:.1e}, bfloat16 {theirs:.1e}"

    def gguf_llama_cpp(self, file: Path) -> str:
        if importlib.util.find_spec("llama_cpp") is None:
            raise Skipped("llama-cpp-python is not installed")
        from tools.harness.llama_alone import Alone

        (weights,) = read_spec(file).weight_files
        theirs = Alone((file / weights).resolve()).best_tokens(self.prompts[0])
        ours = row_logits(tiny_runner(file), self.prompts[0]).argmax(-1).tolist()
        num_same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        assert num_same >= 0.99 * len(ours), f"{num_same} of {len(ours)} positions"
        return f"{num_same} of {len(ours)} positions"


class Outcome(NamedTuple):
    check: str
    result: str  # ok, failed, or skipped
    figure: str


def run_checks(kit: Kit, only: str = "") -> Iterator[Outcome]:
    for name, check in kit.checks():
        if only not in name:
            continue
        try:
            yield Outcome(name, "ok", check())
        except Skipped as reason:
            yield Outcome(name, "skipped", str(reason))
        except Exception as error:
            yield Outcome(name, "failed", " ".join(f"{error!r}".split())[:100])


def write_tiny(folder: Path, architecture: str, config: dict[str, Any]) -> tuple[Path, Path | None]:
    """Write a tiny model, and a GGUF file if Headrace knows the family's names in GGUF files."""
    if architecture == GPT_OSS:
        model = make_tiny_model(folder / "model", architecture, **config)
        fields = {"chat_template": CHAT_TEMPLATE, "eos_token_id": END}
        return model, gpt_oss_to_gguf(model, folder / "tiny.gguf", **fields)
    # llama.cpp's files of Mistral models have the architecture llama, those of OLMo 3 have olmo2.
    if architecture in (*GGUF_FAMILIES.values(), "MistralForCausalLM", "Olmo3ForCausalLM"):
        model, file = make_tiny_file(folder, architecture, config=config)
        if hasattr(family(architecture), "with_one_layer"):
            add_mtp_layer(model)
        return model, file
    return make_tiny_model(folder / "model", architecture, pad_token_id=0, **config), None


def markdown_row(kit: Kit, outcomes: list[Outcome]) -> str:
    """Return the row of the table in docs/reference/model-families.md."""
    logits = max(float(it.figure.split()[0]) for it in outcomes if it.check.startswith("logits"))
    num = [sum(it.result == result for it in outcomes) for result in ("ok", "failed", "skipped")]
    forms = "safetensors, GGUF" if kit.file else "safetensors"
    return f"| {kit.spec.architecture} | {forms} | {logits:.0e} | {num[0]} | {num[1]} | {num[2]} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--gguf", type=Path, help="a GGUF file of the same family")
    parser.add_argument("--tiny", metavar="ARCHITECTURE", help="write a tiny random model first")
    parser.add_argument(
        "--config", type=json.loads, default={}, help="JSON with changes to the tiny model's config"
    )
    parser.add_argument("--only", default="", help="run the checks whose name contains this text")
    parser.add_argument("--table", action="store_true", help="print one row of Markdown")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        help="error of a logit, as a share of its row's largest logit",
    )
    options = parser.parse_args(arguments)
    if not options.folder and not options.tiny:
        parser.error("give a model folder, or --tiny and an architecture")
    with tempfile.TemporaryDirectory() as scratch:
        folder, file = options.folder, options.gguf
        if options.tiny:
            folder, file = write_tiny(folder or Path(scratch), options.tiny, options.config)
        kit = Kit(folder, file, options.tolerance, has_twin=bool(options.tiny))
        outcomes = []
        for outcome in run_checks(kit, options.only):
            outcomes.append(outcome)
            if not options.table:
                print(f"{outcome.check:42} {outcome.result:8} {outcome.figure}", flush=True)
        if options.table:
            print(markdown_row(kit, outcomes))
    return int(any(outcome.result == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
