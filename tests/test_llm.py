"""Tests the in-process engine, from many threads and against a server."""

import gc
import threading
import typing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest

from headrace import (
    LLM,
    ConfigError,
    LoadProgress,
    ModelError,
    RequestFailed,
    SamplingOptions,
)
from headrace.protocols.openai.completions import MAX_PROMPTS
from headrace_common.config import sources
from headrace_common.config.settings import ServerConfig
from headrace_common.loading import CHECKING, COMPILING, ENGINE, READING, WARMING
from headrace_common.messages import WEIGHTS
from tools.harness.eventually import eventually
from tools.harness.servers import running_server
from tools.harness.tiny_adapters import ATTENTION, make_adapter

CHAT = [{"role": "user", "content": "hi"}]
ENDLESS = {"ignore_eos": True, "max_tokens": 800}
WHOLE = {"threads": 1, "max_model_len": 1024, "max_stall_ms": "off", "max_step_ms": "off"}
"""Settings that compute each prompt in one chunk, even on a slow machine."""


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM.load(str(folder), max_num_seqs=8, **WHOLE) as loaded:
        yield loaded


def num_running(llm: LLM) -> int:
    status = llm._host.generation.fleet.hosts.first.engine.status
    return status.num_running + status.num_waiting if status else 0


def test_a_name_or_a_path_loads_a_model_and_anything_else_is_refused(folder: Path) -> None:
    with LLM(folder, threads=1, max_model_len=64) as llm:
        assert llm.ready.max_model_len == 64
        with pytest.raises(ConfigError, match="no further options, but got threads"):
            LLM(ServerConfig(), threads=1)
    with pytest.raises(ConfigError, match="model must be a name such as 'smollm2'"):
        LLM(5)  # type: ignore[arg-type]


def test_the_named_options_are_settings_of_a_model_with_the_same_choices() -> None:
    known = {setting.name: setting for setting in sources.settings()}
    hints = typing.get_type_hints(LLM.__init__)
    for name in hints.keys() - {"model", "on_progress", "options", "return"}:
        assert known[name].path[0] == "models", name
        literals = (it for it in typing.get_args(hints[name]) if typing.get_origin(it) is Literal)
        offered = {choice for literal in literals for choice in typing.get_args(literal)}
        if choices := known[name].choices:
            assert offered == set(choices), name


def test_a_list_of_prompts_is_each_prompt_alone(llm: LLM) -> None:
    prompts = ["hi", "good morning", "x" * 40]
    alone = [llm.generate(prompt, temperature=0).token_ids for prompt in prompts]
    assert [answer.token_ids for answer in llm.generate(prompts, temperature=0)] == alone


def test_a_list_of_prompts_may_be_longer_than_that_of_the_route(llm: LLM) -> None:
    answers = llm.generate([[71]] * (MAX_PROMPTS + 1), temperature=0, max_tokens=1)
    assert len(answers) == MAX_PROMPTS + 1 and len({answer.text for answer in answers}) == 1


def test_token_ids_are_a_prompt_too(llm: LLM) -> None:
    one = llm.generate([71, 72], temperature=0)
    assert [answer.text for answer in llm.generate([[71, 72], [71, 72]], temperature=0)] == [
        one.text,
        one.text,
    ]


def test_samplers_with_state_take_effect(llm: LLM) -> None:
    asked = {"max_tokens": 12, "ignore_eos": True}
    likeliest = llm.generate("a b a b", temperature=0, **asked)
    certain = llm.generate("a b a b", temperature=5, mirostat=2, mirostat_tau=0, **asked)
    assert certain.token_ids == likeliest.token_ids
    dry = {"dry_multiplier": 100, "dry_allowed_length": 0}
    different = llm.generate("a b a b", temperature=0, **dry, **asked)
    assert different.token_ids != likeliest.token_ids


def test_the_deltas_of_a_stream_join_to_the_whole_answer(llm: LLM) -> None:
    whole = llm.chat(CHAT, temperature=0, max_tokens=20)
    pieces = list(llm.stream(CHAT, temperature=0, max_tokens=20))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [i for piece in pieces for i in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]


