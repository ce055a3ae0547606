"""Runs llama.cpp for peers.py, with the same batches as in llama-server.

    python -m benchmarks.side_llama FILE.gguf THREADS [--plain-buffers]

A step is one batch: a token of each running stream first, then prompts, up to 2,048 tokens.
"""

import argparse
import ctypes
from collections.abc import Collection
from typing import Any

from benchmarks.side import serve

_BATCH_TOKENS = 2048
# The number of sequences in the cache.
_STREAMS = 6
# The positions of each sequence.
_POSITIONS = 2560
_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
# Without this callback, llama.cpp prints hundreds of lines.
_SILENT = _LogCallback(lambda level, text, data: None)


class LlamaSide:
    """llama.cpp, where the number of a stream is a sequence id.

    `_computed` has the tokens of each sequence whose keys and values are in the cache. `_waiting`
    has the tokens of each running stream that are not computed yet, at least the last token.
    """

    def __init__(self, file: str, threads: int, extra_buffers: bool) -> None:
        import llama_cpp

        self._cpp: Any = llama_cpp
        llama_cpp.llama_log_set(_SILENT, None)
        llama_cpp.llama_backend_init()
        loading = llama_cpp.llama_model_default_params()
        loading.use_extra_bufts = extra_buffers
        model = llama_cpp.llama_model_load_from_file(file.encode(), loading)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = _STREAMS * _POSITIONS, _STREAMS
        params.n_batch = _BATCH_TOKENS
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self.uses = _switched_on(llama_cpp.llama_print_system_info().decode())
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._computed: list[list[int]] = [[] for _ in range(_STREAMS)]
        # Maps running sequences to the tokens that are not computed yet.
        self._waiting: dict[int, list[int]] = {}

    def aim(self, target: str) -> None:
        """Does nothing: batches are limited by size, not by time."""

    def add(self, prompt: list[int]) -> int:
        free = [place for place in range(_STREAMS) if place not in self._waiting]
        # Take a sequence that has already computed this prompt. Without such a sequence, take the
        # sequence with the shortest cache.
        keeps = [self._computed[place][: len(prompt)] == prompt for place in free]
        lengths = [len(self._computed[place]) for place in free]
        best = keeps.index(True) if any(keeps) else lengths.index(min(lengths))
        place, kept = free[best], len(prompt) - 1 if keeps[best] else 0
        self._cpp.llama_memory_seq_rm(self._memory, place, kept, -1)
        del self._computed[place][kept:]
        self._waiting[place] = prompt[kept:]
        return place

    def step(self) -> Collection[int]:
        taken = self._take()
        self._fill(taken)
        if code := self._cpp.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode returned {code}")
        given, row = [], -1
        for place, ids in taken.items():
            row += len(ids)
            self._computed[place] += ids
            del self._waiting[place][: len(ids)]
            if not self._waiting[place]:
                self._waiting[place] = [self._likeliest(row)]
                given.append(place)
        return given

    def end(self, stream: int) -> None:
        del self._waiting[stream]

    def _take(self) -> dict[int, list[int]]:
        """Return the next batch by sequence: the tokens of running streams first, then prompts."""
        left, taken = _BATCH_TOKENS, {}
        for place in sorted(self._waiting, key=lambda place: len(self._waiting[place])):
            if left:
                taken[place] = self._waiting[place][:left]
                left -= len(taken[place])
        return taken

    def _fill(self, taken: dict[int, list[int]]) -> None:
        batch, n = self._batch, 0
        for place, ids in taken.items():
            for offset, token in enumerate(ids):
                batch.token[n], batch.pos[n] = token, len(self._computed[place]) + offset
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, place
                batch.logits[n] = offset + 1 == len(self._waiting[place])
                n += 1
        batch.n_tokens = n

    def _likeliest(self, row: int) -> int:
        import numpy as np

        logits = self._cpp.llama_get_logits_ith(self._context, row)
        kind = ctypes.POINTER(ctypes.c_float)
        return int(np.ctypeslib.as_array(ctypes.cast(logits, kind), (self.vocab_size,)).argmax())


def _switched_on(info: str) -> str:
    """Return the vector instructions with the value 1 in "CPU : AVX2 = 1 | AVX512 = 0 | ..."."""
    pairs = (part.rpartition(":")[2].split("=") for part in info.split("|") if "=" in part)
    on = [name.strip() for name, value in pairs if value.strip() == "1"]
    return " ".join(name for name in on if name.startswith(("AVX", "AMX", "FMA", "F16C")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("threads", type=int)
    parser.add_argument(
        "--plain-buffers", action="store_true", help="keep the file's weight layout"
    )
    given = parser.parse_args()
    serve(lambda: LlamaSide(given.file, given.threads, not given.plain_buffers))


if __name__ == "__main__":
    main()
