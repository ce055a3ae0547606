"""Tests the library's tokenizer, plan, progress, descriptions and event loop."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM, AsyncLLM, Client, ModelError, RequestFailed, SamplingOptions
from tests.test_llm import CHAT, ENDLESS, WHOLE, num_running
from tools.harness.eventually import eventually

GREEDY = SamplingOptions(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, max_num_seqs=8, max_step_tokens=64, **WHOLE) as loaded:
        yield loaded


def test_the_tokenizer_converts_and_counts(llm: LLM) -> None:
    ids = llm.tokenizer.encode("good morning")
    assert llm.tokenizer.decode(ids, skip_special_tokens=True) == "good morning"
    assert llm.tokenizer.count("good morning") == len(ids)
    assert llm.tokenizer.count(CHAT) == llm.chat(CHAT, options=GREEDY).usage["prompt_tokens"]
    for wrong in (10**9, -1, "a"):
        with pytest.raises(RequestFailed) as refused:
            llm.tokenizer.decode([wrong])  # type: ignore[list-item]
        assert refused.value.param == "token_ids[0]"


def test_a_plan_equals_the_ingestion_record_of_the_request(llm: LLM) -> None:
    long = [{"role": "user", "content": "word " * 40}]
    plan = llm.plan(long)
    record = llm.chat(long, options=GREEDY, return_ingestion=True, cache_prompt=False).ingestion
    assert record is not None and llm.chat(CHAT, options=GREEDY).ingestion is None
    assert (plan.lane, plan.memory, plan.mask) == (record.strategy, record.memory, record.mask)
    assert (plan.prompt_tokens, plan.min_chunks) == (record.prompt_tokens, record.chunks)
    assert plan.min_chunks > 1 and plan.max_chunk_tokens == 64 and plan.fits
    assert not llm.plan(prompt="x" * 2000).fits
    with pytest.raises(RequestFailed, match="2 prompts; give one"):
        llm.plan(prompt=["a", "b"])


def test_progress_counts_the_inputs_of_a_list(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.chat(["a", "b"], options=GREEDY, progress=True)
    llm.generate(["a", "b", "c"], options=GREEDY, progress=True)
    llm.embed(["a", "b", "c", "d"], progress=True)
    llm.chat("a", options=GREEDY, progress=True)
    lines = [line.partition(" in ")[0] for line in capfd.readouterr().err.splitlines()]
    assert lines == ["answers: 2 of 2", "answers: 3 of 3", "vectors: 4 of 4"]


def test_descriptions_take_one_line(llm: LLM) -> None:
    answer = llm.chat(CHAT, options=GREEDY, n=2, seed=1)
    assert repr(answer).startswith(f"Answer({answer.text[:10]!r}"[:-1]) and "2 choices" in repr(
        answer
    )
    assert "tokens)" in repr(answer.choices[0])
    assert answer._repr_markdown_().split("\n\n---\n\n") == [it.text for it in answer.choices]
    assert "native-text on cpu" in repr(llm)
    assert repr(Client("host:1")) == "<Client http://host:1>"
    assert all("\n" not in repr(it) for it in (answer, answer.choices[0], llm))


async def test_the_event_loop_gets_the_same_answers(llm: LLM, folder: Path) -> None:
    async with AsyncLLM(folder, max_num_seqs=8, **WHOLE) as other:
        both = await asyncio.gather(other.chat("hi", options=GREEDY), other.chat(["a", "b"]))
        assert both[0].text == llm.chat("hi", options=GREEDY).text and len(both[1]) == 2
        assert (await other.generate("hi", options=GREEDY)).text == llm.generate(
            "hi", options=GREEDY
        ).text
        pieces = [piece async for piece in other.stream("hi", options=GREEDY)]
        assert "".join(piece.text for piece in pieces) == both[0].text
        assert np.allclose(await other.embed("hi"), llm.embed("hi"), atol=1e-5)
        with pytest.raises(RequestFailed, match="did you mean max_tokens"):
            await other.chat("hi", max_token=3)
        assert "AsyncLLM" in repr(other) and other.plan("hi").lane == llm.plan("hi").lane


async def test_cancelling_a_call_or_leaving_a_loop_cancels_the_request(folder: Path) -> None:
    async with AsyncLLM(folder, **WHOLE) as llm:
        asked = asyncio.create_task(llm.chat("hi", **ENDLESS))
        while not num_running(llm):
            await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.to_thread(eventually, lambda: num_running(llm) == 0)
        pieces = llm.stream("hi", **ENDLESS)
        await anext(pieces)
        await pieces.aclose()
        await asyncio.to_thread(eventually, lambda: num_running(llm) == 0)


async def test_closing_ends_calls_on_the_event_loop(folder: Path) -> None:
    llm = AsyncLLM(folder, **WHOLE)
    with pytest.raises(RequestFailed, match="still loading"):
        llm.plan("hi")
    asked = asyncio.create_task(llm.chat("hi", **ENDLESS))
    while not llm._host.has_started.done() or not num_running(llm):
        await asyncio.sleep(0.01)
    await llm.close()
    for call in (asked, llm.chat("hi")):
        with pytest.raises(RequestFailed, match=r"clos|shut"):
            await call


async def test_a_failed_load_is_raised_by_the_first_wait() -> None:
    llm = AsyncLLM("./nowhere")
    with pytest.raises(ModelError, match="No model folder"):
        await llm.chat("hi")
    await llm.close()
    assert repr(llm) == "<AsyncLLM: the load failed>"


async def test_a_cancelled_wait_for_the_load_frees_the_model(folder: Path) -> None:
    llm = AsyncLLM(folder, **WHOLE)
    entering = asyncio.create_task(llm.__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    await asyncio.to_thread(eventually, lambda: not llm._host._thread.is_alive())


def test_a_forked_process_is_refused_and_told_to_load_its_own_model(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        for call in (lambda: llm.chat("hi"), lambda: list(llm.stream("hi"))):
            with pytest.raises(RequestFailed, match="load the model in this process"):
                call()
        llm.close()
    assert llm.chat("hi", options=GREEDY).text
