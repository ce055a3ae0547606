"""llama.cpp by itself, without Headrace, as a reference; needs llama-cpp-python."""

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np

from tools.harness.drive import random_prompt


class Alone:
    """llama.cpp with one sequence and its simplest batches. The lane must give the same tokens."""

    def __init__(self, path: Path) -> None:
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers, parameters.use_extra_bufts = 0, False
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        given = llama_cpp.llama_context_default_params()
        given.n_ctx, given.n_threads, given.n_threads_batch = 1024, 1, 1
        given.type_k = given.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, given)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)

    def best_tokens(self, prompt: list[int]) -> list[int]:
        """Return the best next token after each token of the prompt."""
        return [int(self._next([token], place == 0).argmax()) for place, token in enumerate(prompt)]

    def generate(self, prompt: list[int], num: int) -> list[int]:
        """Return `num` greedy tokens."""
        tokens = [int(self._next(prompt, is_first=True).argmax())]
        while len(tokens) < num:
            tokens.append(int(self._next(tokens[-1:]).argmax()))
        return tokens

    def clear_prompt(self, num: int, margin: float) -> tuple[list[int], list[int]]:
        """Return a prompt and its greedy answer of `num` tokens, none of which is a close call.

        `margin`: the least difference of the best two logits, as a share of the largest logit.
        """
        for seed in range(100):
            prompt, tokens, margins = random_prompt(24, self._vocab_size, seed), [], []
            row = self._next(prompt, is_first=True)
            for _ in range(num):
                second, best = np.sort(row)[-2:]
                margins.append((best - second) / np.abs(row).max())
                tokens.append(int(row.argmax()))
                row = self._next(tokens[-1:])
            if min(margins) > margin:
                return prompt, tokens
        raise AssertionError("every answer has a close call")

    def assert_greedy(self, prompt: list[int], tokens: list[int]) -> None:
        """Assert that each token is the best one after the earlier ones, except for close calls."""
        row, num_close = self._next(prompt, is_first=True), 0
        for token in tokens:
            if token != row.argmax():
                assert row.max() - row[token] < 2e-3 * np.abs(row).max()
                num_close += 1
            row = self._next([token])
        assert num_close <= max(1, len(tokens) / 50)

    def _next(self, token_ids: list[int], is_first: bool = False) -> np.ndarray:
        """Return the logits after further tokens."""
        if is_first:
            memory = llama_cpp.llama_get_memory(self._context)
            llama_cpp.llama_memory_clear(memory, True)
        ids = (ctypes.c_int32 * len(token_ids))(*token_ids)
        batch = llama_cpp.llama_batch_get_one(ids, len(token_ids))
        assert llama_cpp.llama_decode(self._context, batch) == 0
        found = llama_cpp.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(found, (self._vocab_size,)).copy()
