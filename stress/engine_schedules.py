"""Runs random requests through engines with tiny models, and compares each answer to the bit.

    python -m stress.engine_schedules [-n RUNS] [--first SEED] [--families NAMES]

Each run draws the limits of an engine, its requests and its faults. Faults are cancels, failed
steps, steps without memory, and engines that die and are loaded again. Memory is often too small
for all sequences. At the end, each answer is compared with the answer that the request gets alone,
in an engine without guesses, drafts and cached prefixes. Tokens, log probabilities, vector and
finish reason must be equal.

A seed decides the requests and the faults. It does not decide the measured times of steps, nor when
the threads that read and write prefixes on disk have finished.
"""

import argparse
import itertools
import logging
import shutil
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import torch

from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import ModelConfig, PrefixCacheConfig, SchedulerConfig
from headrace_common.errors import ModelError
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import Cancel, FinishReason, Message, NewSequence, Outputs, Submit
from headrace_common.plan import StepPlan, StepResult
from headrace_common.sampling import LLAMA_CPP_ORDER, Logprobs, Pooling, Sampling
from headrace_engine.engine import Engine, Inbox, Launched
from headrace_engine.load import load
from headrace_engine.runner.runner import Runner
from headrace_engine.scheduler.cost import CostModel
from headrace_engine.scheduler.guess import Guess, Guesser
from headrace_engine.scheduler.row_times import RowTimes
from headrace_engine.scheduler.sequence import Sequence
from tools.harness.engine_runs import Prophet
from tools.harness.tiny_models import add_mtp_layer, make_tiny_model

MAX_TOKENS = 512
MANY_STEPS = 50_000
ENDED_EARLY = (FinishReason.CANCELLED, FinishReason.ERROR)

FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"architecture": "LlamaForCausalLM"},
    "int4": {"architecture": "Qwen3ForCausalLM", "quantize": "int4"},
    "int8-cache": {"architecture": "Qwen3ForCausalLM", "kv_cache_dtype": "int8"},
    "windows": {"architecture": "Gemma3ForCausalLM"},
    "sinks": {"architecture": "GptOssForCausalLM"},
    "experts": {"architecture": "Qwen3MoeForCausalLM"},
    "hybrid": {"architecture": "Qwen3_5ForCausalLM"},
    "mtp": {"architecture": "Qwen3_5ForCausalLM", "mtp": "random"},
    "mtp-right": {"architecture": "Qwen3_5ForCausalLM", "mtp": "right"},
    "mtp-experts": {"architecture": "Qwen3_5MoeForCausalLM", "mtp": "random"},
    "mtp-next": {"architecture": "Qwen3NextForCausalLM", "mtp": "random"},
    "draft": {"architecture": "LlamaForCausalLM", "draft": "poor"},
    "draft-right": {"architecture": "LlamaForCausalLM", "draft": "same"},
}
SAMPLINGS: list[dict[str, object]] = [
    {"temperature": 0},
    {"temperature": 0, "num_logprobs": 0},
    {"temperature": 1, "num_logprobs": 2},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 1, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"temperature": 1, "samplers": ("temperature", "mirostat"), "mirostat": 2},
    {"temperature": 0, "samplers": LLAMA_CPP_ORDER, "dry_multiplier": 1.5},
    {"temperature": 1, "stop_token_ids": tuple(range(0, 320, 3)), "min_tokens": 3},
    {"max_tokens": 0, "pooling": Pooling(("last",))},
]


class Answer(NamedTuple):
    tokens: tuple[tuple[int, Logprobs | None], ...]
    finish: str
    vector: bytes


