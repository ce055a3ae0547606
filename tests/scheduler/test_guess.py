"""Tests chunks with guesses: which tokens are accepted, and which resources they may use."""

from array import array

import pytest

from headrace_common.messages import FinishReason
from headrace_common.plan import ChunkResult, Drawn, SlotCopy, StepPlan, StepResult
from headrace_common.sampling import Logprobs, Sampling
from headrace_engine.scheduler.guess import ForcedTokens, Guess, PastTokens
from tests.scheduler.builders import END_TOKEN, Engine, cancel, make_scheduler, make_submit


class Fixed:
    """Always guesses the same tokens."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids

    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        return Guess(self.token_ids[:most], (1.0,) * len(self.token_ids[:most]))


def guessing(*token_ids: int, max_guess: int = 8, **fields: object) -> Engine:
    """Return an engine whose sequences guess these tokens from their second decode step on.

    The first decode step is timed without guesses.
    """
    fixed = Fixed(*token_ids)
    return Engine(make_scheduler(max_guess=max_guess, make_guesser=lambda _: fixed, **fields))


def decoding(engine: Engine, length: int = 4, **fields: object) -> StepPlan:
    """Return the first plan with a guess. Its step is in flight."""
    engine.add(make_submit(1, length, **fields))
    engine.step()
    engine.step()
    plan = engine.scheduler.plan(engine.now)
    assert plan is not None
    return plan


def draws(engine: Engine, plan: StepPlan, *drawn: Drawn) -> None:
    engine.now += 0.01
    result = StepResult(tuple(ChunkResult((one,)) for one in drawn), 0.01)
    engine.scheduler.commit(plan, result, engine.now)
    engine.take()
    engine.scheduler.memory.check()


def sequence(engine: Engine, number: int = 1):
    return engine.scheduler._table[number]


def test_a_guess_lengthens_a_decode_chunk_and_needs_all_its_rows() -> None:
    plan = decoding(guessing(7, 8, 9), max_tokens=20)
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.length, chunk.num_rows) == (5, 4, 4)
    assert chunk.guess == (7, 8, 9) and chunk.draws == (1,)


def test_accepted_guesses_count_and_rejected_ones_are_undone() -> None:
    engine = guessing(7, 8, 9)
    draws(engine, decoding(engine, max_tokens=20), Drawn((7, 8, 50)))
    assert engine.tokens[1][2:] == [7, 8, 50]
    one = sequence(engine)
    assert one.num_computed == one.num_planned == 8 and one.num_tokens == 9
    (chunk,) = engine.scheduler.plan(engine.now).chunks
    assert chunk.start == 8 and chunk.num_known == 1


def test_each_token_has_its_own_row_of_log_probabilities() -> None:
    engine = guessing(7)
    ids, values = array("i", [7, 1, 50, 2]), array("f", [-0.5, -1, -0.25, -2])
    logprobs = Logprobs(2, ids.tobytes(), values.tobytes())
    draws(engine, decoding(engine, max_tokens=20), Drawn((7, 50), logprobs))
    rows = [token.logprobs for token in engine.outputs[-1].tokens]
    assert [array("i", row.ids).tolist() for row in rows] == [[7, 1], [50, 2]]
    assert [array("f", row.values).tolist() for row in rows] == [[-0.5, -1], [-0.25, -2]]


def test_an_end_within_a_guess_ends_the_sequence_there() -> None:
    engine = guessing(7, END_TOKEN, 9)
    draws(engine, decoding(engine, max_tokens=20), Drawn((7, END_TOKEN)))
    assert engine.tokens[1][2:] == [7, END_TOKEN]
    assert engine.finished[1] == (FinishReason.STOP, "")
    assert engine.scheduler.is_idle


def test_no_guess_exceeds_max_tokens() -> None:
    engine = guessing(7, 8, 9)
    plan = decoding(engine, max_tokens=4)
    assert plan.chunks[0].guess == (7,)
    draws(engine, plan, Drawn((7, 8)))
    assert engine.finished[1] == (FinishReason.LENGTH, "")
    last = guessing(7, 8, 9)
    assert decoding(last, max_tokens=3).chunks[0].guess == ()


def test_an_error_after_right_guesses_follows_their_tokens() -> None:
    engine = guessing(7, 8)
    draws(engine, decoding(engine, max_tokens=20), Drawn((7,), error="not a number"))
    assert engine.tokens[1][2:] == [7] and engine.finished[1][0] is FinishReason.ERROR


def test_a_cancel_during_a_step_discards_its_guess() -> None:
    engine = guessing(7, 8)
    plan = decoding(engine, max_tokens=20)
    engine.scheduler.cancel(cancel(1))
    assert engine.scheduler.plan(engine.now) is None
    draws(engine, plan, Drawn((7, 8, 9)))
    assert len(engine.tokens[1]) == 2 and engine.scheduler.is_idle


def test_no_step_is_planned_ahead_of_a_guess() -> None:
    engine = guessing(7, 8)
    plan = decoding(engine, max_tokens=20)
    assert engine.scheduler.plan(engine.now) is None and engine.scheduler.has_streams
    draws(engine, plan, Drawn((50,)))
    assert engine.scheduler.plan(engine.now) is not None


def test_a_failed_step_discards_its_guess() -> None:
    engine = guessing(7, 8)
    plan = decoding(engine, max_tokens=20)
    engine.scheduler.fail(plan, "it broke", engine.now)
    engine.take()
    # The step had no other sequence, so this one is to blame.
    assert engine.finished[1][0] is FinishReason.ERROR
    engine.scheduler.memory.check()


@pytest.mark.parametrize(("num_right", "num_public"), [(0, 0), (1, 1), (3, 1)])
def test_a_block_is_cached_once_it_is_full_of_right_tokens(num_right: int, num_public: int) -> None:
    """The guess crosses a block boundary: it begins at position 14 of 16."""
    engine = guessing(7, 8, 9)
    plan = decoding(engine, length=13, max_tokens=30)
    assert plan.chunks[0].start == 14 and len(sequence(engine).held.block_ids) == 2
    draws(engine, plan, Drawn((*(7, 8, 9)[:num_right], 50)))
    assert sequence(engine).held.num_published == num_public


def test_a_wrong_guess_restores_the_state_and_right_tokens_are_processed_again() -> None:
    engine = guessing(7, 8, 9, num_slots=1, num_snapshots=2)
    plan = decoding(engine, max_tokens=20)
    (keeping,) = plan.restores
    assert keeping.source == plan.chunks[0].slot_id
    draws(engine, plan, Drawn((7, 50)))
    plan = engine.scheduler.plan(engine.now)
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.num_known, chunk.num_rows) == (5, 3, 4)
    assert chunk.guess == (7, 8, 9)
    assert plan.restores == (SlotCopy(keeping.target, keeping.source),)
    draws(engine, plan, Drawn((7, 8, 9, 51)))
    plan = engine.scheduler.plan(engine.now)
    assert plan.chunks[0].start == 11 and plan.restores == (keeping,)  # all were right


def test_tokens_processed_again_leave_room_for_fewer_guesses() -> None:
    engine = guessing(*range(7, 15), num_slots=1, num_snapshots=2)
    draws(engine, decoding(engine, max_tokens=40), Drawn((*range(7, 13), 50)))
    plan = engine.scheduler.plan(engine.now)
    assert plan.chunks[0].num_known == 8 and len(plan.chunks[0].guess) == 1
    draws(engine, plan, Drawn((50,)))
    (chunk,) = engine.scheduler.plan(engine.now).chunks
    assert chunk.num_known == 9 and not chunk.guess


def test_no_chunk_with_guesses_crosses_a_snapshot_boundary() -> None:
    engine = guessing(*range(7, 15), num_slots=1, num_snapshots=4)
    engine.add(make_submit(1, 58, max_tokens=40))
    for _ in range(3):  # the prompt is cut where its last state is saved
        engine.step()
    plan = engine.scheduler.plan(engine.now)
    assert plan.chunks[0].start == 59 and plan.chunks[0].guess == (7, 8, 9)
    draws(engine, plan, Drawn((7, 8, 9, 50)))
    plan = engine.scheduler.plan(engine.now)
    assert (plan.chunks[0].start, plan.chunks[0].guess) == (63, ())
    assert plan.slot_copies[0].source == plan.chunks[0].slot_id


def test_guesses_use_at_most_half_of_the_snapshot_slots() -> None:
    assert not decoding(guessing(7, num_slots=1, num_snapshots=1), max_tokens=20).chunks[0].guess
    assert decoding(guessing(7, num_slots=1, num_snapshots=2), max_tokens=20).chunks[0].guess


def test_a_guess_uses_only_spare_blocks() -> None:
    """The guess begins at position 14 of 16, so it needs a second block."""
    free, full = guessing(7, 8, 9, num_blocks=3), guessing(7, 8, 9, num_blocks=2)
    assert decoding(free, length=13, max_tokens=30).chunks[0].guess == (7, 8, 9)
    assert decoding(full, length=13, max_tokens=30).chunks[0].guess == (7,)


def test_no_guesses_alongside_a_prompt_or_if_turned_off() -> None:
    engine = guessing(7)
    engine.add(make_submit(1, 4, max_tokens=20))
    engine.step()
    engine.step()
    engine.add(make_submit(2, 900, max_tokens=20))
    plan = engine.scheduler.plan(engine.now)
    assert plan is not None and not any(chunk.guess for chunk in plan.chunks)
    asked = Sampling(max_tokens=20, guess=False)
    assert decoding(guessing(7), sampling=asked).chunks[0].guess == ()
    assert decoding(guessing(7, max_guess=0), max_tokens=20).chunks[0].guess == ()
    assert decoding(guessing(7, 8, max_guess=1), max_tokens=20).chunks[0].guess == (7,)


def test_guesses_stop_if_they_cost_more_than_they_save() -> None:
    """A step takes three times as long with two guesses."""
    engine = guessing(7, 8)
    draws(engine, decoding(engine, max_tokens=50), Drawn((50,)))
    for _ in range(20):
        plan = engine.scheduler.plan(engine.now)
        guess = plan.chunks[0].guess
        engine.now += 0.02 * len(guess)
        draws(engine, plan, Drawn((50,)))
    assert guess == ()


def guesses(token_ids: list[int], most: int = 4) -> tuple[int, ...]:
    return PastTokens().guess(array("i", token_ids), (), most).token_ids


def test_the_tokens_that_followed_the_same_text_are_guessed() -> None:
    assert guesses([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == (4, 5, 6, 9)
    assert guesses([1, 2, 3, 4, 8, 2, 3, 5, 9, 1, 2, 3]) == (4, 8, 2, 3)  # the longest counts
    assert guesses([1, 2, 7, 7, 1, 2, 8, 8, 1, 2]) == (8, 8, 1, 2)  # else the last one
    assert guesses([4, 5, 4, 5, 4]) == (5, 4, 5, 4)  # a loop goes on
    assert guesses([1, 2, 3, 4]) == guesses([1]) == ()


def test_acceptance_estimates_follow_the_results() -> None:
    guesser, text = PastTokens(), [*range(10, 40)]
    token_ids = array("i", text + text[:2])
    first = guesser.guess(token_ids, (), 4)
    assert list(first.chances) == sorted(first.chances, reverse=True)
    for token_id in text[2:20]:
        token_ids.append(token_id)
        assert guesser.guess(token_ids, (), 4).token_ids[0] == token_id + 1
    assert guesser.guess(token_ids, (), 4).chances[0] > 0.9 > first.chances[0]
    unlike = PastTokens()
    token_ids = array("i", text)
    for number in range(20):
        token_ids.extend([10, 11, 100 + number])  # something else each time
        chance = max(unlike.guess(token_ids[:-1], (), 1).chances, default=0.0)
        unlike.guess(token_ids, (), 1)
    assert chance < 0.1


def test_forced_tokens_are_guessed_and_their_acceptance_is_learned() -> None:
    guesser, token_ids = ForcedTokens(), array("i", [1, 2])
    assert guesser.guess(token_ids, (), 4) == Guess()
    first = guesser.guess(token_ids, (3, 4, 5), 2)
    assert first.token_ids == (3, 4)
    token_ids.append(9)
    assert guesser.guess(token_ids, (3, 4, 5), 2).chances[0] < first.chances[0]
