"""A runner without a model and an outbox without a socket, for tests of the engine's loop."""

from collections.abc import Callable

from headrace_common.layout import MemoryLayout
from headrace_common.messages import FinishReason, Message, Outputs, Status
from headrace_common.plan import StepPlan, StepResult
from stress.simulator.fake_runner import FakeRunner


class Runner:
    """A model that computes nothing and says that it took a hundredth of a second.

    Its first steps raise `errors`, one each.
    """

    def __init__(self, *errors: BaseException) -> None:
        self.lengths: list[int] = []  # of the first chunk of each step
        self._errors = list(errors)
        self._fake = FakeRunner(MemoryLayout(16, 1000), {1: "", 2: ""})

    def launch(self, plan: StepPlan) -> "Runner":
        self.lengths.append(plan.chunks[0].length)
        if self._errors:
            raise self._errors.pop(0)
        self._result = self._fake.execute(plan, (0.01, ()), {})
        return self

    def result(self) -> StepResult:
        return self._result


class Sent:
    """An outbox that records messages. `unsent` are the first results of `num_unsent`."""

    def __init__(self, *unsent: int) -> None:
        self.statuses: list[Status] = []
        self.finishes: list[FinishReason] = []
        self.when_done: Callable[[], None] = lambda: None
        self._unsent = list(unsent)

    def put(self, message: Message) -> None:
        if isinstance(message, Status):
            self.statuses.append(message)
        elif isinstance(message, Outputs):
            self.finishes += [finished.finish for finished in message.finished]
            if message.finished:
                self.when_done()

    def num_unsent(self) -> int:
        return self._unsent.pop(0) if self._unsent else 0