class Outbox:
    """Collects what an engine, and its successors after its death, say about each sequence."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[tuple[int, Logprobs | None]]] = {}
        self.states: dict[int, bytes] = {}
        self.ends: dict[int, tuple[str, bytes]] = {}

    def put(self, message: Message) -> None:
        if not isinstance(message, Outputs):
            return
        for token in message.tokens:
            assert token.sequence_id not in self.ends
            told = self.tokens.setdefault(token.sequence_id, [])
            told.append((token.token_id, token.logprobs))
            self.states[token.sequence_id] = token.state or self.states.get(token.sequence_id, b"")
        for end in message.finished:
            assert end.sequence_id not in self.ends
            self.ends[end.sequence_id] = str(end.finish), end.vector

    def num_unsent(self) -> int:
        return 0

    def answer(self, name: int) -> Answer:
        return Answer(tuple(self.tokens.get(name, ())), *self.ends[name])

    def again(self, submit: Submit) -> Submit | None:
        """Return the request with the tokens that were told, or None if the request has ended."""
        sequences = tuple(
            msgspec.structs.replace(
                new,
                generated=array(
                    "i", [i for i, _ in self.tokens.get(new.sequence_id, ())]
                ).tobytes(),
                state=self.states.get(new.sequence_id, b""),
            )
            for new in submit.sequences
            if new.sequence_id not in self.ends
        )
        return msgspec.structs.replace(submit, sequences=sequences) if sequences else None


class SimulatedStep(NamedTuple):
    """A computed step that reports an equal time for every step, and none for drafts."""

    launched: Launched

    def result(self) -> StepResult:
        return msgspec.structs.replace(self.launched.result(), seconds=0.001, draft_seconds=0.0)


class SimulatedRunner:
    """Lets a share of the steps fail, before or after the step was computed.

    Every step reports an equal time. So the scheduler guesses and drafts as much as possible.
    """

    def __init__(self, runner: Runner, dice: Random, share: float) -> None:
        self._runner, self._dice, self._share = runner, dice, share

    def launch(self, plan: StepPlan) -> Launched:
        kind = self._dice.choice(["memory", "early", "late"])
        fails = self._dice.random() < self._share
        if fails and kind == "memory":
            raise MemoryError("simulated")
        if fails and kind == "early":
            raise RuntimeError("simulated")
        launched = SimulatedStep(self._runner.launch(plan))
        if fails:
            launched.result()
            raise RuntimeError("simulated")
        return launched


class Family:
    """Makes the model of a family and answers requests one at a time."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root
        family = FAMILIES[name]
        self.folder = self._make(root / "model", family["architecture"], family.get("mtp", ""))
        kept = {key: family[key] for key in ("quantize", "kv_cache_dtype") if key in family}
        given = ModelConfig(
            model=str(self.folder),
            dtype="bfloat16",
            threads=1,
            max_model_len=MAX_TOKENS,
            block_size=16,
        )
        self._given = msgspec.structs.replace(given, **kept)
        self._draft = None
        if (draft := family.get("draft")) is not None:
            self._draft = str(self.folder if draft == "same" else self._make(root / "draft"))
        plain = msgspec.structs.replace(
            self._given,
            draft="off" if "mtp" in family else None,
            kv_cache_memory_bytes=1 << 24,
            scheduler=SchedulerConfig(max_num_seqs=1, guess="off", max_stall_ms="off"),
        )
        self._alone = load(plain)

    def _make(self, folder: Path, architecture: str = "LlamaForCausalLM", mtp: str = "") -> Path:
        options = {"head_dim": 32, "pad_token_id": 0, "dtype": torch.bfloat16}
        make_tiny_model(folder, architecture, seed=int(folder.name == "draft"), **options)
        return add_mtp_layer(folder, is_right=mtp == "right") if mtp else folder

    def config(self, dice: Random, disk: Path | None) -> ModelConfig:
        """Draw the limits of an engine. `disk` is the folder for cached prefixes, if any."""
        scheduler = SchedulerConfig(
            max_num_seqs=dice.choice([1, 4, 16, 16]),
            max_step_tokens=dice.choice([1, 17, 64, 512, 512, 512]),
            max_stall_ms=dice.choice(["off", "off", 1.0, 200.0]),
            max_open_prompts=dice.choice([1, 4]),
            guess=dice.choice(["auto", "auto", 3, "off"] if not self._draft else ["auto", 3]),
        )
        return msgspec.structs.replace(
            self._given,
            scheduler=scheduler,
            draft=self._draft,
            prefix_cache=PrefixCacheConfig(prefix_cache_dir=str(disk) if disk else None),
        )

    def answers_alone(self, submit: Submit) -> Iterator[Answer]:
        for new in submit.sequences:
            box, inbox = Outbox(), Inbox()
            engine = Engine(self._alone.scheduler, self._alone.runner, box)
            inbox.put(msgspec.structs.replace(submit, sequences=(new,), use_prefix=False))
            while new.sequence_id not in box.ends:
                assert engine._receive(inbox)
                engine.step()
            yield box.answer(new.sequence_id)


