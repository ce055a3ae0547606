"""Compiles grammars with llguidance, and computes which tokens may come next.

The state of a grammar depends only on the answer's tokens. So feeding the same tokens again
restores the state.
"""

import contextlib
import json
import os
import random
import re
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace_common.checkpoints.small_file import read_small
from headrace_common.checkpoints.tokenizer_file import MAX_FILE, tokenizer_file
from headrace_common.sampling import Sampling

Allowed = NDArray[np.bool_]

_NUM_WAYS, _WAY_LENGTH = 4, 32
_FEWEST = 32  # the smallest vocabulary that LLTokenizer accepts
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)

TOO_COMPLEX = "is too large or too complex for a grammar"
UNSATISFIABLE = "cannot be satisfied by any answer"
OVERLAPPING = "has schemas that do not exclude each other by type or const; use anyOf"
SAME_NAMES = "has patterns that may match the same name"
COUNTED = "limits the number of properties although some are optional"
_REASONS = (
    ("no start rule", "has no rule named start"),
    ("look-around", "uses look-around"),
    ("lookarounds", "uses look-around or a word boundary"),
    ("backreferences", "uses a backreference"),
    ("unclosed group", "has an unclosed group"),
    ("unopened group", "closes a group that was not opened"),
    ("unclosed character class", "has an unclosed bracket"),
    ("character class range", "has a range of characters that ends before it starts"),
    ("Unicode property", "names an unknown Unicode property"),
    ("repetition count", "has a repetition whose lower limit is above its upper one"),
    ("repetition operator", "repeats nothing"),
    ("range end must be", "has a repetition whose lower limit is above its upper one"),
    ("escape sequence", "has an unknown escape"),
    ("Unsatisfiable", UNSATISFIABLE),
    ("NoExtension", UNSATISFIABLE),
    ("oneOf", OVERLAPPING),
    ("disjoint", SAME_NAMES),
    ("maxProperties", COUNTED),
    ("circular reference", "refers back to itself"),
    ("unknown name", "uses a rule that is not defined"),
    ("too deeply nested", TOO_COMPLEX),
    ("nest", TOO_COMPLEX),
    ("fuel", TOO_COMPLEX),
    ("too large", TOO_COMPLEX),
    ("too many", TOO_COMPLEX),
    ("omplex", TOO_COMPLEX),
    ("limit", TOO_COMPLEX),
    ("exceed", TOO_COMPLEX),
    ("regex parse error", "is not a regular expression"),
    ("stack level", TOO_COMPLEX),
)
"""Fragments of llguidance's messages, each with a meaning for clients.

Each meaning is worded as the end of a sentence.
"""

_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\):")


class GrammarError(ValueError):
    """The grammar cannot be compiled or is too large.

    The message is the end of a sentence whose subject is the grammar. Only the constructor of
    GrammarCompiler raises errors with whole sentences.
    """


class GrammarCompiler:
    """Compiles grammars for one vocabulary; thread-safe. The constructor takes seconds."""

    def __init__(self, data: bytes, width: int, end_token_ids: tuple[int, ...]) -> None:
        """Read a tokenizer.

        `data` is the content of tokenizer.json, and `width` is the number of logits. Raises
        GrammarError if there are no end tokens, or if llguidance does not support the tokenizer.
        """
        if not end_token_ids:
            raise GrammarError("This model has no end token, so a grammar could not end an answer.")
        self._width = width
        with _refusing("This model's tokenizer does not work with grammars."):
            tokenizer = msgspec.json.decode(data)
            for token in tokenizer.get("added_tokens") or ():
                # Mark each added token as special. llguidance allows a special token only where the
                # grammar names the token.
                token["special"] = True
            self._tokenizer = llguidance.LLTokenizer(
                msgspec.json.encode(tokenizer).decode(),
                n_vocab=max(width, _size(tokenizer), _FEWEST),
                eos_token=list(end_token_ids),
            )

    @classmethod
    def load(cls, folder: Path, width: int, end_token_ids: tuple[int, ...]) -> "GrammarCompiler":
        return cls(read_small(tokenizer_file(folder), MAX_FILE), width, end_token_ids)

    def compile(self, grammar: str) -> "Grammar":
        """Compile a grammar. Raises GrammarError if llguidance refuses the grammar."""
        with _refusing("cannot be compiled as a grammar"):
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
            if not matcher.is_error():
                # The first mask takes longest. All copies of this matcher reuse the work.
                matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(reason(matcher.get_error()))
        return Grammar(matcher, self._width)

    def check(self, grammar: str) -> None:
        """Compile a grammar and generate some random answers with the grammar.

        Raises GrammarError if the compilation or one of the answers fails.
        """
        compiled = self.compile(grammar)
        for way in range(_NUM_WAYS):
            compiled.walk(random.Random(way))


