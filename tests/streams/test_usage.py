from headrace.streams.events import Accepted, AnyEvent, Progress, Timings, Tokens, Usage
from headrace.streams.usage import UsageCounter
from headrace_common.ids import StreamId


def accepted(prompt_tokens: int) -> Accepted:
    return Accepted(
        seq=0,
        at_ms=0,
        id=StreamId("chatcmpl-1"),
        route="/v1/chat/completions",
        model="m",
        created=1,
        mode="fresh",
        prompt_tokens=prompt_tokens,
        n=1,
        seed=1,
    )


def progress(at_ms: int, processed: int, choice: int = 0, cache: int = 0) -> Progress:
    return Progress(
        seq=1, at_ms=at_ms, choice=choice, total=8, cache=cache, processed=processed, time_ms=0
    )


def tokens(at_ms: int, *ids: int, choice: int = 0) -> Tokens:
    return Tokens(seq=2, at_ms=at_ms, choice=choice, ids=ids)


def tally_of(*events: AnyEvent) -> UsageCounter:
    tally = UsageCounter()
    for event in events:
        tally.feed(event)
    return tally


def test_an_accepted_request_has_no_generated_tokens_and_zero_timings() -> None:
    assert tally_of(accepted(7)).usage == Usage(7, 0, 0)
    assert tally_of(accepted(7)).timings == Timings()


def test_the_prompt_counts_once_and_each_choice_counts_its_tokens() -> None:
    tally = tally_of(accepted(5), tokens(3, 1, 2), tokens(4, 9, choice=1))
    assert tally.usage == Usage(prompt_tokens=5, completion_tokens=3)


def test_cached_tokens_are_taken_from_the_first_progress_of_each_prompt() -> None:
    again = progress(9, 5, cache=4)
    tally = tally_of(accepted(16), progress(1, 2, 0, 2), progress(2, 3, 1, 3), again)
    assert tally.usage.cached_tokens == 5
    assert tally.timings.prompt_n == 11


def test_times_run_from_plan_to_prompt_end_and_from_first_to_last_token() -> None:
    tally = tally_of(
        accepted(8), progress(100, 0), progress(350, 8), tokens(400, 1), tokens(460, 2)
    )
    timings = tally.timings
    assert (timings.queue_ms, timings.prompt_ms, timings.predicted_ms) == (100, 250, 60)


def test_the_longest_gap_is_measured_within_one_choice() -> None:
    tally = tally_of(accepted(8), tokens(10, 1), tokens(90, 1, choice=1), tokens(50, 2))
    assert tally.timings.max_gap_ms == 40


def test_an_event_without_token_ids_counts_no_token() -> None:
    tally = tally_of(accepted(8), tokens(10, 1), tokens(500))
    assert tally.timings.predicted_n == 1
    assert tally.timings.max_gap_ms == 0


def test_guessed_tokens_are_counted() -> None:
    tally = UsageCounter()
    for seq, (guessed, accepted) in enumerate([(0, 0), (4, 2), (3, 0)]):
        tally.feed(
            Tokens(
                seq=seq,
                at_ms=seq,
                choice=0,
                ids=(7,) * (1 + accepted),
                num_guessed=guessed,
                num_accepted=accepted,
            )
        )
    timings = tally.timings
    assert (timings.predicted_n, timings.draft_n, timings.draft_n_accepted) == (5, 7, 2)