def make_requests(dice: Random, vocab_size: int, names: Iterator[int]) -> list[Submit]:
    """Draw requests; many begin with the same tokens, and some repeat a few tokens."""

    def tokens(number: int) -> list[int]:
        return [dice.randrange(3, vocab_size) for _ in range(number)]

    heads = [tokens(number) for number in (64, 160, 300)]
    made = []
    for number in range(dice.randrange(4, 24)):
        prompt = list(dice.choice(heads)) if dice.random() < 0.7 else []
        prompt = prompt[: dice.choice([16, 32, 48, 64, 300])]
        num_new = dice.choice([1, 15, 16, 17, 33, 64])
        prompt += (tokens(5) * num_new)[:num_new] if dice.random() < 0.4 else tokens(num_new)
        drawn = {
            "max_tokens": dice.choice([1, 20, 140, 140]),
            "seed": dice.randrange(5),
            "end_token_ids": (2, 0),
            "ignore_eos": dice.random() < 0.9,
        } | dice.choice(SAMPLINGS)
        sampling = msgspec.structs.replace(Sampling(), **drawn)
        num_choices = 1 if sampling.pooling else dice.choice([1, 1, 1, 3])
        made.append(
            Submit(
                StreamId(str(number)),
                (array("i", prompt).tobytes(),),
                tuple(NewSequence(SequenceId(next(names)), 0, i) for i in range(num_choices)),
                sampling,
                arrival=time.monotonic(),
                priority=dice.choice([0, 0, 0, 1, 1000]),
                use_prefix=dice.random() < 0.8,
                client=dice.choice(["", "one"]),
            )
        )
    return made


class NoGuesser:
    """Guesses nothing, so that the draft model makes all guesses."""

    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        return Guess()


