"""Compares tokens per second with and without a draft model, at a given share of right tokens.

    python -m benchmarks.drafts MODEL DRAFT [--right 0.7] [--pairs 7] [--tokens 100] [--streams 1]

MODEL and DRAFT are folders; `tools/make_random_model.py` writes them in the shapes `qwen3-0.6b` and
`draft`. For the MTP layer of MODEL, DRAFT is `mtp`; `make_random_model.py --mtp` adds the layer to
the shape `qwen3.5-0.5b`. The draft model really computes its tokens. Afterwards each token is
replaced: with probability --right by the token that MODEL will draw, otherwise by another token. So
random weights show what a draft model with this share of right tokens would gain. Each pair
consists of a run with guesses and a run without guesses in one process, in alternating order; the
texts must be equal. The ratios compare only the decoding, by time and by processor time. If other
programs run, only the ratio by processor time is useful.
"""

import argparse
import os
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from random import Random
from statistics import median
from typing import NamedTuple

from headrace.engines.child import ENVIRONMENT

# The environment must be set before torch is imported.
os.environ |= ENVIRONMENT | os.environ

import msgspec

from headrace_common.config.settings import ModelConfig, SchedulerConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import NewSequence, Submit
from headrace_common.plan import Chunk
from headrace_common.sampling import Sampling
from headrace_engine.engine import Engine, Inbox
from headrace_engine.load import Loaded, load
from headrace_engine.runner.sampling.state import SequenceState
from tools.harness.engine_runs import Heard

_PROMPT = 64


class Timed(NamedTuple):
    texts: list[list[int]]
    rate: float  # tokens per second
    cpu_rate: float  # tokens per second of processor time
    num_drafted: int
    num_right: int
    num_steps: int


class Replay:
    """Replaces the draft model's tokens, once the model has computed them."""

    def __init__(self, loaded: Loaded, share: float) -> None:
        drafter = loaded.runner.drafter
        assert drafter is not None
        self._compute, self._share, self._dice = drafter.run, share, Random(1)
        self.texts: dict[SequenceId, list[int]] = {}
        drafter.run = self.run  # type: ignore[method-assign]

    def run(
        self, chunks: Sequence[Chunk], sequences: Mapping[SequenceId, SequenceState]
    ) -> tuple[Chunk, ...]:
        return tuple(
            self._replaced(chunk, sequences[chunk.sequence_id]) if asked.is_drafted else chunk
            for asked, chunk in zip(chunks, self._compute(chunks, sequences), strict=True)
        )

    def _replaced(self, chunk: Chunk, sequence: SequenceState) -> Chunk:
        first = sequence.num_generated
        coming = self.texts.get(chunk.sequence_id, [])[first : first + len(chunk.guess)]
        guess = [i if self._dice.random() < self._share else i ^ 1 for i in coming]
        guess += chunk.guess[len(guess) :]
        return msgspec.structs.replace(chunk, guess=tuple(guess))


def run(loaded: Loaded, options: argparse.Namespace, guess: bool) -> Timed:
    """Generate the texts of all streams; count from the step after the prompts."""
    heard, inbox = Heard(), Inbox()
    engine: Engine = loaded.engine(heard)
    sampling = Sampling(
        temperature=1.0, seed=7, max_tokens=options.tokens, ignore_eos=True, guess=guess
    )
    ids = [SequenceId(number) for number in range(options.streams)]
    for number in ids:
        prompt = array("i", (Random(number).randrange(300, 30_000) for _ in range(_PROMPT)))
        new = (NewSequence(number, 0, number),)
        inbox.put(
            Submit(StreamId(str(number)), (prompt.tobytes(),), new, sampling, time.monotonic())
        )
    while not all(len(heard.tokens.get(number, ())) > 0 for number in ids):
        assert engine._receive(inbox)
        engine.step()
    before = loaded.scheduler.status()
    num_before = sum(map(len, heard.tokens.values()))
    started, cpu_started = time.perf_counter(), time.process_time()
    while len(heard.finished) < options.streams:
        engine.step()
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    after = loaded.scheduler.status()
    texts = [[token_id for token_id, _ in heard.tokens[number]] for number in ids]
    num_tokens = sum(map(len, texts)) - num_before
    return Timed(
        texts,
        num_tokens / seconds,
        num_tokens / cpu_s,
        after.num_drafted - before.num_drafted,
        after.num_drafted_right - before.num_drafted_right,
        after.num_steps - before.num_steps,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--right", type=float, default=0.7, help="share of right tokens")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    # On a busy machine, a step may take longer than the default stall target, and would not guess.
    scheduler = SchedulerConfig(max_stall_ms="off", max_step_ms="off")
    config = ModelConfig(
        model=options.model,
        draft=options.draft,
        threads=options.threads or "auto",
        scheduler=scheduler,
    )
    loaded = load(config)
    replay = Replay(loaded, options.right)
    first = run(loaded, options, guess=False)
    replay.texts = {SequenceId(number): text for number, text in enumerate(first.texts)}
    run(loaded, options, guess=True)
    ratios: list[tuple[float, float]] = []
    is_same = True
    for number in range(options.pairs):
        order = (True, False) if number % 2 else (False, True)
        found = {guess: run(loaded, options, guess) for guess in order}
        on, off = found[True], found[False]
        is_same &= on.texts == off.texts
        ratios.append((on.rate / off.rate, on.cpu_rate / off.cpu_rate))
        print(
            f"off {off.rate:.1f} tokens/s ({off.cpu_rate:.1f} per CPU second), "
            f"on {on.rate:.1f} ({on.cpu_rate:.1f}) in {on.num_steps} steps, "
            f"{on.num_right} of {on.num_drafted} right; "
            f"ratio {ratios[-1][0]:.2f}, by processor time {ratios[-1][1]:.2f}",
            flush=True,
        )
    for name, values in zip(("time", "processor time"), zip(*ratios, strict=True), strict=True):
        print(f"by {name}: {median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
    print("The texts are equal." if is_same else "SOME TEXTS DIFFER.")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