def test_an_answer_has_the_text_of_its_first_choice(llm: LLM) -> None:
    answer = llm.chat(CHAT, n=3, seed=1, max_tokens=4, logprobs=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert (answer.text, answer.token_ids) == (answer.choices[0].text, answer.choices[0].token_ids)
    assert answer.logprobs and answer.usage["completion_tokens"] == 12


def test_a_string_is_a_message_of_the_user_and_a_prompt_is_raw(llm: LLM) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    chat, raw = llm.chat(CHAT, **fields).text, llm.generate("hi", **fields).text
    assert llm.chat("hi", **fields).text == chat != raw
    assert "".join(piece.text for piece in llm.stream("hi", **fields)) == chat
    assert "".join(piece.text for piece in llm.stream(prompt="hi", **fields)) == raw


def test_a_list_of_conversations_is_each_conversation_alone(llm: LLM) -> None:
    options = SamplingOptions(temperature=0, max_tokens=8)
    asked = ["hi", "good morning", "hi"]
    alone = [llm.chat(one, options=options).text for one in asked]
    together = llm.chat(asked, options=options)
    assert [answer.text for answer in together] == alone
    conversations = [[{"role": "user", "content": one}] for one in asked]
    assert [answer.text for answer in llm.chat(conversations, options=options)] == alone


def test_the_conversations_of_a_list_share_engine_steps(llm: LLM) -> None:
    running: list[int] = []
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(llm.chat, ["a", "b", "c"], ignore_eos=True, max_tokens=200)
        while not asked.done():
            running.append(num_running(llm))
    assert max(running) == 3


def test_an_error_says_which_conversation_it_is_about(llm: LLM) -> None:
    for wrong in ([{"role": 5, "content": "x"}], [{"role": "user", "content": "x " * 2000}]):
        with pytest.raises(RequestFailed) as refused:
            llm.chat([CHAT, wrong, CHAT])
        assert refused.value.__notes__ == ["This is about input 1 of the list, counted from 0."]
    with pytest.raises(RequestFailed, match="messages"):
        llm.chat([])


def test_fields_take_precedence_over_options(llm: LLM) -> None:
    options = SamplingOptions(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
    for answer in (
        llm.chat("hi", options=options, max_tokens=3),
        llm.generate("hi", options=options, max_tokens=3),
    ):
        assert answer.usage["completion_tokens"] == 3 and answer.logprobs
    pieces = list(llm.stream("hi", options=options))
    assert len([token for piece in pieces for token in piece.token_ids]) == 5
    with pytest.raises(RequestFailed, match="temperature is -1"):
        llm.chat("hi", options=SamplingOptions(temperature=-1))


def test_vectors_are_arrays_of_float32(llm: LLM) -> None:
    one, many = llm.embed("hi"), llm.embed(["hi", "good morning"])
    assert (one.dtype, one.ndim, many.dtype, many.shape) == (
        np.float32,
        1,
        np.float32,
        (2, len(one)),
    )
    assert np.allclose(many[0], one, atol=1e-5) and llm.embed(["hi"]).shape == (1, len(one))


def test_a_chat_about_nothing_is_refused_with_the_field_that_is_missing(llm: LLM) -> None:
    with pytest.raises(RequestFailed, match="chat needs messages") as refused:
        llm.chat(None)
    assert refused.value.param == "messages"


def test_loading_a_model_reports_its_stages(folder: Path) -> None:
    told: list[LoadProgress] = []
    LLM.load(str(folder), threads=1, on_progress=told.append).close()
    assert told[0] == LoadProgress("reading the model's files", seconds=told[0].seconds)
    known = (READING, ENGINE, CHECKING, COMPILING, WEIGHTS, WARMING)
    assert {one.stage for one in told} <= set(known)


def test_an_unknown_field_is_refused_with_the_nearest(llm: LLM) -> None:
    with pytest.raises(RequestFailed, match="did you mean max_tokens"):
        llm.generate("hi", max_token=3)
    with pytest.raises(TypeError, match="either messages, or prompt"):
        llm.stream()


def test_calls_from_many_threads_get_the_answers_of_single_calls(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(8)]
    alone = [llm.generate(prompt, seed=5).text for prompt in prompts]
    with ThreadPoolExecutor(8) as threads:
        together = threads.map(lambda prompt: llm.generate(prompt, seed=5).text, prompts)
        assert list(together) == alone


def test_leaving_the_loop_cancels_the_request(llm: LLM) -> None:
    for _ in llm.stream(prompt="go on", **ENDLESS):
        break
    eventually(lambda: num_running(llm) == 0)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temperature": "warm"}, "invalid_type", "temperature"),
        ({"temperature": float("nan")}, "invalid_value", "temperature"),
        ({"top_p": 2}, "invalid_value", "top_p"),
        ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
        ({"max_token": 3}, "unsupported_parameter", "max_token"),
    ],
)
def test_fields_are_checked_as_on_http(
    llm: LLM, fields: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(RequestFailed) as refused:
        llm.chat(CHAT, **fields)
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "\ud800"},
        {"stop": ["\ud800"]},
        {"seed": 10**5000},
        {"temperature": float("nan")},
        {"logit_bias": {"\ud800": 1}},
        {"stop": {"a"}},
        {"chat_template_kwargs": {"x": object()}},
    ],
)
def test_a_value_that_json_cannot_hold_is_refused_without_harm(
    llm: LLM, fields: dict[str, Any]
) -> None:
    with pytest.raises(RequestFailed) as refused:
        llm.chat(CHAT, **fields)
    assert refused.value.kind.status == 400
    assert llm.chat(CHAT, max_tokens=1).text is not None


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(llm: LLM) -> None:
    with pytest.raises(RequestFailed, match=r"at least 2000 tokens.* to 1023 tokens"):
        list(llm.stream(prompt="x" * 2000))


