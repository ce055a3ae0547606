"""What the scheduler has to say since it was last asked, in the order clients need."""

from headrace.core.messages import (
    Finished,
    NewToken,
    Outputs,
    Progress,
    PromptLogprobs,
    Started,
)
from headrace.core.plan import ChunkResult, Drawn
from headrace.scheduler.sequence import Sequence


class Outbox:
    """Collects outputs until they are taken."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._started: list[Started] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._progress: list[Progress] = []
        self._tokens: list[NewToken] = []
        self._finished: list[Finished] = []

    @property
    def is_empty(self) -> bool:
        return not (
            self._started
            or self._prompt_logprobs
            or self._progress
            or self._tokens
            or self._finished
        )

    def take(self) -> Outputs:
        outputs = Outputs(
            tuple(self._started),
            tuple(self._prompt_logprobs),
            tuple(self._progress),
            tuple(self._tokens),
            tuple(self._finished),
        )
        self._clear()
        return outputs

    def started(self, sequence: Sequence) -> None:
        """A sequence is in a plan for the first time; its siblings say nothing."""
        sequence.num_reported = sequence.num_cached
        if sequence.is_reporter:
            self._started.append(Started(sequence.id, sequence.num_prompt, sequence.num_cached))

    def computed(self, sequence: Sequence, start: int, result: ChunkResult) -> None:
        """Tokens from `start` on are computed; nothing is said below what was said before."""
        processed = min(sequence.num_computed, sequence.num_prompt)
        if processed <= sequence.num_reported:
            return
        sequence.num_reported = processed
        if not sequence.is_reporter:
            return
        self._progress.append(Progress(sequence.id, processed))
        if result.prompt_logprobs is not None:
            rows = PromptLogprobs(sequence.id, start + 1, result.prompt_logprobs)
            self._prompt_logprobs.append(rows)

    def token(self, sequence: Sequence, token_id: int, drawn: Drawn) -> None:
        self._tokens.append(NewToken(sequence.id, token_id, drawn.logprobs))

    def finished(self, outcome: Finished) -> None:
        self._finished.append(outcome)
