"""Simulates the clients of a schedule, and checks each output that a client receives."""

from array import array
from dataclasses import dataclass, field

from headrace_common.messages import Finished, FinishReason, NewSequence, Outputs, Submit
from stress.simulator.fake_runner import token_at


@dataclass
class Heard:
    """The outputs of one sequence, as its client received them.

    The counts of progress start from 0 again after the death of an engine.
    """

    submit: Submit
    new: NewSequence
    max_total: int
    # Only the first sequence of a prompt reports progress.
    is_first: bool
    tokens: list[int] = field(default_factory=list)
    end: Finished | None = None
    total: int | None = None
    processed: int = -1
    # The number of prompt tokens for which a row of log probabilities has arrived.
    rows_until: int = 0

    @property
    def prompt(self) -> "array[int]":
        return array("i", self.submit.prompts[self.new.prompt])

    @property
    def num_shown(self) -> int:
        """The number of tokens that progress counts."""
        inputs = self.submit.inputs
        works = inputs[self.new.prompt].works if inputs else ()
        return sum(work.size for work in works if work.is_source) or len(self.prompt)

    def expected(self) -> tuple[list[int], FinishReason]:
        """Return the whole answer, computed from the request alone, and why it ends."""
        num_prompt, sampling = len(self.prompt), self.submit.sampling
        tokens: list[int] = []
        most = self.max_total - num_prompt
        if sampling.max_tokens is not None:
            most = min(most, sampling.max_tokens)
        while len(tokens) < most:
            tokens.append(token_at(sampling, self.new.choice, len(tokens)))
            if sampling.ends_with(tokens[-1], len(tokens)):
                return tokens, FinishReason.STOP
        return tokens, FinishReason.LENGTH


class Clients:
    """All sequences that were submitted."""

    def __init__(self, max_total: int) -> None:
        self._max_total = max_total
        self.heard: dict[int, Heard] = {}

    def submit(self, submit: Submit) -> None:
        seen: set[int] = set()
        for new in submit.sequences:
            is_first = new.prompt not in seen
            seen.add(new.prompt)
            self.heard[new.sequence_id] = Heard(submit, new, self._max_total, is_first)

    def unfinished(self) -> list[Heard]:
        return [heard for heard in self.heard.values() if heard.end is None]

    def engine_died(self) -> None:
        for heard in self.unfinished():
            heard.total, heard.processed, heard.rows_until = None, -1, 0

    def take(self, outputs: Outputs) -> None:
        """Takes the outputs of a step, and checks that they are allowed.

        Everything must arrive in order and once, and nothing may follow a sequence's end.
        """
        for started in outputs.started:
            heard = self._living(started.sequence_id)
            assert heard.total is None, "started twice"
            assert started.total == heard.num_shown
            assert 0 <= started.cached < started.total + len(heard.tokens)
            heard.total, heard.processed = started.total, started.cached
            assert not (started.cached and heard.submit.sampling.num_prompt_logprobs is not None)
        self._take_rows(outputs)
        for progress in outputs.progress:
            heard = self._living(progress.sequence_id)
            assert heard.total is not None
            assert heard.processed < progress.processed <= heard.total, "progress did not increase"
            heard.processed = progress.processed
        for token in outputs.tokens:
            heard = self._living(token.sequence_id)
            is_told = heard.total is not None or not heard.is_first
            assert is_told, "a token arrived before its sequence started"
            assert heard.total in (None, heard.processed), (
                "a token arrived before the end of its prompt"
            )
            heard.tokens.append(token.token_id)
        for end in outputs.finished:
            self._living(end.sequence_id).end = end

    def _take_rows(self, outputs: Outputs) -> None:
        for rows in outputs.prompt_logprobs:
            heard = self._living(rows.sequence_id)
            ids = array("i", rows.logprobs.ids)
            assert rows.start == heard.rows_until + 1, (
                "rows of log probabilities are missing or were sent twice"
            )
            assert ids == heard.prompt[rows.start : rows.start + len(ids)]
            heard.rows_until += len(ids)

    def _living(self, sequence_id: int) -> Heard:
        heard = self.heard[sequence_id]
        assert heard.end is None, f"output after the end of {sequence_id}"
        return heard
