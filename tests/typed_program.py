"""A user's program for the type checker: every call has the documented type."""

from typing import assert_type

from numpy import float32
from numpy.typing import NDArray

from headrace import LLM, Answer, AsyncClient, AsyncLLM, Client, Plan, Ranked, SamplingOptions

options = SamplingOptions(temperature=0.5, stop=["."], n=2)
conversation = [{"role": "user", "content": "hello"}]

with LLM("smollm2", max_num_seqs=4, quantize="int8", block_size=16) as llm:
    assert_type(llm.chat("hello", options=options, top_k=5), Answer)
    assert_type(llm.chat(conversation), Answer)
    assert_type(llm.chat(["hello", "bye"]), list[Answer])
    assert_type(llm.chat([conversation, conversation], options=options), list[Answer])
    assert_type(llm.generate("hello", options=options), Answer)
    assert_type(llm.generate([1, 2, 3]), Answer)
    assert_type(llm.generate(["hello", "bye"]), list[Answer])
    assert_type(llm.generate([[1], [2]]), list[Answer])
    assert_type(llm.embed("hello"), NDArray[float32])
    assert_type(llm.tokenizer.encode("hello"), list[int])
    assert_type(llm.tokenizer.count(conversation), int)
    assert_type(llm.plan(conversation), Plan)
    assert_type(llm.rerank("hello", ["bye"]), list[Ranked])
    for piece in llm.stream("hello", options=options):
        assert_type(piece.text, str)

with Client("localhost:8000") as client:
    assert_type(client.chat("hello", options=options), Answer)
    assert_type(client.chat(["hello", "bye"]), list[Answer])
    assert_type(client.completions("hello", options=options), Answer)
    assert_type(client.embed(["hello"]), NDArray[float32])


async def ask() -> None:
    async with AsyncLLM("smollm2", quantize="int8") as model:
        assert_type(await model.chat("hello", options=options), Answer)
        assert_type(await model.chat(["hello", "bye"], progress=True), list[Answer])
        assert_type(await model.generate(["hello", "bye"]), list[Answer])
        assert_type(await model.embed(["hello"]), NDArray[float32])
        async for piece in model.stream("hello", options=options):
            assert_type(piece.text, str)
    async with AsyncClient("localhost:8000") as client:
        assert_type(await client.chat("hello", options=options), Answer)
        assert_type(await client.chat([conversation, conversation]), list[Answer])
        async for piece in client.stream("hello", options=options):
            assert_type(piece.text, str)