class ScheduleRun:
    """Runs the requests of one seed in an engine of a family, with faults."""

    def __init__(self, family: Family, seed: int) -> None:
        self._family = family
        self._dice = Random(seed)
        self.counts: Counter[str] = Counter()
        self._disk = family.root / "disk" if self._dice.random() < 0.3 else None
        if seed % 8 == 0 and self._disk:
            shutil.rmtree(self._disk, ignore_errors=True)
        names = itertools.count(1)
        self._requests = make_requests(self._dice, read_spec(family.folder).vocab_size, names)
        self._fail_share = self._dice.choice([0, 0, 0, 0.03, 0.1])
        self._death_share = self._dice.choice([0, 0, 0.01])
        self._cancel_share = self._dice.choice([0, 0, 0.02])
        self._cancelled: list[SequenceId] = []
        self._alone: dict[int, Answer] = {
            new.sequence_id: answer
            for submit in self._requests
            for new, answer in zip(submit.sequences, family.answers_alone(submit), strict=True)
        }
        self._share = self._dice.choice([0, 0, 0.5, 0.9])
        self._box = Outbox()
        self._config = self._config_with_memory()
        self._start()

    def _config_with_memory(self) -> ModelConfig:
        """Draw the limits of an engine, with a memory in which at least one sequence fits."""
        memory = self._dice.choice([1 << 16, 1 << 19, 1 << 20, 1 << 21])
        config = self._family.config(self._dice, self._disk)
        while True:
            config = msgspec.structs.replace(config, kv_cache_memory_bytes=memory)
            try:
                load(config)
            except ModelError:
                memory *= 2
                assert memory < 1 << 28, "A sequence does not fit"
            else:
                return config

    def _start(self) -> None:
        """Load an engine, and submit what its predecessor has not finished."""
        self._loaded = loaded = load(self._config)
        # Forget what the load has measured, because the steps report simulated times.
        budget = loaded.scheduler._budget
        budget.draft, budget.rows = CostModel(1, 1), budget.rows and RowTimes()
        loaded.scheduler._planner._guessing._make_guesser = self._make_guesser
        runner = SimulatedRunner(loaded.runner, self._dice, self._fail_share)
        self._engine = Engine(
            loaded.scheduler, runner, self._box, grammars=loaded.grammars, prefixes=loaded.prefixes
        )
        self._inbox = Inbox()
        if loaded.prefixes is not None:
            loaded.prefixes.start(self._inbox.put)

    def _make_guesser(self, sequence: Sequence) -> Guesser:
        """Let a share of the guesses be right, or leave all guesses to the draft model."""
        if not self._share:
            return NoGuesser()
        answers = {name: (alone.tokens, alone.finish) for name, alone in self._alone.items()}
        return Prophet(sequence, answers, self._share)

    def _stop(self) -> None:
        status = self._loaded.scheduler.status()
        self.counts["tokens drafted"] += status.num_drafted
        self.counts["tokens guessed"] += status.num_guessed
        self.counts["preemptions"] += status.num_preemptions
        if self._loaded.prefixes is not None:
            self._loaded.prefixes.close()

    def run(self) -> None:
        waiting, open_requests = list(self._requests), list[Submit]()
        while (is_busy := any(map(self._box.again, open_requests))) or waiting:
            if waiting and (not is_busy or self._dice.random() < 0.5):
                open_requests.append(waiting.pop(0))
                self._inbox.put(open_requests[-1])
            if self._dice.random() < self._cancel_share:
                self._cancel(open_requests)
            if self._dice.random() < self._death_share:
                self.counts["deaths"] += 1
                self._stop()
                self._start()
                for submit in filter(None, map(self._box.again, open_requests)):
                    self._inbox.put(submit)
                self._inbox.put(Cancel(tuple(self._cancelled)))
            assert self._engine._receive(self._inbox)
            self._engine.step()
            self.counts["steps"] += 1
            assert self.counts["steps"] < MANY_STEPS, "The requests do not end"
        assert self._loaded.scheduler.is_idle
        self._loaded.scheduler.memory.check()
        self._stop()
        self._compare()

    def _cancel(self, open_requests: list[Submit]) -> None:
        sequences = [new.sequence_id for submit in open_requests for new in submit.sequences]
        name = self._dice.choice(sequences or [SequenceId(0)])
        if name not in self._box.ends:
            self._cancelled.append(name)
            self._inbox.put(Cancel((name,)))

    def _compare(self) -> None:
        for name, expected in self._alone.items():
            found = self._box.answer(name)
            self.counts["answers"] += 1
            if found.finish == FinishReason.CANCELLED:
                assert name in self._cancelled
            if found.finish == FinishReason.ERROR:
                assert self._fail_share, "An answer failed without a failed step"
            if found.finish in ENDED_EARLY:
                expected = Answer(expected.tokens[: len(found.tokens)], *found[1:])
            assert found == expected, f"sequence {name}: {found}\nalone: {expected}"


def main(argv: list[str] | None = None, say: Callable[[str], object] = print) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", type=int, default=20, help="runs of each family")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first run")
    parser.add_argument("--families", default=",".join(FAMILIES), help="names, with commas")
    given = parser.parse_args(argv)
    for name in given.families.split(","):
        with tempfile.TemporaryDirectory() as root:
            family, counts = Family(name, Path(root)), Counter[str]()
            for seed in range(given.first, given.first + given.n):
                try:
                    run = ScheduleRun(family, seed)
                    run.run()
                except BaseException:
                    say(f"{name}: seed {seed} failed: --families {name} --first {seed} -n 1")
                    raise
                counts += run.counts
        say(f"{name}: {given.n} runs, " + ", ".join(f"{n} {what}" for what, n in counts.items()))


if __name__ == "__main__":
    # The simulated faults would fill the screen.
    logging.disable()
    main()
