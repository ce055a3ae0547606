"""The clients of a schedule: what they have heard, checked against what they may hear."""

from array import array
from dataclasses import dataclass, field

from headrace_common.messages import Finished, FinishReason, NewSequence, Outputs, Submit
from stress.simulator.fake_runner import token_at


@dataclass
class Heard:
    """One sequence's outputs. Progress starts over when an engine has died."""

    submit: Submit
    new: NewSequence
    max_total: int
    is_first: bool  # of its prompt: the one that reports
    tokens: list[int] = field(default_factory=list)
    end: Finished | None = None
    total: int | None = None
    processed: int = -1
    rows_until: int = 0  # prompt tokens that had their row

    @property
    def prompt(self) -> "array[int]":
        return array("i", self.submit.prompts[self.new.prompt])

    @property
    def num_shown(self) -> int:
        """Tokens that progress counts."""
        inputs = self.submit.inputs
        works = inputs[self.new.prompt].works if inputs else ()
        return sum(work.size for work in works if work.is_source) or len(self.prompt)

    def expected(self) -> tuple[list[int], FinishReason]:
        """The whole answer, from the request alone."""
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
        """S8, S9, S11: in order, each thing once, and nothing after the end."""
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
            assert heard.processed < progress.processed <= heard.total, "progress fell or stayed"
            heard.processed = progress.processed
        for token in outputs.tokens:
            heard = self._living(token.sequence_id)
            is_told = heard.total is not None or not heard.is_first
            assert is_told, "a token of a sequence that did not start"
            assert heard.total in (None, heard.processed), "a token before its prompt"
            heard.tokens.append(token.token_id)
        for end in outputs.finished:
            self._living(end.sequence_id).end = end

    def _take_rows(self, outputs: Outputs) -> None:
        for rows in outputs.prompt_logprobs:
            heard = self._living(rows.sequence_id)
            ids = array("i", rows.logprobs.ids)
            assert rows.start == heard.rows_until + 1, "rows missing or sent twice"
            assert ids == heard.prompt[rows.start : rows.start + len(ids)]
            heard.rows_until += len(ids)

    def _living(self, sequence_id: int) -> Heard:
        heard = self.heard[sequence_id]
        assert heard.end is None, f"output after the end of {sequence_id}"
        return heard
