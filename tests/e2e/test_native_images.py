"""Tests of a model with an external vision encoder and our own text model, over HTTP."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_image_chats import chat, picture, post, said, text_despite_a_kill, url
from tests.e2e.test_open_responses import ask, message
from tools.harness.gguf_vision import to_gguf_pair
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_image_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_image_model(tmp_path_factory.mktemp("seeing"), "Qwen3.5")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with running_server(str(folder), "--threads", "1", "--block-size", "8") as running:
        yield running


def test_an_answer_depends_on_the_images_and_their_order(server):
    one, other = (url(picture(seed, size=(64, 48))) for seed in (1, 2))
    bodies = [chat(*images, max_tokens=60) for images in ([one, other], [other, one])]
    answers = [said(post(server, body)) for body in bodies]
    assert answers[0] != answers[1]
    assert said(post(server, bodies[0])) == answers[0]


def test_a_repeated_image_is_cached_and_the_ingestion_record_names_its_encoder(server):
    body = chat(url(picture(3)), text="What is this? " * 4, return_ingestion=True)
    first, second = (post(server, body).json() for _ in range(2))
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second)]
    assert cached[0] == 0 and cached[1] > 16
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    record = second["headrace"]["ingestion"]
    assert (record["strategy"], record["memory"]) == ("native-multimodal", "blocks")
    assert record["encoder"] == "pieces"
    text = post(server, chat(text="Hello", return_ingestion=True)).json()
    assert text["headrace"]["ingestion"]["encoder"] is None


@pytest.mark.slow
def test_an_image_chat_loses_no_text_when_its_engine_is_killed(server):
    body = chat(url(picture(6)), url(picture(7)), max_tokens=80)
    expected = said(post(server, body))
    assert expected and text_despite_a_kill(server, body) == expected


@pytest.mark.slow
def test_the_native_text_lane_refuses_images(folder):
    with running_server(str(folder), "--threads", "1", "--lane", "native-text") as running:
        said(post(running, chat(text="Hello")))
        refused = post(running, chat(url(picture(1)))).json()["error"]
        assert refused["code"] == "unsupported_content"


@pytest.mark.slow
def test_a_pair_of_gguf_files_answers_like_the_folder(folder, tmp_path):
    text, vision = to_gguf_pair(
        Path(shutil.copytree(folder, tmp_path / "model")), tmp_path / "gguf"
    )
    away = vision.rename(tmp_path / "vision.gguf")
    body = chat(url(picture(1)), url(picture(2)), max_tokens=40, temperature=0)
    flags = ("--threads", "1", "--quantize", "none", "--dtype", "float32")
    answers = []
    for model, own in ((str(folder), ()), (str(text), ("--mmproj", str(away)))):
        with running_server(model, *flags, *own) as running:
            answers.append(said(post(running, body)))
    assert answers[0] == answers[1]
    with running_server(str(text), *flags) as running:
        assert post(running, body).json()["error"]["code"] == "unsupported_content"


def test_open_responses_accepts_an_image(server):
    image = {"type": "input_image", "image_url": url(picture(8))}
    parts = [{"type": "input_text", "text": "What do you see in this image?"}, image]
    # The weights are random, so the answer only ends at one of these texts.
    assert ask(server, input=[message("user", parts)], stop=list("aeiou 0123456789"))["output"]
