"""Tests that only sequences that need a grammar wait while it is compiled."""

import queue
import threading
from typing import Any

from headrace_common.grammar import GrammarError
from headrace_common.ids import SequenceId
from headrace_common.messages import FinishReason, Outputs, Shutdown
from headrace_common.sampling import Sampling
from headrace_engine.engine import Engine, Inbox
from headrace_engine.grammars import Compiled, Grammars
from tests.engine.fakes import Runner, Sent
from tests.scheduler.builders import cancel, make_scheduler, make_submit

CONSTRAINED = Sampling(max_tokens=2, end_token_ids=(1,), grammar="a")


class SlowCompiler:
    """A compiler that waits for permission, and counts its calls."""

    def __init__(self, error: str = "") -> None:
        self.may = threading.Event()
        self.num_asked = 0
        self._error = error

    def compile(self, grammar: str) -> Any:
        self.num_asked += 1
        assert self.may.wait(10)
        if self._error:
            raise GrammarError(self._error)
        return f"compiled {grammar}"


class Ends(Sent):
    """Records ended sequences. Releases the compiler after the first, and stops after the last."""

    def __init__(self, inbox: Inbox, compiler: SlowCompiler, wanted: int) -> None:
        super().__init__()
        self.ended: list[tuple[int, FinishReason]] = []
        self._inbox, self._compiler, self._wanted = inbox, compiler, wanted

    def put(self, message: Any) -> None:
        if isinstance(message, Outputs):
            self.ended += [(end.sequence_id, end.finish) for end in message.finished]
            if self.ended:
                self._compiler.may.set()
            if len(self.ended) == self._wanted:
                self._inbox.put(Shutdown())


def play(compiler: SlowCompiler, *messages: Any, wanted: int) -> list[tuple[int, FinishReason]]:
    inbox: Inbox = queue.SimpleQueue()
    ends = Ends(inbox, compiler, wanted)
    for message in messages:
        inbox.put(message)
    grammars = Grammars(compiler)  # type: ignore[arg-type]
    Engine(make_scheduler(), Runner(), ends, grammars=grammars).run(inbox)
    return ends.ended


def test_a_slow_grammar_does_not_stall_other_sequences() -> None:
    waiting = make_submit(1, 4, sampling=CONSTRAINED)
    ended = play(SlowCompiler(), waiting, make_submit(2, 4, max_tokens=2), wanted=2)
    assert ended == [(2, FinishReason.LENGTH), (1, FinishReason.LENGTH)]


def test_a_sequence_may_be_cancelled_while_its_grammar_is_compiled() -> None:
    waiting = make_submit(1, 4, sampling=CONSTRAINED)
    other = make_submit(2, 4, max_tokens=2)
    ended = play(SlowCompiler(), waiting, cancel(1), other, wanted=2)
    assert ended == [(2, FinishReason.LENGTH), (1, FinishReason.CANCELLED)]


def test_a_failed_grammar_ends_only_its_sequences() -> None:
    waiting = make_submit(1, 4, sampling=CONSTRAINED)
    ended = play(SlowCompiler("no"), waiting, make_submit(2, 4, max_tokens=2), wanted=2)
    assert ended == [(2, FinishReason.LENGTH), (1, FinishReason.ERROR)]


def test_a_grammar_is_compiled_once_and_kept_while_a_sequence_needs_it() -> None:
    compiler, done = SlowCompiler(), queue.SimpleQueue[Compiled]()
    compiler.may.set()
    grammars = Grammars(compiler)  # type: ignore[arg-type]
    for number in (1, 2):
        grammars.prepare(make_submit(number, 4, sampling=CONSTRAINED), done.put)
        assert done.get(timeout=10).error == ""
    grammars.release([SequenceId(1)])
    assert compiler.num_asked == 1 and grammars._compiling
    grammars.release([SequenceId(2), SequenceId(3)])
    assert not grammars._compiling
