"""Compiles grammars for the engine in threads. A grammar is kept while a sequence uses it."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from headrace_common.grammar import (
    Grammar,
    GrammarCompiler,
    GrammarError,
    GrammarState,
    compile_beside,
)
from headrace_common.ids import SequenceId
from headrace_common.messages import Finished, FinishReason, Submit
from headrace_common.sampling import Sampling

logger = logging.getLogger(__name__)

_NUM_THREADS = 2


class Compiled(NamedTuple):
    """A message to the engine's inbox: the grammar of a Submit is ready, or failed to compile."""

    submit: Submit
    error: str = ""


class Grammars:
    """Tracks the grammars of an engine. Only the engine's thread may call the methods."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        """`compiler` is None if the tokenizer does not support grammars; all grammars then fail."""
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._compiling: dict[str, Future[Grammar]] = {}
        self._num_users: Counter[str] = Counter()
        self._used: dict[SequenceId, str] = {}

    def prepare(self, submit: Submit, put: Callable[[Compiled], None]) -> None:
        """Compile the grammar of `submit`, then pass a Compiled to `put`.

        The grammar is kept until `release` has been called for each sequence of the submit.
        """
        grammar = submit.sampling.grammar
        for sequence in submit.sequences:
            self._used[sequence.sequence_id] = grammar
            self._num_users[grammar] += 1
        if self._compiler is None:
            put(Compiled(submit, "This model's tokenizer does not support grammars."))
            return
        compiling = self._compiling.get(grammar)
        if compiling is None:
            compiling = self._threads.submit(compile_beside, self._compiler, grammar)
            self._compiling[grammar] = compiling
        compiling.add_done_callback(lambda done: put(Compiled(submit, _error(done))))

    def constrain(self, sampling: Sampling) -> GrammarState | None:
        """Return a new state of the grammar in `sampling`, or None if there is no grammar.

        The message that `prepare` sends must have arrived before this call.
        """
        if not sampling.grammar:
            return None
        return self._compiling[sampling.grammar].result().begin(sampling)

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Stop using the grammars of sequences that have ended."""
        for sequence_id in sequence_ids:
            grammar = self._used.pop(sequence_id, None)
            if grammar is None:
                continue
            self._num_users[grammar] -= 1
            if not self._num_users[grammar]:
                del self._num_users[grammar]
                self._compiling.pop(grammar, None)


def failures(compiled: Compiled) -> tuple[Finished, ...]:
    """Return an error for each sequence of a Submit whose grammar failed to compile."""
    return tuple(
        Finished(sequence.sequence_id, FinishReason.ERROR, "internal_error", compiled.error)
        for sequence in compiled.submit.sequences
    )


def _error(done: "Future[Grammar]") -> str:
    fault = done.exception()
    if fault is None:
        return ""
    if not isinstance(fault, GrammarError):
        logger.error("A grammar could not be compiled", exc_info=fault)
        return "The grammar of this answer could not be compiled; see the server's log."
    return f"The grammar of this answer cannot be compiled: it {fault}."
