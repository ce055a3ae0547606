"""Tests the report on how a prompt was processed in each lane."""

import asyncio
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from headrace.generation.prompt_report import describe, plan_of
from headrace.generation.wait_news import NO_CHUNKS
from headrace.protocols.prompt_ids import PromptIds
from headrace.streams.events import AnyEvent, Finish, Progress, Usage
from headrace_common.ingestion import Ingestion
from headrace_common.messages import LaneFacts
from headrace_common.plan import SourceSpec
from headrace_common.request import Ids, Prompt, Request, ResponseOptions, Text
from headrace_common.sampling import Sampling
from tests.equality.test_together import asking
from tests.fleet.fakes import READY
from tests.gateway.builders import make_record, make_request
from tests.kernels.own_kernels import HAS_OWN
from tools.harness.tiny_models import make_tiny_model

SHORT = Sampling(temperature=0, max_tokens=3, ignore_eos=True)
SOURCE = SourceSpec((0,), 4)
ON_SLOTS = {"layer_types": ["conv", "full_attention", "conv"]}


def events_of(
    folder: Path, *prompts: tuple[Prompt, ...], options: ResponseOptions, cap: int = 32
) -> list[list[AnyEvent]]:
    """Return the events of consecutive requests, with steps of at most `cap` tokens."""

    async def run() -> list[list[AnyEvent]]:
        found = []
        no_target: Any = {"max_stall_ms": "off", "max_step_ms": "off"}
        async with asking(folder, max_step_tokens=cap, **no_target) as (generation, _):
            for each in prompts:
                request = Request("/v1/completions", "tiny", each, SHORT, response_options=options)
                stream = await generation.open(request)
                async with stream.audience.reader() as events:
                    found.append([event async for event in events])
        return found

    return asyncio.run(run())


def ingestions(folder: Path, *prompts: tuple[Prompt, ...], cap: int = 32) -> list[Ingestion]:
    options = ResponseOptions(return_ingestion=True)
    ends = [events[-1] for events in events_of(folder, *prompts, options=options, cap=cap)]
    assert all(isinstance(end, Finish) and end.ingestion is not UNSET for end in ends)
    return [end.ingestion for end in ends]  # type: ignore[union-attr, misc]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("native") / "tiny")


@pytest.mark.parametrize(
    ("changes", "boundary", "numbers", "why"),
    [
        ({}, "step", (3, 32), "70 tokens need at least 3 chunks of at most 32 tokens."),
        ({"is_whole": True}, "step", (1, None), "This model processes each prompt in one step."),
        (
            {"source": SOURCE, "facts": LaneFacts(encoder="pieces", why="it has slots")},
            "encoder-piece",
            (1, None),
            "The source is encoded in 1 to 6 pieces. Memory: it has slots.",
        ),
        (
            {"source": SOURCE, "facts": LaneFacts(encoder="whole")},
            "whole",
            (1, None),
            "This model processes each prompt in one step.",
        ),
    ],
)
def test_a_plan_depends_on_how_the_lane_computes_prompts(
    changes: dict[str, Any], boundary: str, numbers: tuple[int, int | None], why: str
) -> None:
    ready = msgspec.structs.replace(READY, max_step_tokens=32, **changes)
    plan = plan_of(ready, PromptIds(array("i", range(70)), "given"))
    assert (plan.boundary, plan.why) == (boundary, why)
    assert (plan.min_chunks, plan.max_chunk_tokens) == numbers


@pytest.mark.parametrize(
    ("architecture", "config", "lane", "mask", "memory"),
    [
        ("Qwen3ForCausalLM", {}, "native-text", "none", "blocks"),
        ("MixtralForCausalLM", {"num_local_experts": 4}, "generic-text", "none", "blocks"),
        ("Lfm2ForCausalLM", ON_SLOTS, "generic-text", "lazy-prefix", "slot"),
    ],
)
def test_each_lane_reports_how_it_processed_a_prompt(
    tmp_path: Path, architecture: str, config: dict[str, object], lane: str, mask: str, memory: str
) -> None:
    folder = make_tiny_model(tmp_path / "tiny", architecture, **config)
    cut, whole = ingestions(folder, (Text("x" * 100),), (Ids(tuple(range(9))),))
    assert cut == Ingestion(
        strategy=lane,
        eligible=True,
        applied=True,
        reason="Prompt processed in 4 chunks.",
        boundary="step",
        mask=mask if HAS_OWN else "lazy-prefix",
        memory=memory,
        encoder=None,
        tokenization="one-shot",
        prompt_tokens=100,
        cached_tokens=0,
        chunks=4,
        chunk_tokens=(4, 32),
    )
    assert (whole.applied, whole.reason) == (False, "Prompt fits in one chunk.")
    assert (whole.chunks, whole.chunk_tokens, whole.tokenization) == (1, (9, 9), "given")


def test_cached_tokens_are_not_counted_in_chunks(native: Path) -> None:
    prompt = (Text("y" * 100),)
    _, again = ingestions(native, prompt, prompt)
    assert again.cached_tokens and again.chunk_tokens is not None
    assert (again.chunks, sum(again.chunk_tokens) // 2) == (1, 100 - again.cached_tokens)


def test_several_prompts_share_one_report(native: Path) -> None:
    (told,) = ingestions(native, (Ids(tuple(range(1, 41))), Text("short")), cap=32)
    assert (told.prompt_tokens, told.applied, told.tokenization) == (45, True, "one-shot")
    assert told.chunks >= 3 and told.reason == f"Prompt processed in {told.chunks} chunks."


def test_a_long_text_is_reported_as_streamed(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.text import encoder
    from headrace.text.windowed_encoding import Sizes

    init = encoder.Encoder.__init__
    monkeypatch.setattr(
        encoder.Encoder, "__init__", lambda self, it: init(self, it, Sizes(window=64, overlap=32))
    )
    text = " ".join(f"word{number}" for number in range(40))
    (told,) = ingestions(native, (Text(text),), cap=512)
    assert told.tokenization == "streamed"


def test_nothing_is_recorded_unless_requested(native: Path) -> None:
    (events,) = events_of(native, (Text("x" * 100),), options=ResponseOptions())
    assert b"chunks" not in msgspec.json.encode(events)
    assert b"ingestion" not in msgspec.json.encode(events)
    assert any(isinstance(event, Progress) for event in events)


def test_boundary_and_mask_are_empty_without_a_lane() -> None:
    told = describe(make_record(make_request()), None, Usage(5, 0), [NO_CHUNKS])
    assert (told.strategy, told.eligible, told.applied) == (None, False, False)
    assert (told.boundary, told.mask, told.memory) == ("", "", None)
    assert told.reason == "No ingestion lane matched."
    assert (told.chunks, told.chunk_tokens) == (0, None)
