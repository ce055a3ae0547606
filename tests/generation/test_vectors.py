"""Tests batches of inputs over a fake engine: windows, crashes and ends."""

import asyncio
from array import array
from pathlib import Path

import msgspec
import pytest

from headrace.engines.client import EngineUp
from headrace.fleet.served_model import ServedModel
from headrace.generation.generation import Generation
from headrace.generation.vectors import Vectors
from headrace_common.errors import RequestError
from headrace_common.ids import SequenceId
from headrace_common.messages import Finished, FinishReason, Outputs
from headrace_common.request import Ids
from headrace_common.vector_request import VectorRequest
from headrace_common.worker_jobs import Encoded
from tests.fleet.fakes import DOWN, READY, FakeEngine
from tests.generation.fakes import models_of, running
from tools.harness.eventually import settle

EMBEDS = msgspec.structs.replace(READY, tasks=("generate", "embed"), vector_size=1)
WINDOW = 2 * READY.max_num_seqs


def wanted(num_inputs: int, task: str = "embed") -> VectorRequest:
    prompts = [Ids((5,) * (number + 1)) for number in range(num_inputs)]
    packed = msgspec.msgpack.encode(prompts)
    return VectorRequest("/v1/embeddings", task, packed, "input")


async def asked(
    generation: Generation, engine: FakeEngine, num_inputs: int, owner: str = ""
) -> "asyncio.Task[Vectors]":
    """Start a batch and wait until the engine has its first window."""
    await engine.say(EngineUp(EMBEDS))
    request = msgspec.structs.replace(wanted(num_inputs), owner=owner)
    task = asyncio.create_task(generation.vectors.make(request))
    for _ in range(1000):  # a thread reads the inputs
        await asyncio.sleep(0.01)
        if engine.submits or task.done():
            break
    return task


def given(engine: FakeEngine) -> dict[SequenceId, int]:
    """Return all sequences sent to the engine, with the lengths of their inputs."""
    return {
        new.sequence_id: len(submit.prompts[new.prompt]) // 4
        for submit in engine.submits
        for new in submit.sequences
    }


async def answer(engine: FakeEngine, *sequence_ids: SequenceId) -> None:
    """Answer each sequence with the length of its input as its vector."""
    lengths = given(engine)
    ends = [
        Finished(id, FinishReason.LENGTH, vector=array("f", [lengths[id]]).tobytes())
        for id in sequence_ids
    ]
    await engine.say(Outputs(finished=tuple(ends)))


