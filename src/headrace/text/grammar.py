"""Grammars by llguidance: which tokens may follow those that an answer has; pure, no tensors.

The state is a function of the answer's tokens: whoever feeds them again is in the same place.
"""

import contextlib
import os
import random
import sys
import threading
from array import array
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.core.sampling import Sampling
from headrace.text.conversion import tokenizer_file

Allowed = NDArray[np.bool_]

_NUM_WAYS, _WAY_LENGTH = 4, 32
_FEWEST = 32  # what an LLTokenizer takes at least


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or is too large; the message says why."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary; thread-safe. Made once: it takes seconds."""

    def __init__(self, data: bytes, width: int, end_token_ids: tuple[int, ...]) -> None:
        """`data` is the text of a tokenizer.json, `width` that of the logits.

        GrammarError if the tokenizer is of a kind that grammars cannot work with.
        """
        if not end_token_ids:
            raise GrammarError("This model has no end token, so a grammar could not end an answer.")
        self._width = width
        try:
            tokenizer = msgspec.json.decode(data)
            for token in tokenizer.get("added_tokens") or ():
                token["special"] = True  # a marker is no text: a grammar must name it
            self._tokenizer = llguidance.LLTokenizer(
                msgspec.json.encode(tokenizer).decode(),
                n_vocab=max(width, _size(tokenizer), _FEWEST),
                eos_token=list(end_token_ids),
            )
        except Exception as error:  # the library raises what its Rust side says
            raise GrammarError("This model's tokenizer does not work with grammars.") from error

    @classmethod
    def load(cls, folder: Path, width: int, end_token_ids: tuple[int, ...]) -> "GrammarCompiler":
        return cls(tokenizer_file(folder).read_bytes(), width, end_token_ids)

    def compile(self, grammar: str) -> "Grammar":
        """GrammarError with the library's words if it cannot be done."""
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask is the dearest, and all copies share it
        if matcher.is_error():
            raise GrammarError(_first_words(matcher.get_error()))
        return Grammar(matcher, self._width)

    def check(self, grammar: str) -> None:
        """Compiles it and walks a few ways into it; GrammarError if it is too much on the way."""
        compiled = self.compile(grammar)
        for way in range(_NUM_WAYS):
            compiled.walk(random.Random(way))


class Grammar:
    """A compiled grammar, shared by all who follow it."""

    def __init__(self, matcher: llguidance.LLMatcher, width: int) -> None:
        self._matcher = matcher
        self._width = width

    def begin(self, sampling: Sampling) -> "GrammarState":
        return GrammarState(self._matcher.deep_copy(), sampling, self._width)

    def walk(self, dice: random.Random) -> None:
        """The beginning of some answer."""
        matcher = self._matcher.deep_copy()
        for _ in range(_WAY_LENGTH):
            if matcher.is_stopped():
                break
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            may_follow = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            if matcher.is_error() or not len(may_follow):
                break
            matcher.consume_token(int(dice.choice(may_follow)))
        if matcher.is_error():
            raise GrammarError(_first_words(matcher.get_error()))


class GrammarState:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, sampling: Sampling, width: int) -> None:
        self._matcher = matcher
        self._sampling = sampling
        self._width = width
        self._num_fed = 0
        self._is_reasoning = sampling.grammar_waits
        self._ends = list(sampling.end_token_ids)

    def allowed(self, answer: "array[int]") -> Allowed:
        """The tokens that may follow the answer so far, by id; GrammarError if none may."""
        self._take(answer)
        if self._is_reasoning:  # whose end is the model's to choose
            allowed = np.ones(self._width, dtype=np.bool_)
            allowed[self._ends] = False
            return allowed
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarError(_first_words(self._matcher.get_error()))
        allowed = np.zeros(self._width, dtype=np.bool_)
        known = np.unpackbits(bits, count=min(8 * len(bits), self._width), bitorder="little")
        allowed[: len(known)] = known
        self._allow_ends(allowed, len(answer))
        return allowed

    def forced(self, answer: "array[int]") -> tuple[int, ...]:
        """Some tokens that spell what must follow; a fault is told by `allowed`."""
        with contextlib.suppress(GrammarError):
            self._take(answer)
            if not self._is_reasoning and not self._matcher.is_error():
                return tuple(self._matcher.compute_ff_tokens())
        return ()

    def _take(self, answer: "array[int]") -> None:
        for token_id in answer[self._num_fed :]:
            self._feed(token_id)

    def _allow_ends(self, allowed: Allowed, num_generated: int) -> None:
        """Where the grammar may end; once it must, whatever else masks end tokens."""
        allowed[self._ends] = False
        if self._matcher.is_accepting():
            must_end = not allowed.any()
            allowed[self._ends] = must_end or not self._sampling.masks_ends(num_generated)

    def _feed(self, token_id: int) -> None:
        tags = self._sampling.grammar_tags
        if self._is_reasoning:
            self._is_reasoning = tags is None or token_id != tags[1]
        elif tags and not self._num_fed and token_id == tags[0]:
            self._is_reasoning = True
        elif not self._matcher.consume_token(token_id):
            raise GrammarError(_first_words(self._matcher.get_error()))
        self._num_fed += 1


def compile_beside(compiler: GrammarCompiler, grammar: str) -> Grammar:
    """`compile` for a thread of its own: it yields the processor to all others."""
    if sys.platform == "linux":  # whose threads have priorities of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    return compiler.compile(grammar)


def _size(tokenizer: dict[str, Any]) -> int:
    """One more than the largest id; the vocabulary is a mapping to ids, or a list by id."""
    vocabulary = tokenizer["model"]["vocab"]
    ids = vocabulary.values() if isinstance(vocabulary, dict) else (len(vocabulary) - 1,)
    added = (token["id"] for token in tokenizer.get("added_tokens") or ())
    return 1 + max((*ids, *added), default=-1)


def _first_words(message: str) -> str:
    """The library's reason, on one line and without its picture of the place."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("error:")] or lines[:1]
    return reasons[0].removeprefix("error:").strip()[:_SHOWN] if reasons else "unknown"


_SHOWN = 200  # characters
