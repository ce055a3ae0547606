"""Runs Headrace for peers.py: the engine's own loop and scheduler, without HTTP.

python -m benchmarks.side_headrace MODEL THREADS [--quantize int8]
"""

import os

from headrace.engines.child import ENVIRONMENT

# The environment must be set before torch is imported.
os.environ |= ENVIRONMENT | os.environ

import argparse
import time
from array import array
from collections.abc import Collection
from itertools import count

from benchmarks.side import serve
from headrace_common.checkpoints.find import find_model
from headrace_common.config.settings import ModelConfig, SchedulerConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import Cancel, Message, NewSequence, Outputs, Submit
from headrace_common.sampling import Sampling
from headrace_engine.engine import Engine
from headrace_engine.load import max_guess, schedule
from headrace_engine.runner.load import load_runner

CACHE_BYTES = 2 << 30
_ENDLESS = Sampling(temperature=0.0, ignore_eos=True)


class HeadraceSide:
    """Headrace's engine; this class is also the engine's outbox.

    Each stall target has a separate scheduler. All schedulers share one runner.
    """

    def __init__(self, model: str, threads: int, quantize: str) -> None:
        folder = find_model(model, None)
        config = ModelConfig(
            model=str(folder),
            device="cpu",
            threads=threads,
            quantize=quantize,  # type: ignore[arg-type]
            kv_cache_memory_bytes=CACHE_BYTES,
        )
        self._runner, self._ready = load_runner(config, folder)
        self.vocab_size = self._ready.vocab_size
        self.uses = self._ready.kernels
        self._numbers = count()
        self._given: set[int] = set()
        self._target = ""
        self.aim("default")

    def aim(self, target: str) -> None:
        if target == self._target:
            return
        config = SchedulerConfig()
        # With this configuration, a whole prompt is computed in one step.
        if target == "off":
            config = SchedulerConfig(max_stall_ms="off", max_step_ms="off", max_step_tokens=4096)
        elif target != "default":
            config = SchedulerConfig(max_stall_ms=float(target))
        num_guessed = max_guess(config, self._ready)
        self._scheduler, _ = schedule(config, self._runner, self._ready, num_guessed)
        self._engine = Engine(self._scheduler, self._runner, self)
        self._target = target

    def add(self, prompt: list[int]) -> int:
        number = SequenceId(next(self._numbers))
        packed, begun = array("i", prompt).tobytes(), (NewSequence(number, 0, 0),)
        submit = Submit(StreamId(str(number)), (packed,), begun, _ENDLESS, time.monotonic())
        self._scheduler.add(submit, time.monotonic())
        return number

    def step(self) -> Collection[int]:
        self._given = set()
        self._engine.step()
        return self._given

    def end(self, stream: int) -> None:
        self._scheduler.cancel(Cancel((SequenceId(stream),)))
        self._engine.step()

    # The methods of the engine's outbox.

    def put(self, message: Message) -> None:
        if isinstance(message, Outputs):
            self._given.update(token.sequence_id for token in message.tokens)

    def num_unsent(self) -> int:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("threads", type=int)
    parser.add_argument("--quantize", default="auto")
    given = parser.parse_args()
    serve(lambda: HeadraceSide(given.model, given.threads, given.quantize))


if __name__ == "__main__":
    main()
