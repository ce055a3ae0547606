"""Turns a Submit into sequences, or says why one of them can never run."""

from array import array

from headrace.core.messages import Finish, Finished, NewSequence, Submit
from headrace.scheduler.sequence import Sequence


def new_sequence(submit: Submit, new: NewSequence, max_total: int, number: int) -> Sequence:
    """`max_total` is the limit of any sequence; the request may ask for less."""
    token_ids = array("i", submit.prompts[new.prompt])
    num_prompt = len(token_ids)
    token_ids.frombytes(new.generated)
    max_tokens = submit.sampling.max_tokens
    return Sequence(
        id=new.sequence_id,
        token_ids=token_ids,
        num_prompt=num_prompt,
        choice=new.choice,
        sampling=submit.sampling,
        max_total=max_total if max_tokens is None else min(num_prompt + max_tokens, max_total),
        priority=submit.priority,
        arrival=submit.arrival,
        number=number,
    )


def outcome_before_any_step(sequence: Sequence, max_total: int) -> Finished | None:
    """The end of a sequence that cannot run, or of a recovered one that is already whole."""
    if not sequence.num_prompt:
        message = "The prompt has no tokens; send at least one."
        return Finished(sequence.id, Finish.ERROR, "empty_prompt", message)
    longest = max_total if sequence.sampling.max_tokens == 0 else max_total - 1
    if sequence.num_prompt > longest:
        message = (
            f"The prompt has {sequence.num_prompt} tokens, and the context of {max_total} "
            f"tokens leaves room for {longest}; shorten the prompt."
        )
        return Finished(sequence.id, Finish.ERROR, "context_length_exceeded", message)
    reason = sequence.end_reason() if sequence.num_generated else None
    return Finished(sequence.id, reason) if reason else None
