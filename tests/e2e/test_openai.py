"""Tests of the openai package with a real server."""

import asyncio
from typing import Any

import openai
import pytest

from tools.harness.servers import ServerProcess

MODEL = "headrace-mini"
USER = [{"role": "user", "content": "Tell me about a river."}]
LONG = [{"role": "user", "content": "x " * 40_000}]


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return client_of(server)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": MODEL, "messages": USER, "max_tokens": 12, "seed": 5} | fields
    return client.chat.completions.create(**fields)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": MODEL, "prompt": "Once", "max_tokens": 12, "seed": 5} | fields
    return client.completions.create(**fields)


def joined(chunks: Any) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model


def test_a_chat_answers(client: openai.OpenAI) -> None:
    answer = chat(client)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 1 <= usage.completion_tokens <= 12


def test_joined_deltas_equal_the_answer(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True))
    assert joined(chunks) == chat(client).choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_the_usage_chunk_comes_last(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_equal_seeds_give_equal_text(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        flat = {"ignore_eos": True}
        answer = chat(client, seed=seed, temperature=4.0, max_tokens=24, extra_body=flat)
        return str(answer.choices[0])

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_a_stop_string_is_cut_out_and_ends_the_answer(client: openai.OpenAI) -> None:
    whole = complete(client, temperature=0, max_tokens=24).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    (choice,) = complete(client, temperature=0, max_tokens=24, stop=[stop, "never"]).choices
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop
    streamed = list(complete(client, temperature=0, max_tokens=24, stop=stop, stream=True))
    assert "".join(c.choices[0].text for c in streamed) == choice.text


def test_chat_logprobs_match_the_text(client: openai.OpenAI) -> None:
    (choice,) = chat(client, logprobs=True, top_logprobs=3).choices
    entries = choice.logprobs.content
    raw = b"".join(bytes(entry.bytes) for entry in entries)
    assert raw.decode(errors="replace") == choice.message.content
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob <= 0


def test_joined_logprobs_equal_the_whole(client: openai.OpenAI) -> None:
    chunks = chat(client, logprobs=True, top_logprobs=2, stream=True)
    joined = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    whole = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [entry.bytes for entry in joined] == [entry.bytes for entry in whole]
    for one, other in zip(joined, whole, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_completion_logprobs_have_text_offsets(client: openai.OpenAI) -> None:
    (choice,) = complete(client, logprobs=2, echo=True).choices
    shown = choice.logprobs
    assert choice.text.startswith("Once")
    assert shown.token_logprobs[0] is None
    assert shown.top_logprobs[0] is None
    assert all(value <= 0 for value in shown.token_logprobs[1:])
    for token, offset in zip(shown.tokens, shown.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token)


def test_several_choices_differ_and_the_first_equals_a_single_one(client: openai.OpenAI) -> None:
    # Answers that end at once may be equal, so each gets 12 tokens.
    wild = {"temperature": 1.5, "extra_body": {"ignore_eos": True}}
    answer = complete(client, n=3, **wild)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == complete(client, **wild).choices[0].text


def test_streamed_choices_equal_the_choices_of_a_whole_answer(client: openai.OpenAI) -> None:
    texts = ["", "", ""]
    for chunk in chat(client, n=3, temperature=1.5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    whole = chat(client, n=3, temperature=1.5)
    assert texts == [choice.message.content for choice in whole.choices]


def test_a_list_of_prompts_gets_the_answers_of_single_prompts(client: openai.OpenAI) -> None:
    prompts = ["Once", "A river", "The"]
    texts = [c.text for c in complete(client, prompt=prompts, temperature=0).choices]
    alone = [complete(client, prompt=p, temperature=0).choices[0].text for p in prompts]
    assert texts == alone


def test_a_zero_token_completion_answers(client: openai.OpenAI) -> None:
    (choice,) = complete(client, max_tokens=0).choices
    assert (choice.text, choice.finish_reason) == ("", "length")


def test_max_tokens_is_exact(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=7, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 7
    assert answer.choices[0].finish_reason == "length"


def test_progress_reaches_the_total_before_the_first_text(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, extra_body={"return_progress": True}))
    reports = [
        c.model_extra["prompt_progress"] for c in chunks if "prompt_progress" in c.model_extra
    ]
    assert reports[0]["processed"] == reports[0]["cache"]
    assert reports[-1]["processed"] == reports[-1]["total"]
    processed = [report["processed"] for report in reports]
    assert processed == sorted(set(processed))
    assert joined(chunks) == chat(client).choices[0].message.content


def test_token_ids_match_the_usage(client: openai.OpenAI) -> None:
    answer = chat(client, extra_body={"return_token_ids": True})
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    again = complete(client, prompt=answer.prompt_token_ids)
    assert again.choices[0].text == answer.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"n": 10_000}, "invalid_value", "n"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"logit_bias": {"9999999": 1}}, "invalid_value", "logit_bias.9999999"),
        (
            {"messages": [{"role": "user", "content": "x " * 40_000}]},
            "context_length_exceeded",
            "messages",
        ),
        ({"response_format": {"type": "jsonl"}}, "invalid_value", "response_format.type"),
    ],
)
def test_an_error_has_a_code_and_names_the_field(
    client: openai.OpenAI, fields: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.request_id


def test_an_unknown_model_is_refused_with_a_list_of_models(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        chat(client, model="gpt-99")


def test_concurrent_clients_get_the_answers_of_single_ones(server: ServerProcess) -> None:
    async def all_of_them() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused")

        async def one(seed: int) -> str:
            answer = await client.completions.create(
                model=MODEL, prompt="Once", max_tokens=12, seed=seed, temperature=1.5
            )
            return answer.choices[0].text

        return await asyncio.gather(*(one(seed) for seed in range(8)))

    texts = asyncio.run(all_of_them())
    client = client_of(server)
    assert texts == [complete(client, seed=i, temperature=1.5).choices[0].text for i in range(8)]
