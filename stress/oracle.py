"""Judges one request by what its client received, what the proxy saw, and what the log contains."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from stress.compare import Violation, compare_choices
from stress.frames import Said, own_dropped, said_in_body, said_in_chunks, said_in_events
from stress.http import Exchange
from stress.story import Story
from stress.truth import NoTruth, Truth, read_truth
from stress.witness import Proxy
from tools.harness.sse import frames_of

# A client causes these errors itself by sending a request twice.
_OWN_DOING = ("replaced",)


async def verdict(
    story: Story, calm: Proxy, is_explained: Callable[[Exchange], bool]
) -> list[Violation]:
    """Return the faults of a request that has ended, compared with what the server reports later.

    A failed exchange is also a fault if neither the proxy nor a known outage explains it.
    """
    found = [
        Violation("wrong failure", 1, f"unexplained: {made.line()}")
        for made in story.exchanges
        if not (made.passage and made.passage.was_cut) and not is_explained(made)
    ]
    if story.way.is_plain:
        return found + judge_plain(story)
    conversation = None if story.way.names == "key" else story.label
    try:
        ids = sorted(story.stream_ids)
        truths = [await read_truth(calm, stream_id, conversation) for stream_id in ids]
    except NoTruth as error:
        return [*found, Violation("lost", story.question.num_tokens, str(error))]
    return found + judge(story, truths)


def judge(story: Story, truths: Sequence[Truth]) -> list[Violation]:
    """Return the faults of a request with durable streams; `truths` are all of its streams."""
    found = list(_ends(story))
    for truth in truths:
        found += _log_is_sound(truth)
        if truth.stream_id == story.stream_id:
            found += _is_undisturbed(story, truth)
            found += _client_has_all(story, truth)
        # A stream without an error ended before the client could replace the stream.
        elif not truth.code:
            found += _is_undisturbed(story, truth)
        elif truth.code not in _OWN_DOING:
            found.append(
                Violation(
                    "wrong failure", 1, f"{truth.stream_id} ended with the error {truth.code}"
                )
            )
        for made in story.exchanges:
            if made.said.stream_id == truth.stream_id:
                found += _said_what_is_logged(story, made, truth)
    return found


def judge_plain(story: Story) -> list[Violation]:
    """Return the faults of a request without durability.

    The client must have received the undisturbed answer, or a prefix of it.
    """
    found = list(_ends(story))
    if story.way.face == "whole":
        if story.outcome == "finished":
            said = said_in_body(msgspec.json.decode(story.body))
            found += same(said, story.question.said, "answer")
        return found
    said = said_in_chunks(story.frames)
    truth = story.question.said
    if story.outcome == "cut":
        truth = _beginning(truth, said)
    return found + list(same(said, truth, "plain stream"))


def _ends(story: Story) -> Iterator[Violation]:
    if story.outcome == "never ended":
        yield Violation("silent", 1, "the request never ended")
    elif story.outcome not in ("finished", "cut"):
        yield Violation("wrong failure", 1, story.outcome)


def _log_is_sound(truth: Truth) -> Iterator[Violation]:
    events = truth.events
    if [event["seq"] for event in events] != list(range(len(events))):
        yield Violation("changed", 1, f"{truth.stream_id}: the numbers of its events have gaps")
    ends = [event["seq"] for event in events if event["kind"] in ("finish", "error")]
    if ends != [len(events) - 1]:
        yield Violation("changed", 1, f"{truth.stream_id}: terminal events {ends}")
    times = [event["at_ms"] for event in events]
    if times != sorted(times):
        yield Violation("reordered", 1, f"{truth.stream_id}: times in its log decrease")
    by_choice: dict[int, int] = {}
    for event in events:
        if event["kind"] == "progress":
            if event["processed"] <= by_choice.get(event["choice"], -1):
                yield Violation("repeated", 1, f"{truth.stream_id}: progress {event}")
            by_choice[event["choice"]] = event["processed"]
    state = truth.state["state"]
    if (state == "finished") != (events[-1]["kind"] == "finish"):
        yield Violation("changed", 1, f"{truth.stream_id}: {state} after {events[-1]}")


def _is_undisturbed(story: Story, truth: Truth) -> Iterator[Violation]:
    """Checks that log, response and wire frames all equal the answer of an undisturbed server."""
    if truth.code:
        yield Violation("wrong failure", 1, f"{truth.stream_id}: {truth.events[-1]}")
        return
    logged = said_in_events(truth.events)
    yield from same(logged, story.question.said, "log compared with the undisturbed answer")
    response: dict[str, Any] = truth.state.get("response") or {"choices": []}
    yield from same(said_in_body(response), logged, "response compared with the log")
    yield from same(said_in_chunks(truth.wire), logged, "wire frames compared with the log")
    counted = response.get("usage", {}).get("completion_tokens")
    if counted != story.question.num_tokens:
        yield Violation("changed", 1, f"usage counts {counted}, not {story.question.num_tokens}")
    if truth.body is not None and own_dropped(frames_of(truth.body)) != truth.wire:
        yield Violation("changed", 1, "the bytes and the events differ")


def _client_has_all(story: Story, truth: Truth) -> Iterator[Violation]:
    if story.outcome != "finished":
        return
    if story.way.face == "whole":
        body = msgspec.json.decode(story.body)
        if body != truth.state.get("response"):
            yield from same(said_in_body(body), said_in_events(truth.events), "answer")
            yield Violation(
                "changed", 1, "the answer differs from the stored response of its stream"
            )
        return
    frames = story.frames_by_byte() if story.way.face == "byte" else story.frames
    if truth.body is not None and story.way.face == "byte" and story.body != truth.body:
        yield Violation("changed", 1, f"bytes differ from byte {_first(story.body, truth.body)}")
    if own_dropped(frames) != truth.wire:
        yield from same(said_in_chunks(frames), said_in_events(truth.events), "client")
        yield Violation("changed", 1, f"frames differ from {_first(frames, truth.wire)}")
    if story.way.has_second_reader:
        seen = [frame.json for frame in story.second]
        if seen != truth.events:
            yield from same(said_in_events(seen), said_in_events(truth.events), "second reader")
            yield Violation("changed", 1, f"events differ from {_first(seen, truth.events)}")


def _said_what_is_logged(story: Story, made: Exchange, truth: Truth) -> Iterator[Violation]:
    """Checks that bytes which left the server are in the log, even if they never arrived."""
    said = made.said
    if said.status != 200 or (story.way.face == "whole" and made.call.method == "POST"):
        return
    if made.call.path.startswith("/v1/stream?") or (story.way.face == "byte" and _is_post(made)):
        if truth.body is not None:
            start = int(made.call.start or 0)
            if bytes(said.body) != truth.body[start : start + len(said.body)]:
                yield Violation("changed", 1, f"sent but not logged: {made.line()}")
        return
    frames = own_dropped(frames_of(bytes(said.body)))
    if made.call.path.endswith("/events"):
        after = _seq(made.call.start)
        logged = truth.events[after + 1 : after + 1 + len(frames)]
        if [frame.json for frame in frames] != logged:
            yield Violation("changed", 1, f"sent but not logged: {made.line()}")
        return
    first = [f.id for f in truth.wire].index(str(made.call.start)) + 1 if made.call.start else 0
    if frames != truth.wire[first : first + len(frames)]:
        yield Violation("changed", 1, f"sent but not logged: {made.line()}")


def same(said: Said, truth: Said, where: str) -> Iterator[Violation]:
    """Return the differences between an answer and the undisturbed answer."""
    found = compare_choices(said.tokens, truth.tokens, where)
    yield from found
    if not found and dict(said.texts) != {
        k: v for k, v in truth.texts.items() if v or k in said.texts
    }:
        yield Violation("changed", 1, f"{where}: the tokens are the same, the text is not")
    if not found and said.ends != truth.ends:
        yield Violation("changed", 1, f"{where}: ends {said.ends} for {truth.ends}")


def _beginning(truth: Said, said: Said) -> Said:
    """Return the undisturbed answer, cut to the length of the received answer."""
    return Said(
        {k: ids[: len(said.tokens.get(k, ()))] for k, ids in truth.tokens.items()},
        {k: text[: len(said.texts.get(k, ""))] for k, text in truth.texts.items()},
        {k: end for k, end in truth.ends.items() if k in said.ends},
    )


def _is_post(made: Exchange) -> bool:
    return made.call.method == "POST"


def _seq(cursor: int | str | None) -> int:
    return int(str(cursor).rpartition(":")[2].partition(".")[0]) if cursor else -1


def _first(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the first index at which the two sequences differ."""
    pairs = zip(one, other, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    return same
