"""OpenVINO GenAI as one side of peers.py: its continuous batching, step by step.

python -m benchmarks.side_openvino FOLDER THREADS [--step-tokens N]
"""

import argparse
from collections.abc import Collection
from itertools import count
from typing import Any

from benchmarks.side import serve

CACHE_GB = 2
_ENDLESS = 1 << 30


class OpenVinoSide:
    """Keys and values are bfloat16, as everybody's are; by default OpenVINO keeps 8 bits."""

    def __init__(self, folder: str, threads: int, step_tokens: int) -> None:
        import openvino as ov
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = step_tokens
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        self._pipeline: Any = genai.ContinuousBatchingPipeline(
            folder,
            scheduler,
            "CPU",
            {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": ov.Type.bf16},
        )
        self.vocab_size = len(self._pipeline.get_tokenizer().get_vocab())
        self._greedy = genai.GenerationConfig()
        self._greedy.max_new_tokens = _ENDLESS
        self._greedy.ignore_eos = True
        self._greedy.do_sample = False
        self._tensor = ov.Tensor
        self._handles: dict[int, Any] = {}
        self._numbers = count()

    def aim(self, target: str) -> None:
        """Its steps have a size, not a time."""

    def add(self, prompt: list[int]) -> int:
        import numpy as np

        number = next(self._numbers)
        ids = self._tensor(np.array([prompt], np.int64))
        self._handles[number] = self._pipeline.add_request(number, ids, self._greedy)
        return number

    def step(self) -> Collection[int]:
        self._pipeline.step()
        given = [number for number, handle in self._handles.items() if handle.can_read()]
        for number in given:
            self._handles[number].read()
        return given

    def end(self, stream: int) -> None:
        self._handles.pop(stream).stop()
        if not self._handles:
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("threads", type=int)
    parser.add_argument("--step-tokens", type=int, default=2048)
    given = parser.parse_args()
    serve(lambda: OpenVinoSide(given.folder, given.threads, given.step_tokens))


if __name__ == "__main__":
    main()