def test_the_error_for_a_long_prompt_has_the_words_that_clients_match(llm: LLM) -> None:
    words = "This model's maximum context length is 1024 tokens. However, your prompt resulted in "
    with pytest.raises(RequestFailed, match=f"^{words}2000 tokens.") as refused:
        llm.generate([65] * 2000)
    assert refused.value.extra == {"n_prompt_tokens": 2000, "n_ctx": 1024}


def test_tuples_and_integer_keys_are_taken_as_json_has_them(llm: LLM) -> None:
    answer = llm.generate("hi", logit_bias={70: 100}, temperature=0, stop=("zz",), max_tokens=1)
    assert answer.token_ids == [70]


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        LLM.load(max_model_length=5)


def test_a_missing_model_is_refused() -> None:
    with pytest.raises(ModelError, match="No model folder") as refused:
        LLM.load("./nowhere")
    # The traceback does not include the frames of the loading thread.
    assert {it.path.name for it in refused.traceback} <= {
        "test_llm.py", "llm.py", "loaded_model.py", "host.py"
    }  # fmt: skip
    assert refused.value.__suppress_context__ and refused.value.__cause__ is None


def test_closing_ends_calls_and_refuses_new_ones(folder: Path) -> None:
    llm = LLM.load(str(folder), threads=1, max_model_len=1024, max_step_tokens=1)
    pieces = llm.stream(prompt="go on", **ENDLESS)
    next(pieces)
    closing = threading.Thread(target=llm.close)
    closing.start()
    with pytest.raises(RequestFailed, match=r"clos|shut"):
        list(pieces)
    closing.join(timeout=30)
    with pytest.raises(RequestFailed, match="closed"):
        llm.generate("hi")


def about(value: Any) -> Any:
    """Return a value that compares equal if no number differs by more than 1e-4."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-4)
    if isinstance(value, dict):
        return {key: about(item) for key, item in value.items()}
    return [about(item) for item in value] if isinstance(value, list) else value


def test_a_model_without_references_is_freed(folder: Path) -> None:
    llm = LLM(str(folder), threads=1)
    thread, pieces = llm._host._thread, llm.stream(prompt="Once", max_tokens=3)
    del llm
    gc.collect()
    assert list(pieces)
    del pieces
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_http_and_in_process_give_the_same_answers(llm: LLM, folder: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 30},
        {"seed": 7, "max_tokens": 30, "n": 2},
        {"seed": 8, "max_tokens": 30, "logprobs": True, "top_logprobs": 2},
    ]
    flags = [part for k, v in WHOLE.items() for part in (f"--{k.replace('_', '-')}", str(v))]
    with running_server(str(folder), *flags) as server:
        for fields in asked:
            url = f"{server.url}/v1/chat/completions"
            fields["cache_prompt"] = False  # the same arithmetic, so the same logprobs
            body = {**fields, "messages": CHAT, "return_token_ids": True}
            over_http = httpx.post(url, json=body, timeout=60).json()
            answer = llm.chat(CHAT, **fields)
            for here, there in zip(answer.choices, over_http["choices"], strict=True):
                assert here.text == there["message"]["content"]
                assert here.token_ids == there["token_ids"]
                # a library's float32 sums may differ in the last digits from process to process
                assert here.logprobs == about(there["logprobs"])
            assert answer.usage["total_tokens"] == over_http["usage"]["total_tokens"]


def test_an_adapter_is_selected_by_the_model_field(folder: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "sql", folder, 4, ATTENTION)
    named = {"adapter": (f"sql={path}",), "alias": ["mine=sql"]}
    with LLM.load(str(folder), max_num_seqs=8, **named, **WHOLE) as llm:
        base = llm.generate("hi", temperature=0).text
        adapted = llm.generate("hi", temperature=0, model="sql").text
        assert adapted != base
        assert llm.generate("hi", temperature=0, model="mine").text == adapted
        with pytest.raises(RequestFailed, match=r"This server has: .*sql"):
            llm.generate("hi", model="other")


def test_every_call_takes_an_alias_and_one_for_no_model_is_refused(folder: Path) -> None:
    aliases = [f"gpt-*={folder}", f"small={folder}"]
    with LLM.load(str(folder), alias=aliases, max_num_seqs=8, **WHOLE) as llm:
        by_name = llm.generate("hi", temperature=0).text
        assert llm.generate("hi", temperature=0, model="gpt-5").text == by_name
        assert np.array_equal(llm.embed("hi", model="gpt-5"), llm.embed("hi"))
        with pytest.raises(RequestFailed, match=r"This server has: .*small"):
            llm.embed("hi", model="other")
    with pytest.raises(ConfigError, match=r"--alias gpt-\*=other: no model or adapter is named"):
        LLM.load(str(folder), alias=["gpt-*=other"])
