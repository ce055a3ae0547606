"""Tests drafts: when they are planned, and which tokens the draft model reads."""

from array import array

from headrace_common.plan import DRAFTED, ChunkResult, Drawn, StepPlan, StepResult
from headrace_common.sampling import Sampling
from headrace_engine.scheduler.guess import DraftChance, Guess
from headrace_engine.scheduler.guessing import MAX_UNREAD
from tests.scheduler.builders import Engine, make_scheduler, make_submit

STEP_S = 0.01


class NoGuesser:
    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        return Guess()


class Sure:
    """Guesses the same token repeatedly, with probability 1."""

    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        return Guess((7,) * most, (1.0,) * most)


def drafting(**fields: object) -> Engine:
    given = {"max_guess": 4, "max_draft": 10_000, "make_guesser": lambda _: NoGuesser()} | fields
    return Engine(make_scheduler(**given))


def timed_draft(engine: Engine, seconds: float) -> None:
    """Report timings in which each forward pass of the draft model takes `seconds`."""
    for num_chosen in (1, 2, 4, 8):
        engine.scheduler.observe_draft(0, 2, num_chosen, seconds * num_chosen)


def decode(engine: Engine, num_right: int = 0, pass_s: float = 0.0) -> StepPlan:
    """Run a step in which the first `num_right` guesses of each chunk are right.

    A forward pass of the draft model takes `pass_s` seconds.
    """
    plan = engine.scheduler.plan(engine.now)
    assert plan is not None
    draft_s = pass_s * max(len(chunk.guess) for chunk in plan.chunks)
    drawn = tuple(
        ChunkResult((Drawn((9,) * (1 + min(num_right, len(chunk.guess)))),) if chunk.draws else ())
        for chunk in plan.chunks
    )
    engine.now += STEP_S + draft_s
    result = StepResult(drawn, STEP_S + draft_s, draft_seconds=draft_s)
    engine.scheduler.commit(plan, result, engine.now)
    engine.take()
    engine.scheduler.memory.check()
    return plan


def started(engine: Engine, length: int = 4, **fields: object) -> Engine:
    """Start a stream, and time a step without guesses."""
    engine.add(make_submit(1, length, max_tokens=500, **fields))
    engine.step()
    engine.step()
    return engine


def test_the_draft_model_reads_each_prompt_chunk() -> None:
    engine = drafting(max_step_tokens=8)
    engine.add(make_submit(1, 20))
    plans = [engine.step() for _ in range(3)]
    read = [(plan.chunks[0].draft_start, plan.chunks[0].draft_end) for plan in plans]
    assert read == [(0, 8), (8, 16), (16, 20)]
    without = Engine(make_scheduler(max_guess=4)).add(make_submit(1, 20)).step()
    assert without.chunks[0].draft_end == 0


def test_the_draft_model_reads_new_tokens_and_drafts() -> None:
    engine = started(drafting())
    (first,) = decode(engine, num_right=2).chunks
    assert first.guess == (DRAFTED,) * 4 and first.num_rows == 5
    assert (first.draft_start, first.draft_end, first.start) == (4, 6, 5)
    # Of the chosen tokens, the model has read all but the last. Two were right.
    (second,) = decode(engine, num_right=4).chunks
    assert (second.draft_start, second.draft_end) == (8, 9)
    # All were right, and the model has read all but one of them.
    (third,) = decode(engine).chunks
    size = len(second.guess)
    assert size > 1 and (third.draft_start, third.draft_end) == (8 + size, 10 + size)
    status = engine.scheduler.status()
    assert (status.num_drafted, status.num_drafted_right) == (4 + size + len(third.guess), 2 + size)


def test_drafting_stops_after_wrong_drafts_and_is_retried() -> None:
    engine = started(drafting())
    timed_draft(engine, 0.2 * STEP_S)
    used = [bool(decode(engine, pass_s=0.002).chunks[0].guess) for _ in range(300)]
    assert used[0] and 0 < sum(used[100:]) < 10


