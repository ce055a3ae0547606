"""Tests the events that are built from engine messages, and their cost."""

from array import array
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from headrace.fleet.served_model import ServedModel
from headrace.generation.choice import ChoiceWriter
from headrace.generation.event_builder import EventBuilder
from headrace.generation.wait_news import HeartbeatNews, Heartbeats, PromptProgress
from headrace.streams.events import Served, Tokens
from headrace.streams.record import Record
from headrace_common.config.settings import ModelConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import (
    Finished,
    FinishReason,
    NewToken,
    PromptAdvance,
    PromptLogprobs,
    Started,
)
from headrace_common.pieces import ChannelPiece
from headrace_common.request import Request, Text
from headrace_common.sampling import Logprobs, Sampling
from tests.fleet.fakes import READY

ID = SequenceId(0)
ECHOED = list(b"hello")


def make_builder(
    folder: Path, num_prompts: int = 1, n: int = 1, fingerprint: str = "fp_0", **more: Any
) -> EventBuilder:
    prompts = (Text("hello"),) * num_prompts
    request = Request("/v1/completions", "tiny", prompts, Sampling(temperature=0), n)
    packed = (array("i", list(b"hello")).tobytes(),) * num_prompts
    record = Record(StreamId("cmpl-1"), 0, request, packed, fingerprint, **more)
    builder = EventBuilder(record, ServedModel(ModelConfig(model=str(folder))))
    builder.accepted()
    return builder


def test_an_engine_message_costs_its_own_size_and_not_the_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = make_builder(folder, num_prompts=64, n=16)
    looked_at: list[object] = []
    for kind in (ChoiceWriter, PromptProgress):
        take = kind.take  # type: ignore[attr-defined]

        def counted(self: object, *place: int, take: object = take) -> object:
            looked_at.append(self)
            return take(self, *place)  # type: ignore[operator]

        monkeypatch.setattr(kind, "take", counted)
    builder.take(32, Started(ID, 5, 0), 0)
    builder.take(7, NewToken(ID, 104), 0)
    assert [event.seq for event in builder.new_events(0, is_cut=False)] == [1, 2]
    assert not builder.new_events(0, is_cut=False)
    assert len(looked_at) == 3  # two choices that were heard of, one prompt


def test_choices_are_counted_as_they_start_and_end(folder: Path) -> None:
    builder = make_builder(folder, num_prompts=2, n=2)
    assert (builder.num_waiting, builder.num_live, builder.has_tokens) == (4, 4, False)
    builder.take(0, Started(ID, 5, 0), 0)
    builder.take(1, NewToken(ID, 104), 0)
    builder.take(2, Finished(ID, FinishReason.LENGTH), 0)
    builder.take(2, Finished(ID, FinishReason.LENGTH), 0)
    assert (builder.num_waiting, builder.num_live, builder.has_tokens) == (1, 3, True)


def test_a_replayed_log_leaves_the_same_counts(folder: Path) -> None:
    first, second = make_builder(folder, n=3), make_builder(folder, n=3)
    first.take(0, Started(ID, 5, 0), 0)
    first.take(0, PromptAdvance(ID, 5), 0)
    first.take(1, NewToken(ID, 104), 0)
    first.take(1, Finished(ID, FinishReason.LENGTH), 0)
    events = first.new_events(0, is_cut=False)
    assert any(isinstance(event, Tokens) for event in events)
    assert second.replay(events) is None
    for builder in (first, second):
        assert (builder.num_waiting, builder.num_live, builder.has_tokens) == (1, 2, True)


def test_an_error_after_a_replay_mismatch_continues_the_event_numbers(folder: Path) -> None:
    first, second = make_builder(folder), make_builder(folder)
    first.take(0, NewToken(ID, 104), 0)
    (tokens,) = first.new_events(0, is_cut=False)
    changed = structs.replace(tokens, pieces=(ChannelPiece("another"),))
    mismatch = second.replay([changed])
    assert mismatch is not None and mismatch.code == "resume_mismatch"
    assert second.terminal(0, mismatch).seq == tokens.seq + 1


def rows(start: int, end: int) -> PromptLogprobs:
    """Return log probabilities of the prompt tokens [start, end) of `make_echo`."""
    ids, values = array("i", ECHOED[start:end]), array("f", [-1.0] * (end - start))
    return PromptLogprobs(ID, start, Logprobs(1, ids.tobytes(), values.tobytes()))


def make_echo(folder: Path) -> EventBuilder:
    sampling = Sampling(temperature=0, num_prompt_logprobs=0)
    request = Request("/v1/completions", "tiny", (Text("hello"),), sampling, echo=True)
    packed = (array("i", ECHOED).tobytes(),)
    record = Record(StreamId("cmpl-1"), 0, request, packed, "fp_0")
    return EventBuilder(record, ServedModel(ModelConfig(model=str(folder))))


def test_an_echo_after_a_crash_contains_each_prompt_token_once(folder: Path) -> None:
    # The second engine splits the prompt into other chunks than the engine that died.
    builder = make_echo(folder)
    for start, end in ((1, 3), (3, 5), (1, 4), (4, 5)):
        builder.take(0, rows(start, end), 0)
    builder.take(0, NewToken(ID, 104), 0)
    (tokens,) = builder.new_events(0, is_cut=False)
    assert isinstance(tokens, Tokens)
    assert [entry.token_id for entry in tokens.logprobs] == ECHOED


def loaded(folder: Path) -> ServedModel:
    model = ServedModel(ModelConfig(model=str(folder)))
    model.came_up(READY)
    return model


def test_a_stream_admitted_before_its_model_loads_gets_one_served_event(
    folder: Path,
) -> None:
    first, second = make_builder(folder, fingerprint=""), make_builder(folder, fingerprint="")
    assert first.serving.known is None
    first.serving.begin(loaded(folder))
    events = first.new_events(0, is_cut=False)
    assert [type(event) for event in events] == [Served] and not first.new_events(0, is_cut=False)
    assert second.replay(events) is None
    assert first.serving.known == second.serving.known is not None


def test_a_stream_admitted_after_its_model_loads_gets_no_served_event(folder: Path) -> None:
    model = loaded(folder)
    builder = make_builder(folder, fingerprint=model.system_fingerprint, served=model.setup)
    builder.serving.begin(model)
    assert not builder.new_events(0, is_cut=False)


def test_heartbeats_requested_within_half_an_interval_are_merged() -> None:
    beats = Heartbeats()
    assert beats.wants("data", 10, 0)
    assert not beats.wants("data", 10, 60_000)  # it is still on its way
    assert beats.wants("comment", 10, 0)
    beats.add(HeartbeatNews("queued", "data"), 70_000)
    assert not beats.wants("data", 10, 74_999)
    assert beats.wants("data", 10, 75_000)
