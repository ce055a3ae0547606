"""Runs requests through an engine's own loop, with no process and no HTTP around the engine."""

import itertools
from array import array
from random import Random
from typing import NamedTuple

import msgspec

from headrace_common.config.settings import SchedulerConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import Message, NewSequence, Outputs, Status, Submit
from headrace_common.sampling import Logprobs, Sampling
from headrace_engine.engine import Engine, Inbox
from headrace_engine.grammars import Grammars
from headrace_engine.runner.runner import Runner
from headrace_engine.scheduler.budget import resolve
from headrace_engine.scheduler.guess import Guess
from headrace_engine.scheduler.guessing import MakeGuesser, own_guesser
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_engine.scheduler.sequence import Sequence

Answer = tuple[tuple[tuple[int, Logprobs | None], ...], str]


class Run(NamedTuple):
    answers: dict[int, Answer]
    num_steps: int
    status: Status
    states: dict[int, list[bytes]]  # of the samplers, after each token


class Heard:
    """An engine's outbox that collects the tokens and ends, as the engine's client does."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[tuple[int, Logprobs | None]]] = {}
        self.states: dict[int, list[bytes]] = {}
        self.finished: dict[int, str] = {}

    def put(self, message: Message) -> None:
        if isinstance(message, Outputs):
            for token in message.tokens:
                told = self.tokens.setdefault(token.sequence_id, [])
                told.append((token.token_id, token.logprobs))
                self.states.setdefault(token.sequence_id, []).append(token.state)
            self.finished |= {end.sequence_id: str(end.finish) for end in message.finished}

    def num_unsent(self) -> int:
        return 0


def run_engine(
    scheduler: Scheduler, runner: Runner, asked: list[Submit], grammars: Grammars | None = None
) -> Run:
    """Run requests. All steps take equal time, so that as many tokens as possible are guessed."""
    heard, inbox = Heard(), Inbox()
    engine = Engine(scheduler, runner, heard, grammars=grammars)
    engine._clock = itertools.count().__next__
    for submit in asked:
        inbox.put(submit)
    names = {new.sequence_id for submit in asked for new in submit.sequences}
    while heard.finished.keys() != names:
        assert engine._receive(inbox)
        engine.step()
    scheduler.memory.check()
    answers = {name: (tuple(heard.tokens.get(name, ())), heard.finished[name]) for name in names}
    status = scheduler.status()
    return Run(answers, status.num_steps, status, heard.states)


def run_prompts(
    runner: Runner,
    layout: MemoryLayout,
    prompts: list[list[int]],
    sampling: Sampling,
    make_guesser: MakeGuesser | None = None,
) -> Run:
    """Runs all prompts at once in the memory of `layout`; guesses only with a guesser."""
    runner.lane.open(layout)
    settings = SchedulerConfig(max_stall_ms="off", max_step_ms="off")
    limits = resolve(settings, layout, "cpu", layout.num_slots or len(prompts), 256)
    limits = msgspec.structs.replace(limits, max_guess=8 if make_guesser else 0)
    scheduler = Scheduler(settings, layout, limits, make_guesser=make_guesser or own_guesser)
    return run_engine(scheduler, runner, submits_of(prompts, sampling))


def submits_of(prompts: list[list[int]], sampling: Sampling) -> list[Submit]:
    """Return a request for each prompt; the requests and their sequences have the same numbers."""
    return [
        Submit(
            StreamId(str(number)),
            (array("i", prompt).tobytes(),),
            (NewSequence(SequenceId(number), 0, 0),),
            sampling,
            arrival=float(number),
        )
        for number, prompt in enumerate(prompts)
    ]


class Prophet:
    """Knows the answer and guesses from it; on average, `share` of the guessed tokens are right."""

    def __init__(self, sequence: Sequence, answers: dict[int, Answer], share: float) -> None:
        self._answer = [token_id for token_id, _ in answers[sequence.id][0]]
        self._num_prompt, self._share = sequence.num_prompt, share
        self._dice = Random(sequence.id)

    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        first = len(token_ids) - self._num_prompt
        coming = self._answer[first : first + most] + [5] * 3  # continues after the end
        told = [i if self._dice.random() < self._share else i ^ 1 for i in coming][:most]
        return Guess(tuple(told), (1.0,) * len(told))
