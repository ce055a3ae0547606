"""Runs OpenVINO GenAI for peers.py: its continuous batching, step by step.

python -m benchmarks.side_openvino FOLDER THREADS [--step-tokens N] [--float32]
"""

import argparse
from collections.abc import Collection
from itertools import count
from typing import Any

from benchmarks.side import serve

CACHE_GB = 2
_ENDLESS = 1 << 30


class OpenVinoSide:
    """OpenVINO with keys and values in bfloat16, like the other servers; its default is 8 bits.

    Keys and values are float32 if OpenVINO has no bfloat16 on this machine, or if `float32` is set.
    """

    def __init__(self, folder: str, threads: int, step_tokens: int, float32: bool) -> None:
        import openvino as ov
        import openvino_genai as genai

        float32 |= "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        keys = ov.Type.f32 if float32 else ov.Type.bf16
        options = {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": keys}
        # Otherwise OpenVINO would use bfloat16 even on a processor without instructions for it.
        if float32:
            options["INFERENCE_PRECISION_HINT"] = ov.Type.f32
        self.uses = f"{_product_of(options)}, keys and values in {keys.get_type_name()}"
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = step_tokens
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        self._pipeline: Any = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", options)
        self.vocab_size = len(self._pipeline.get_tokenizer().get_vocab())
        self._greedy = genai.GenerationConfig()
        self._greedy.max_new_tokens = _ENDLESS
        self._greedy.ignore_eos = True
        self._greedy.do_sample = False
        self._tensor = ov.Tensor
        self._handles: dict[int, Any] = {}
        self._numbers = count()

    def aim(self, target: str) -> None:
        """Does nothing: steps are limited by size, not by time."""

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


def _product_of(options: dict[str, Any]) -> str:
    """Return the primitive that OpenVINO selects for a small matrix product."""
    import numpy as np
    import openvino as ov
    from openvino import opset13 as op

    x = op.parameter([-1, 256], np.float32)
    y = op.matmul(x, op.constant(np.ones((512, 256), np.float32)), False, True)
    compiled = ov.Core().compile_model(ov.Model([op.result(y)], [x]), "CPU", options)
    compiled(np.zeros((8, 256), np.float32))
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        if info["layerType"].astype(str) == "FullyConnected":
            return str(info["primitiveType"].astype(str))
    return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("threads", type=int)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--float32", action="store_true", help="never use bfloat16")
    given = parser.parse_args()
    serve(lambda: OpenVinoSide(given.folder, given.threads, given.step_tokens, given.float32))


if __name__ == "__main__":
    main()