async def test_a_batch_of_inputs_is_sent_in_windows_and_keeps_its_order(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace.requests")
    async with running(folder) as (generation, engine):
        task = await asked(generation, engine, 11)
        done: set[SequenceId] = set()
        while not task.done():
            open_ids = [id for id in given(engine) if id not in done]
            assert 0 < len(open_ids) <= WINDOW
            await answer(engine, open_ids[-1])  # the last first
            done.add(open_ids[-1])
        made = await task
        assert [array("f", vector)[0] for vector in made.vectors] == list(range(1, 12))
        assert made.num_tokens == sum(range(1, 12))
        (line,) = [it for it in caplog.records if it.name == "headrace.requests"]
        logged = vars(line)["fields"]
        assert (logged["outcome"], logged["prompt_tokens"]) == ("finished", made.num_tokens)
        assert not engine.cancels and not generation.vectors.batches


async def test_the_engine_gets_the_owner_of_a_vector_request(folder: Path) -> None:
    # Keys take turns in the engine. Without its key, a batch would share the turns of others.
    async with running(folder) as (generation, engine):
        task = await asked(generation, engine, 1, owner="a key")
        assert [submit.client for submit in engine.submits] == ["a key"]
        await answer(engine, *given(engine))
        await task


async def test_only_the_missing_inputs_are_sent_again_after_an_engine_dies(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        task = await asked(generation, engine, 6)
        first, second, *_ = given(engine)
        await answer(engine, first)
        await engine.say(msgspec.structs.replace(DOWN, suspects=(second,)))
        engine.submits.clear()
        await engine.say(EngineUp(EMBEDS))
        suspects = [s.suspect for s in engine.submits for _ in s.sequences]
        assert sorted(given(engine).values()) == [2, 3, 4, 5] and suspects == [True] + [False] * 3
        while not task.done():
            await answer(engine, *given(engine))
        assert [array("f", vector)[0] for vector in (await task).vectors] == [1, 2, 3, 4, 5, 6]


async def test_an_input_that_kills_two_engines_ends_its_request(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        task = await asked(generation, engine, 3)
        await engine.say(msgspec.structs.replace(DOWN, suspects=tuple(given(engine))[:2]))
        engine.submits.clear()
        await engine.say(EngineUp(EMBEDS))
        (suspect, *_) = [s for s in engine.submits if s.suspect]
        await engine.say(
            msgspec.structs.replace(DOWN, suspects=(suspect.sequences[0].sequence_id,))
        )
        with pytest.raises(RequestError) as refused:
            await task
        assert refused.value.code == "poison_request"


async def test_a_cancelled_vector_request_cancels_its_sequences(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        task = await asked(generation, engine, 9)
        task.cancel()
        await settle()
        (cancel,) = engine.cancels
        assert set(cancel.sequence_ids) == set(given(engine))
        assert not generation.vectors.batches


async def test_a_failed_input_ends_its_request_with_the_reason(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        task = await asked(generation, engine, 3)
        first, *others = given(engine)
        end = Finished(first, FinishReason.ERROR, "internal_error", "Not a number.")
        await engine.say(Outputs(finished=(end,)))
        with pytest.raises(RequestError, match="Not a number"):
            await task
        assert set(engine.cancels[0].sequence_ids) == set(others)


async def test_a_full_queue_refuses_a_batch_and_a_batch_counts_toward_the_limit(
    folder: Path,
) -> None:
    async with running(folder, max_num_queued_reqs=WINDOW) as (generation, engine):
        task = await asked(generation, engine, 9)
        with pytest.raises(RequestError) as refused:
            await generation.vectors.make(wanted(1))
        assert refused.value.code == "server_overloaded"
        await engine.start(*given(engine))
        task.cancel()


async def test_a_drain_waits_for_a_batch_and_ends_it_after_the_timeout(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        task = await asked(generation, engine, 3)
        draining = asyncio.create_task(generation.drain(60))
        await settle()
        assert not draining.done()
        await answer(engine, *given(engine))
        await draining
        assert len((await task).vectors) == 3
    async with running(folder) as (generation, engine):
        task = await asked(generation, engine, 3)
        await generation.drain(0)
        with pytest.raises(RequestError) as refused:
            await task
        assert refused.value.code == "server_shutdown"


async def test_a_model_without_the_task_is_refused_with_a_remedy(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        for task, remedy in (("embed", "native-text"), ("score", "cross-encoder")):
            with pytest.raises(RequestError, match=remedy) as refused:
                await generation.vectors.make(wanted(1, task))
            assert refused.value.code == "unsupported_operation"
        assert not engine.submits


async def test_a_batch_keeps_its_model_if_another_model_becomes_the_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with models_of(folder, "ab") as (generation, engines):
        fleet, tokenized = generation.fleet, generation.vectors._tokenized

        async def reorder(request: VectorRequest, model: ServedModel) -> Encoded:
            fleet.become(fleet.hosts.all()[::-1])
            return await tokenized(request, model)

        monkeypatch.setattr(generation.vectors, "_tokenized", reorder)
        task = asyncio.create_task(generation.vectors.make(wanted(1)))
        await settle()
        engine = engines["a"][0]
        await engine.say(EngineUp(EMBEDS))
        while not engine.submits:
            await asyncio.sleep(0.01)
        await answer(engine, *given(engine))
        assert (await task).model.names == ("a",)
        assert fleet.hosts.first.name == "b" and not engines["b"]