class Grammar:
    """A compiled grammar, shared by all sequences that use it."""

    def __init__(self, matcher: llguidance.LLMatcher, width: int) -> None:
        self._matcher = matcher
        self._width = width

    def begin(self, sampling: Sampling) -> "GrammarState":
        return GrammarState(self._matcher.deep_copy(), sampling, self._width)

    def walk(self, dice: random.Random) -> None:
        """Generate the start of a random answer with the grammar.

        Raises GrammarError if the library fails, or if no token can follow an incomplete answer.
        """
        with _refusing(TOO_COMPLEX):
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
            raise GrammarError(reason(matcher.get_error()))
        if matcher.is_stopped() and not matcher.is_accepting():
            raise GrammarError(UNSATISFIABLE)


class GrammarState:
    """The state of a grammar for one answer."""

    def __init__(self, matcher: llguidance.LLMatcher, sampling: Sampling, width: int) -> None:
        self._matcher = matcher
        self._sampling = sampling
        self._width = width
        self._num_fed = 0
        self._is_reasoning = sampling.grammar_waits
        self._ends = list(sampling.end_token_ids)

    def allowed(self, answer: "array[int]") -> Allowed:
        """Return a mask of the tokens that may follow the answer.

        Raises GrammarError if the library cannot compute the mask.
        """
        with _refusing(TOO_COMPLEX):
            return self._allowed(answer)

    def _allowed(self, answer: "array[int]") -> Allowed:
        self._take(answer)
        # The grammar does not apply to reasoning. The model decides when the reasoning ends.
        if self._is_reasoning:
            allowed = np.ones(self._width, dtype=np.bool_)
            allowed[self._ends] = False
            return allowed
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarError(reason(self._matcher.get_error()))
        allowed = np.zeros(self._width, dtype=np.bool_)
        known = np.unpackbits(bits, count=min(8 * len(bits), self._width), bitorder="little")
        allowed[: len(known)] = known
        self._allow_ends(allowed, len(answer))
        return allowed

    def forced(self, answer: "array[int]") -> tuple[int, ...]:
        """Return the next tokens as long as the grammar allows only one token at a time.

        Returns an empty tuple after an error, because `allowed` reports the error.
        """
        with contextlib.suppress(GrammarError), _refusing(TOO_COMPLEX):
            self._take(answer)
            if not self._is_reasoning and not self._matcher.is_error():
                return tuple(self._matcher.compute_ff_tokens())
        return ()

    def _take(self, answer: "array[int]") -> None:
        for token_id in answer[self._num_fed :]:
            self._feed(token_id)

    def _allow_ends(self, allowed: Allowed, num_generated: int) -> None:
        """Allow end tokens if the grammar may end here.

        If the grammar must end, end tokens are allowed even if the sampling parameters mask them.
        """
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
            raise GrammarError(reason(self._matcher.get_error()))
        self._num_fed += 1


def compile_beside(compiler: GrammarCompiler, grammar: str) -> Grammar:
    """Compile a grammar in the calling thread, which gets the lowest priority."""
    # On Linux, each thread has a separate priority.
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    return compiler.compile(grammar)


def _size(tokenizer: dict[str, Any]) -> int:
    """Return the largest token id plus 1.

    A vocabulary is a map of tokens to ids, or a list of tokens.
    """
    vocabulary = tokenizer["model"]["vocab"]
    ids = vocabulary.values() if isinstance(vocabulary, dict) else (len(vocabulary) - 1,)
    added = (token["id"] for token in tokenizer.get("added_tokens") or ())
    return 1 + max((*ids, *added), default=-1)


def pattern_fault(pattern: str) -> str:
    """Return why a pattern cannot be enforced, as the end of a sentence.

    Returns "" if the pattern can be enforced.
    """
    grammar = {"json_schema": {"type": "string", "pattern": pattern}}
    with _refusing("is not a regular expression"):
        fault = llguidance.LLMatcher.validate_grammar(
            json.dumps({"grammars": [grammar]}), limits=_LIMITS
        )
    return reason(fault) if fault else ""


def lark_fault(rules: str) -> str:
    """Return why Lark rules cannot be enforced, as the end of a sentence.

    Returns "" if the rules can be enforced.
    """
    with _refusing("is not a Lark grammar"):
        grammar = json.dumps({"grammars": [{"lark_grammar": rules}]})
        fault = llguidance.LLMatcher.validate_grammar(grammar, limits=_LIMITS)
    return reason(fault) if fault else ""


def reason(message: str) -> str:
    """Translate an error message of llguidance, because the original mentions its internals."""
    found = next((words for mark, words in _REASONS if mark in message), None)
    place = _PLACE.match(message)
    if place is None or found == TOO_COMPLEX:
        return found or "cannot be compiled as a grammar"
    where = f"line {place[1]}, column {place[2]}"
    return f"{found} ({where})" if found else f"cannot be read at {where}"


@contextlib.contextmanager
def _refusing(message: str) -> Iterator[None]:
    """Turn every exception of llguidance into a GrammarError.

    A panic in Rust is a BaseException but not an Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, GrammarError):
        raise
    except BaseException as error:
        raise GrammarError(message) from error
