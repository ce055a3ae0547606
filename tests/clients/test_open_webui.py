"""Open WebUI, with a server as its Ollama and as its OpenAI connection: `make test-open-webui`."""

import json
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server

PROGRAM = Path(__file__).parents[2] / "build" / "open-webui-venv" / "bin" / "open-webui"
MODELS = ("headrace-mini", "openai.headrace-mini")  # by Ollama's API, and by OpenAI's
TEXT = "The water wheel at Lima was built in 1888 by Ada Miller."
START_S, LIMIT_S = 300, 120
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with running_server("--linger-s", "0") as running:
        yield running


def settings(server: ServerProcess, folder: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "DATA_DIR": str(folder),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "for tests",
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
        "ANONYMIZED_TELEMETRY": "False",
        "ENABLE_RETRIEVAL_QUERY_GENERATION": "False",
        "OLLAMA_BASE_URL": server.url,
        "OPENAI_API_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "unused",
        "OPENAI_API_CONFIGS": '{"0": {"prefix_id": "openai"}}',
        "RAG_EMBEDDING_ENGINE": "ollama",
        "RAG_EMBEDDING_MODEL": "headrace-mini",
    }


@pytest.fixture(scope="session")
def webui(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("open-webui")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (str(PROGRAM), "serve", "--host", "127.0.0.1", "--port", str(port))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=settings(server, folder), stdout=log, stderr=log
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client:
            await_start(client, process, folder / "log")
            signed_in = client.post("/api/v1/auths/signin", json={"email": "", "password": ""})
            client.headers["Authorization"] = f"Bearer {signed_in.json()['token']}"
            client.get("/api/models").raise_for_status()
            yield client
    finally:
        process.terminate()
        process.wait(timeout=LIMIT_S)


def await_start(client: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(f"Open WebUI did not start:\n{log.read_text()[-4000:]}")


def ask(webui: httpx.Client, model: str, question: str = "Hello", **fields: Any) -> Any:
    asked = [{"role": "user", "content": question}]
    body = {"model": model, "temperature": 0, "messages": asked, **fields}
    answer = webui.post("/api/chat/completions", json=body)
    assert answer.is_success, answer.text
    return answer.json()


def test_both_connections_list_the_model(webui: httpx.Client) -> None:
    listed = webui.get("/api/models").json()["data"]
    owners = {it["id"]: it["owned_by"] for it in listed}
    assert owners == dict(zip(MODELS, ("ollama", "openai"), strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_an_answer_is_the_same_whole_and_in_a_stream(webui: httpx.Client, model: str) -> None:
    (choice,) = ask(webui, model)["choices"]
    assert choice["message"]["content"] == "Hello! How can I help you?"
    asked = [{"role": "user", "content": "Hello"}]
    body = {"model": model, "temperature": 0, "messages": asked, "stream": True}
    with webui.stream("POST", "/api/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]" and len(lines) > 3
    choices = [choice for line in lines for choice in json.loads(line).get("choices", ())]
    text = "".join(it["delta"].get("content") or "" for it in choices)
    assert text == choice["message"]["content"]


@pytest.mark.parametrize("model", MODELS)
def test_an_answer_ends_before_a_stop_string(webui: httpx.Client, model: str) -> None:
    (choice,) = ask(webui, model, stop=["can"])["choices"]
    assert choice["message"]["content"] == "Hello! How "


@pytest.mark.parametrize("model", MODELS)
def test_a_tool_is_called(webui: httpx.Client, model: str) -> None:
    (choice,) = ask(webui, model, "What is the weather in Paris?", tools=[WEATHER])["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


@pytest.mark.parametrize("model", MODELS)
def test_the_stop_button_ends_the_work_of_the_server(
    webui: httpx.Client, server: ServerProcess, model: str
) -> None:
    chat = {"title": "x", "models": [model], "messages": []}
    chat_id = webui.post("/api/v1/chats/new", json={"chat": chat}).json()["id"]
    params = {"temperature": 0, "function_calling": "legacy"}
    names = {"chat_id": chat_id, "id": str(uuid.uuid4()), "session_id": "none"}
    started = ask(webui, model, "Count from 1 to 1000.", stream=True, params=params, **names)
    assert len(started["task_ids"]) == 1

    def is_busy() -> bool:
        return any(slot["is_processing"] for slot in httpx.get(f"{server.url}/slots").json())

    eventually(is_busy)
    assert webui.post(f"/api/tasks/chat/{chat_id}/stop").json()["status"]
    eventually(lambda: not is_busy())
    route = "/v1/chat/completions" if model.startswith("openai.") else "/api/chat"
    ended = f'headrace_requests_total{{outcome="client_gone",route="{route}"}} 1.0'
    assert ended in httpx.get(f"{server.url}/metrics").text


@pytest.mark.parametrize("engine", ["ollama", "openai"])
@pytest.mark.parametrize("model", MODELS)
def test_a_file_is_found_by_its_vectors_and_shown_to_the_model(
    webui: httpx.Client, server: ServerProcess, model: str, engine: str
) -> None:
    address = {"url": server.url if engine == "ollama" else f"{server.url}/v1", "key": ""}
    used = {"RAG_EMBEDDING_ENGINE": engine, "RAG_EMBEDDING_MODEL": "headrace-mini"}
    update = webui.post(
        "/api/v1/retrieval/embedding/update", json=used | {f"{engine}_config": address}
    )
    assert update.is_success, update.text
    files = {"file": ("wheel.txt", f"{TEXT} {model} {engine}", "text/plain")}
    uploaded = webui.post("/api/v1/files/?process_in_background=false", files=files).json()
    attached = [{"type": "file", "id": uploaded["id"]}]
    answer = ask(webui, model, "When was the wheel built?", files=attached, max_tokens=20)
    (source,) = answer["sources"]
    assert source["document"][0].startswith(TEXT)
    assert answer["usage"]["prompt_tokens"] > 100


@pytest.mark.parametrize("model", MODELS)
def test_inputs_become_vectors(webui: httpx.Client, model: str) -> None:
    body = {"model": model, "input": ["one", "two"]}
    vectors = [it["embedding"] for it in webui.post("/api/embeddings", json=body).json()["data"]]
    assert len(vectors) == 2 and vectors[0] != vectors[1]


def test_ollamas_own_routes_pass_through(webui: httpx.Client) -> None:
    asked = [{"role": "user", "content": "Hello"}]
    body = {"model": "headrace-mini", "messages": asked, "options": {"temperature": 0}}
    lines = webui.post("/ollama/api/chat", json=body).text.splitlines()
    text = "".join(json.loads(line)["message"]["content"] for line in lines)
    assert text == "Hello! How can I help you?"
    assert webui.post("/ollama/api/unload", json={"model": "headrace-mini"}).json()["status"]