def test_the_draft_model_is_used_only_if_it_is_fast_enough() -> None:
    def num_chosen(share: float) -> int:
        engine = started(drafting(max_guess=8))
        timed_draft(engine, share * STEP_S)
        for _ in range(40):  # on average, half of the tokens are right
            plan = decode(engine, num_right=1, pass_s=share * STEP_S)
        return len(plan.chunks[0].guess)

    assert num_chosen(0.01) > num_chosen(0.15) > num_chosen(1.0) == 0


def test_a_draft_model_with_slow_first_timings_is_retried() -> None:
    engine = started(drafting())
    timed_draft(engine, STEP_S)
    engine.scheduler.observe_draft(0, MAX_UNREAD, 1, STEP_S)
    used = [
        bool(decode(engine, num_right=1, pass_s=0.1 * STEP_S).chunks[0].guess) for _ in range(300)
    ]
    assert not any(used[:50]) and all(used[-40:])


def test_a_more_certain_guess_from_the_text_replaces_the_draft_model() -> None:
    engine = started(drafting(make_guesser=lambda _: Sure()))
    (chunk,) = decode(engine).chunks
    assert chunk.guess == (7,) * 4 and chunk.draft_end == 0


def test_a_step_with_drafts_stays_within_the_stall_target() -> None:
    def guess(max_stall_s: float) -> tuple[int, ...]:
        engine = drafting(max_stall_s=max_stall_s)
        for size in (4, 16, 64) * 3:
            engine.scheduler.observe([(0, size)], STEP_S)
        engine.scheduler.observe([(64, 1)], STEP_S)
        timed_draft(engine, 0.1 * STEP_S)
        return decode(started(engine)).chunks[0].guess

    assert len(guess(0.5)) > 1
    assert guess(1.05 * STEP_S) == ()


def test_the_draft_model_reads_a_stream_without_drafts_in_chunks() -> None:
    engine = started(drafting())
    timed_draft(engine, 2 * STEP_S)  # drafts are too slow to be used
    plans = [decode(engine) for _ in range(3 * MAX_UNREAD)]
    read = [chunk for plan in plans for chunk in plan.chunks if chunk.draft_end]
    assert not any(chunk.guess for chunk in read)
    assert [(c.draft_start, c.draft_end) for c in read[:2]] == [
        (4, 4 + MAX_UNREAD),
        (4 + MAX_UNREAD, 4 + 2 * MAX_UNREAD),
    ]


def test_no_drafts_beyond_the_draft_models_context_or_if_the_request_forbids_them() -> None:
    short = started(drafting(max_draft=8))
    guesses = [len(decode(short).chunks[0].guess) for _ in range(6)]
    assert guesses[:3] == [3, 2, 1] and not any(guesses[3:])
    asked = Sampling(max_tokens=500, guess=False)
    assert not any(decode(started(drafting(), sampling=asked)).chunks[0].guess for _ in range(3))


def test_the_draft_model_reads_a_restarted_stream_again() -> None:
    engine = started(drafting(), length=20)
    decode(engine, num_right=2)
    engine.add(make_submit(2, 4))
    plan = engine.scheduler.plan(engine.now)
    engine.scheduler.fail(plan, "it broke", engine.now)
    (chunk,) = engine.scheduler.plan(engine.now).chunks
    assert chunk.draft_start == chunk.start and chunk.draft_end == chunk.start + chunk.length


def test_a_new_stream_starts_with_the_average_acceptance() -> None:
    usual = DraftChance()
    first = DraftChance(usual)
    first.learn(200, 200)
    assert DraftChance(usual).value > 0.9
    DraftChance(usual).learn(1, 0)
    for _ in range(40):
        first.learn(1, 0)
    assert DraftChance(usual).value < 0.3
    for _ in range(100):  # new streams hope for better
        latest = DraftChance(usual)
    assert latest.value > 0.5
