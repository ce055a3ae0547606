"""What a stream writes next, and how little of a large request it looks at for that."""

from array import array
from pathlib import Path

import pytest

from headrace.core.config import ModelConfig
from headrace.core.ids import SequenceId, StreamId
from headrace.core.messages import Finish, Finished, NewToken, Progress, Started
from headrace.core.request import Request, Text
from headrace.core.sampling import Sampling
from headrace.generation.choice import Choice
from headrace.generation.event_builder import EventBuilder
from headrace.generation.progress import PromptProgress
from headrace.generation.served import ServedModel
from headrace.streams.events import Tokens
from headrace.streams.record import Record

ID = SequenceId(0)


def make_draft(folder: Path, num_prompts: int = 1, n: int = 1) -> EventBuilder:
    prompts = (Text("hello"),) * num_prompts
    request = Request("/v1/completions", "tiny", prompts, Sampling(temperature=0), n)
    packed = (array("i", list(b"hello")).tobytes(),) * num_prompts
    record = Record(StreamId("cmpl-1"), 0, request, packed, "fp_0")
    draft = EventBuilder(record, ServedModel(ModelConfig(model=str(folder))))
    draft.accepted()
    return draft


def test_a_message_costs_what_it_says_and_not_what_was_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = make_draft(folder, num_prompts=64, n=16)
    looked_at: list[object] = []
    for kind in (Choice, PromptProgress):
        take = kind.take  # type: ignore[attr-defined]

        def counted(self: object, *place: int, take: object = take) -> object:
            looked_at.append(self)
            return take(self, *place)  # type: ignore[operator]

        monkeypatch.setattr(kind, "take", counted)
    draft.take(32, Started(ID, 5, 0), 0)
    draft.take(7, NewToken(ID, 104), 0)
    assert [event.seq for event in draft.new_events(0, is_cut=False)] == [1, 2]
    assert not draft.new_events(0, is_cut=False)
    assert len(looked_at) == 3  # two choices that were heard of, one prompt


def test_choices_are_counted_as_they_begin_and_end(folder: Path) -> None:
    draft = make_draft(folder, num_prompts=2, n=2)
    assert (draft.num_waiting, draft.num_live, draft.has_tokens) == (4, 4, False)
    draft.take(0, Started(ID, 5, 0), 0)
    draft.take(1, NewToken(ID, 104), 0)
    draft.take(2, Finished(ID, Finish.LENGTH), 0)
    draft.take(2, Finished(ID, Finish.LENGTH), 0)
    assert (draft.num_waiting, draft.num_live, draft.has_tokens) == (1, 3, True)


def test_a_replayed_log_leaves_the_same_counts(folder: Path) -> None:
    first, second = make_draft(folder, n=3), make_draft(folder, n=3)
    first.take(0, Started(ID, 5, 0), 0)
    first.take(0, Progress(ID, 5), 0)
    first.take(1, NewToken(ID, 104), 0)
    first.take(1, Finished(ID, Finish.LENGTH), 0)
    events = first.new_events(0, is_cut=False)
    assert any(isinstance(event, Tokens) for event in events)
    assert second.replay(events) is None
    for draft in (first, second):
        assert (draft.num_waiting, draft.num_live, draft.has_tokens) == (1, 2, True)
