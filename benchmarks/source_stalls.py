"""Measures how long streams wait while an encoder-decoder reads long sources.

    python -m benchmarks.source_stalls [--sources 8] [--folder build/t5-250m]

The model has the shape of a T5 of 250 million parameters and random weights; it is written to
FOLDER. Four streams run. Sources of 4,096 tokens arrive one after the other, and each answer has
eight tokens. During source 0 the scheduler learns its costs. The last answer is compared with that
of transformers.

The engine runs in this process, without a gateway. The script prints how the predicted and measured
times of steps compare with the stall target, and the longest time without progress.
"""

import argparse
import sys
import time
from array import array
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import transformers

from headrace_common.config.settings import ModelConfig, PrefixCacheConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import Message, NewSequence, Outputs, Status, StepTrace, Submit
from headrace_common.sampling import Sampling
from headrace_engine.load import load
from tools.harness.tiny_models import make_tiny_seq2seq

VOCAB_SIZE, NUM_STREAMS, SHORT, LONG, ANSWER = 32128, 4, 64, 4096, 8
SHAPE = {
    "n_positions": 2 * LONG,
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 12,
    "num_heads": 12,
}
# The tokenizer knows only lower ids, some of which are special tokens.
FIRST_ID = 300
# More tokens than all streams draw in one run.
ENDLESS = 100_000


class Recorder:
    """An outbox that records the step traces, and the progress and answer of one sequence."""

    def __init__(self) -> None:
        self.traces: list[StepTrace] = []
        self.progress: list[tuple[float, int]] = []
        self.answer: list[int] = []
        self.has_ended = False
        self._followed = SequenceId(-1)

    def follow(self, sequence_id: SequenceId) -> None:
        self._followed = sequence_id
        self.traces, self.progress, self.answer, self.has_ended = [], [], [], False

    def put(self, message: Message) -> None:
        if isinstance(message, Status):
            self.traces += message.steps
        elif isinstance(message, Outputs):
            mine = self._followed
            now = time.monotonic()
            self.progress += [
                (now, it.processed) for it in message.progress if it.sequence_id == mine
            ]
            self.answer += [it.token_id for it in message.tokens if it.sequence_id == mine]
            self.has_ended |= any(it.sequence_id == mine for it in message.finished)

    def num_unsent(self) -> int:
        return 0


class Engine:
    """Runs an engine in this process and sends requests to it."""

    def __init__(self, folder: Path) -> None:
        config = ModelConfig(
            model=str(folder),
            max_model_len=LONG + 2048,
            kv_cache_memory_bytes=8 << 30,
            prefix_cache=PrefixCacheConfig(prefix_cache_dir="none"),
        )
        loaded = load(config)
        self.recorder = Recorder()
        self._scheduler = loaded.scheduler
        self._engine = loaded.engine(self.recorder)
        self._num_sent = 0

    def send(self, source: list[int], num_tokens: int) -> None:
        """Send a request, and record only its messages from then on."""
        number, now = self._num_sent, time.monotonic()
        self._num_sent += 1
        sequence = NewSequence(SequenceId(number), 0, 0)
        sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        prompts = (array("i", source).tobytes(),)
        submit = Submit(StreamId(str(number)), prompts, (sequence,), sampling, now)
        self.recorder.follow(sequence.sequence_id)
        self._scheduler.add(submit, now)

    @property
    def num_running(self) -> int:
        return self._scheduler.status().num_running

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._engine.step()


def random_source(length: int, generator: torch.Generator) -> list[int]:
    return torch.randint(FIRST_ID, VOCAB_SIZE, (length,), generator=generator).tolist()


@torch.inference_mode()
def expected(folder: Path, source: list[int]) -> list[int]:
    """Compute the answer greedily, token by token, with transformers alone."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    encoded = model.encoder(torch.tensor([source]))
    tokens = [model.config.decoder_start_token_id]
    for _ in range(ANSWER):
        ids = torch.tensor([tokens])
        tokens.append(
            int(model(encoder_outputs=encoded, decoder_input_ids=ids).logits[0, -1].argmax())
        )
    return tokens[1:]


def report(number: int, began: float, recorder: Recorder) -> None:
    steps = [step for step in recorder.traces if step.stall_target is not None]
    planned = [step for step in steps if step.predicted > step.stall_target or step.cause]
    late = [step for step in steps if step.elapsed > 3 * step.stall_target]
    targets = sorted(step.stall_target for step in steps)
    slowest = sorted(step.elapsed / step.stall_target for step in steps)
    times = [began, *(at for at, _ in recorder.progress)]
    print(
        f"source {number}: {times[-1] - began:.1f} s, {len(steps)} steps; planned above the "
        f"target: {len(planned)}; above 3 times the target: {len(late)}; measured time / target: "
        f"median {slowest[len(slowest) // 2]:.2f}, 99 % {slowest[int(0.99 * len(slowest))]:.2f}, "
        f"most {slowest[-1]:.2f}; target {1000 * targets[0]:.0f} to {1000 * targets[-1]:.0f} ms; "
        f"longest time without progress {max(b - a for a, b in pairwise(times)):.2f} s",
        flush=True,
    )


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("build/t5-250m"))
    args = parser.parse_args()
    if not (args.folder / "config.json").exists():
        make_tiny_seq2seq(args.folder, "GatedT5", vocab_size=VOCAB_SIZE, **SHAPE)
    engine, generator = Engine(args.folder), torch.Generator().manual_seed(0)
    for _ in range(NUM_STREAMS):
        engine.send(random_source(SHORT, generator), ENDLESS)
        engine.run_until(lambda: bool(engine.recorder.answer))
    for number in range(args.sources):
        source, began = random_source(LONG, generator), time.monotonic()
        engine.send(source, ANSWER)
        engine.run_until(lambda: engine.recorder.has_ended)
        report(number, began, engine.recorder)
        assert engine.num_running == NUM_STREAMS, "a stream has ended"
    is_equal = engine.recorder.answer == expected(args.folder, source)
    print(
        "The last answer equals that of transformers." if is_equal else "The last answer differs."
    )
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()
