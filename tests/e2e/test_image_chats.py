"""Tests of chats with images over HTTP: answers, errors and recovery from kills."""

import base64
import io
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from headrace import LLM, Client, RequestFailed
from headrace.workers.image_fetch import ImageFetcher
from headrace.workers.input_memory import InputMemory
from tools.harness.processes import children, command
from tools.harness.servers import ServerProcess, running_server
from tools.harness.sse import data_of
from tools.harness.tiny_models import IMAGE, make_tiny_image_model

LIMIT_S = 280  # the image worker has the lowest priority, so it is slow on a busy machine


def picture(seed: int, form: str = "PNG", size: tuple[int, int] = (40, 30)) -> bytes:
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chat(*images: str, text: str = "What is this?", **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    content = [*parts, {"type": "text", "text": text}]
    settings = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return {"messages": [{"role": "user", "content": content}], **settings, **fields}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_image_model(tmp_path_factory.mktemp("llava"), "LLaVA")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def server(folder: Path, state: Path) -> Iterator[ServerProcess]:
    with running_server(str(folder), "--threads", "1", "--state-dir", str(state)) as running:
        yield running


def post(server: ServerProcess, body: dict[str, Any], **headers: str) -> httpx.Response:
    path = f"{server.url}/v1/chat/completions"
    return httpx.post(path, json=body, headers=headers, timeout=LIMIT_S)


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_the_answer_depends_only_on_the_images_and_their_order(server):
    one, other = url(picture(1)), url(picture(2))
    answers = [said(post(server, chat(image))) for image in (one, other, one)]
    assert answers[0] == answers[2] != answers[1]
    assert said(post(server, chat(one, other))) != said(post(server, chat(other, one)))


def test_models_and_props_report_image_input(server):
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert model["architecture"]["input_modalities"] == ["text", "image"]
    assert httpx.get(f"{server.url}/props").json()["modalities"]["vision"] is True


def test_usage_counts_image_tokens(server):
    plain = post(server, chat()).json()["usage"]["prompt_tokens"]
    seen = post(server, chat(url(picture(1)))).json()["usage"]["prompt_tokens"]
    assert seen == plain + 16  # patches of 8 pixels in an image of 32


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "GIF", "BMP"])
def test_other_image_formats_are_accepted(server, form):
    said(post(server, chat(url(picture(3, form), f"image/{form.lower()}"), max_tokens=1)))


def test_images_are_prepared_at_the_lowest_priority(server):
    said(post(server, chat(url(picture(1)), max_tokens=1)))
    commands = {it: command(it).split(b"\0") for it in children(server.process.pid)}
    (worker,) = [it for it, said in commands.items() if b"images" in said]
    assert os.getpriority(os.PRIO_PROCESS, worker) == 19


def test_several_choices_use_the_same_image(server):
    body = chat(url(picture(4)), temperature=1, seed=5, n=3)
    several = [c["message"]["content"] for c in post(server, body).json()["choices"]]
    assert len(set(several)) == 3
    assert several[0] == said(post(server, body | {"n": 1}))


def test_all_dialects_give_the_same_answer_about_an_image(server):
    image, more = url(picture(5)), {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    expected = said(post(server, chat(image)))
    text = {"type": "text", "text": "What is this?"}
    source = {"type": "base64", "media_type": "image/png", "data": image.partition(",")[2]}
    turn = {"role": "user", "content": [{"type": "image", "source": source}, text]}
    name = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    body = {"model": name, "messages": [turn], **more}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=LIMIT_S).json()
    assert answer["content"][0]["text"] == expected
    parts = [{"type": "input_image", "image_url": image}, text | {"type": "input_text"}]
    body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 12, **more}
    del body["max_tokens"]
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=LIMIT_S).json()
    assert answer["output"][0]["content"][0]["text"] == expected
    counted = httpx.post(
        f"{server.url}/v1/responses/input_tokens", json=body, timeout=LIMIT_S
    ).json()
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]
    again = {"input": "And now?", "previous_response_id": answer["id"], "max_output_tokens": 2}
    second = httpx.post(f"{server.url}/v1/responses", json=again, timeout=LIMIT_S).json()
    assert second["usage"]["input_tokens"] > answer["usage"]["input_tokens"] + 12


def test_the_python_client_and_llm_accept_images(server, folder):
    messages = chat(url(picture(5)))["messages"]
    more = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    expected = said(post(server, chat(url(picture(5)))))
    with Client(server.url) as client:
        assert client.chat(messages, **more).text == expected
    with LLM.load(str(folder), threads=1) as model:
        assert model.chat(messages, **more).text == expected


