"""Turns a Submit into sequences, or says why one of them can never run."""

from array import array
from collections.abc import Iterator

from headrace.core.messages import Finish, Finished, NewSequence, Submit
from headrace.memory.memory import Memory
from headrace.scheduler.sequence import Family, Sequence


class Intake:
    """Numbers sequences as they come; `max_total` is the limit of any of them."""

    def __init__(self, memory: Memory, max_total: int) -> None:
        self._memory = memory
        self._max_total = max_total
        self._num_admitted = 0

    def sequences(self, submit: Submit) -> Iterator[Sequence]:
        """All choices; those of one prompt form a family, but for suspects, who run alone."""
        families: dict[int, Family] = {}
        for new in submit.sequences:
            sequence = self._sequence(submit, new)
            family = families.setdefault(new.prompt, Family(sequence))
            sequence.is_reporter = family.leader is sequence
            if not submit.suspect:
                sequence.family = family
            yield sequence

    def _sequence(self, submit: Submit, new: NewSequence) -> Sequence:
        token_ids = array("i", submit.prompts[new.prompt])
        num_prompt = len(token_ids)
        token_ids.frombytes(new.generated)
        max_total, max_tokens = self._max_total, submit.sampling.max_tokens
        if max_tokens is not None:
            max_total = min(num_prompt + max_tokens, max_total)
        self._num_admitted += 1
        return Sequence(
            id=new.sequence_id,
            token_ids=token_ids,
            num_prompt=num_prompt,
            choice=new.choice,
            sampling=submit.sampling,
            max_total=max_total,
            priority=submit.priority,
            arrival=submit.arrival,
            number=self._num_admitted,
            chain=self._memory.chain(submit.salt),
            takes_credit=submit.use_prefix,
        )

    def outcome_before_any_step(self, sequence: Sequence) -> Finished | None:
        """The end of a sequence that cannot run, or of a recovered one that is already whole."""
        if not sequence.num_prompt:
            message = "The prompt has no tokens; send at least one."
            return Finished(sequence.id, Finish.ERROR, "empty_prompt", message)
        longest = self._max_total - (sequence.sampling.max_tokens != 0)
        if sequence.num_prompt > longest:
            message = (
                f"The prompt has {sequence.num_prompt} tokens, and the context of "
                f"{self._max_total} tokens leaves room for {longest}; shorten the prompt."
            )
            return Finished(sequence.id, Finish.ERROR, "context_length_exceeded", message)
        reason = sequence.end_reason() if sequence.num_generated else None
        return Finished(sequence.id, reason) if reason else None