def test_truncation_drops_the_oldest_items_until_the_images_fit(server):
    place = f"{server.url}/v1/responses"

    def seen(number: int) -> dict[str, Any]:
        parts = [{"type": "input_image", "image_url": url(picture(number))}]
        return {"role": "user", "content": [*parts, {"type": "input_text", "text": str(number)}]}

    def input_tokens(items: list[dict[str, Any]]) -> int:
        answer = httpx.post(f"{place}/input_tokens", json={"input": items}, timeout=LIMIT_S)
        return int(answer.json()["input_tokens"])

    talk = [seen(number) for number in range(8)]
    limit = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    room = limit - limit // 8
    talk.insert(4, {"role": "assistant", "content": "x " * (room - input_tokens(talk[:5]))})
    body = {"input": talk, "truncation": "auto", "generate": False}
    response = httpx.post(place, json=body, timeout=LIMIT_S)
    assert "x-headrace-ignored" not in response.headers
    ((first, last),) = response.json()["truncated_items"]
    kept = input_tokens(talk[last + 1 :])
    assert first == 0 and 0 < last < 8
    assert kept == response.json()["usage"]["input_tokens"] <= room
    assert input_tokens(talk[last:]) > room


class OnePicture(BaseHTTPRequestHandler):
    """A web server that answers every request with the same picture."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(picture(5))


def test_an_image_url_is_fetched_only_if_it_is_allowed(server, folder):
    expected = said(post(server, chat(url(picture(5)))))
    more = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), OnePicture) as site,
        LLM.load(str(folder), threads=1, allow_image_urls=True) as model,
    ):
        threading.Thread(target=site.serve_forever).start()
        messages = chat(f"http://127.0.0.1:{site.server_port}/a.png")["messages"]
        with pytest.raises(RequestFailed) as refused:
            model.chat(messages, **more)  # localhost is refused
        assert refused.value.code == "image_url_refused"
        fetcher = ImageFetcher(lambda address: True, 1 << 20, InputMemory())
        model._host.generation.image_fetcher = fetcher
        assert model.chat(messages, **more).text == expected
        site.shutdown()


_NO_PIXELS = b"BM" + (54).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
_NO_PIXELS += (40).to_bytes(4, "little") + bytes(8) + b"\1\0\x18\0" + bytes(24)


def huge() -> bytes:
    """Return a small PNG file with 10,000 × 10,000 pixels."""
    file = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("image", "code"),
    [
        (lambda: url(picture(1)[:300]), "invalid_image"),
        (lambda: url(b"no image at all"), "invalid_image"),
        (lambda: url(b""), "invalid_image"),
        (lambda: url(_NO_PIXELS), "invalid_image"),
        (lambda: "data:image/png;base64,!!!", "invalid_image"),
        (lambda: url(huge()), "image_too_large"),
        (lambda: url(bytes((20 << 20) + 1)), "image_too_large"),
        (lambda: "https://example.com/a.png", "image_url_refused"),
        (lambda: "http://127.0.0.1/a.png", "image_url_refused"),
        (lambda: "file:///etc/passwd", "image_url_refused"),
    ],
)
def test_an_invalid_image_is_refused_with_its_position_in_the_message(server, image, code):
    good = url(picture(1))
    refused = post(server, chat(good, image()))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, code), error
    assert error["param"] == "messages[0].content[1]"
    said(post(server, chat(good, max_tokens=1)))


def test_too_many_images_and_placeholders_in_the_text_are_refused(server):
    codes = [
        post(server, body).json()["error"]["code"]
        for body in (
            chat(*[url(picture(1))] * 17),
            chat(url(picture(1)), text=f"and {IMAGE}?"),
            chat(text=f"only {IMAGE}"),
        )
    ]
    assert codes == ["image_too_large", "invalid_value", "invalid_value"]


def test_a_part_of_an_unknown_kind_is_ignored_and_named_in_a_header(server):
    body = chat()
    body["messages"][0]["content"].append({"type": "input_audio", "input_audio": {}})
    assert "messages[0].content" in post(server, body).headers["X-Headrace-Ignored"]


def text_despite_a_kill(server: ServerProcess, body: dict[str, Any]) -> str:
    """Return the text of a chat whose engine is killed at its first token."""
    path, text, killed = f"{server.url}/v1/chat/completions", "", False
    with httpx.stream("POST", path, json=body | {"stream": True}, timeout=LIMIT_S) as answer:
        for line in answer.iter_lines():
            text += text_in(line)
            if text and not killed:
                killed = True
                server.kill_engine()
    return text


def text_in(line: str) -> str:
    """Return the text that one line of a streamed answer adds."""
    choices = [choice for frame in data_of([line]) for choice in frame["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_an_image_chat_loses_no_text_when_its_engine_is_killed(server):
    body = chat(url(picture(6)), url(picture(7)), max_tokens=80)
    expected = said(post(server, body))
    assert expected and text_despite_a_kill(server, body) == expected


@pytest.mark.slow
def test_an_image_chat_survives_a_server_kill(folder, state, server):
    body = chat(url(picture(8)), max_tokens=150, stream=True)
    expected = said(post(server, body | {"stream": False}))
    names = {"X-Conversation-Id": "seen"}
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, headers=names, timeout=LIMIT_S
    ) as answer:
        for line in answer.iter_lines():
            if text_in(line):
                break
        os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(timeout=60)
    again = ["--threads", "1", "--state-dir", str(state)]
    with (
        running_server(str(folder), *again) as second,
        httpx.stream(
            "POST", f"{second.url}/v1/chat/completions", json=body, headers=names, timeout=LIMIT_S
        ) as rest,
    ):
        text = "".join(map(text_in, rest.iter_lines()))
    assert text == expected
