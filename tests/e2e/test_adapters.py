"""Tests of LoRA adapters over HTTP, which load and unload while engines are killed.

`KILLS=50` kills the engine 50 times, on several servers; the default is twice.
"""

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_common.checkpoints.find import find_model
from tests.kernels.own_kernels import needs_own_kernels
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_adapters import ATTENTION, MLP, make_adapter

pytestmark = needs_own_kernels  # torch's own products depend on the number of rows

KILLS = int(os.environ.get("KILLS", "2"))
KILLS_PER_SERVER = 5  # after more kills, the pauses before a restart grow long
KINDS = {"sql": (4, ATTENTION), "law": (8, MLP), "wit": (16, ATTENTION + MLP), "bag": (2, MLP)}
GIVEN, COMING = ("sql", "law"), ("wit", "bag")
BASE = "headrace-mini"
PROMPT = "water over the wheel " * 12
LIMIT_S = 120


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    base = find_model(BASE)
    return {
        name: make_adapter(root / name, base, rank, targets, seed)
        for seed, (name, (rank, targets)) in enumerate(KINDS.items())
    }


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[ServerProcess]:
    given = [f"--adapter={name}={folders[name]}" for name in GIVEN]
    aliases = ("--alias=sql-*=sql", "--alias=headrace-*=sql")
    with running_server("--dtype", "bfloat16", *given, *aliases) as running:
        yield running


def body_of(model: str, seed: int = 0, **fields: Any) -> dict[str, Any]:
    asked = {"model": model, "prompt": f"{seed} {PROMPT}", "max_tokens": 24, "ignore_eos": True}
    return {**asked, "temperature": 1, "seed": seed, "logprobs": 2, **fields}


def ask(server: ServerProcess, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S)
    return answer.raise_for_status().json()["choices"]


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=LIMIT_S)


def load(server: ServerProcess, name: str, folder: Path) -> httpx.Response:
    return post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=str(folder))


def unload(server: ServerProcess, name: str) -> httpx.Response:
    return post(server, "/v1/unload_lora_adapter", lora_name=name)


def test_adapters_are_listed_with_their_parent(server: ServerProcess) -> None:
    entries = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert {it["id"]: it["parent"] for it in entries} == {BASE: None, "sql": BASE, "law": BASE}


def test_an_answer_is_the_same_alone_in_a_batch_and_after_an_engine_kill(
    server: ServerProcess,
) -> None:
    bodies = [body_of(name, seed) for seed in range(3) for name in (BASE, *GIVEN)]
    alone = [ask(server, body) for body in bodies]
    assert len({str(choices) for choices in alone}) == len(bodies)

    async def together(kill: bool) -> list[Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client:
            asking = asyncio.gather(*(client.post("/v1/completions", json=it) for it in bodies))
            while kill and not await _decodes(client):
                await asyncio.sleep(0.01)
            if kill:
                server.kill_engine()
            return [answer.raise_for_status().json()["choices"] for answer in await asking]

    assert asyncio.run(together(kill=False)) == alone
    assert asyncio.run(together(kill=True)) == alone


def test_cached_prefixes_are_not_shared_between_adapters(server: ServerProcess) -> None:
    def cached(model: str) -> int:
        body = {"model": model, "prompt": "another " + PROMPT * 2, "max_tokens": 1}
        usage = post(server, "/v1/completions", **body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(name) for name in (BASE, *GIVEN)] == [0, 0, 0]
    assert all(cached(name) > 0 for name in (BASE, *GIVEN))


def test_unloading_an_adapter_waits_for_its_streams_to_finish(
    server: ServerProcess, folders: dict[str, Path]
) -> None:
    assert post(server, "/v1/completions", **body_of("wit")).status_code == 404
    assert load(server, "wit", folders["wit"]).status_code == 200
    assert "already" in load(server, "wit", folders["wit"]).json()["error"]["message"]
    expected = ask(server, body_of("wit", max_tokens=400))

    async def leave() -> tuple[Any, int, int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client:
            body = body_of("wit", max_tokens=400)
            streaming = asyncio.create_task(client.post("/v1/completions", json=body))
            while not await _decodes(client):
                await asyncio.sleep(0.01)
            going = asyncio.create_task(
                client.post("/v1/unload_lora_adapter", json={"lora_name": "wit"})
            )
            while (await client.post("/v1/completions", json=body_of("wit"))).status_code != 404:
                await asyncio.sleep(0.01)
            assert not streaming.done() and not going.done()
            choices = (await streaming).json()["choices"]
            return choices, (await going).status_code, len((await client.get("/v1/models")).text)

    choices, status, _ = asyncio.run(leave())
    assert choices == expected and status == 200
    assert unload(server, "wit").status_code == 404


def test_an_alias_may_name_an_adapter_and_a_loaded_adapter_takes_precedence(
    server: ServerProcess, folders: dict[str, Path]
) -> None:
    def text(model: str) -> str:
        asked = {"model": model, "prompt": "water", "max_tokens": 8, "ignore_eos": True}
        answer = post(server, "/v1/completions", **asked, temperature=0).json()
        assert answer["model"] == model
        return str(answer["choices"][0]["text"])

    assert text("sql-latest") == text("sql") == text("headrace-maxi") != text(BASE)
    refused = post(server, "/v1/embeddings", model="sql-x", input="one").json()["error"]
    assert "cannot compute vectors" in refused["message"]
    # A matching alias pattern does not reserve the name.
    loaded = load(server, "sql-new", folders["wit"])
    assert loaded.is_success, loaded.text
    one = httpx.get(f"{server.url}/v1/models/sql-new").json()
    assert (one["parent"], "alias_of" in one) == (BASE, False)
    assert unload(server, "sql-new").is_success


def test_an_adapter_that_does_not_fit_is_refused_with_layer_and_rank(
    server: ServerProcess, folders: dict[str, Path], tmp_path: Path
) -> None:
    from tools.harness.tiny_models import make_tiny_model

    other = make_adapter(tmp_path / "x", make_tiny_model(tmp_path / "other"), 5, ("q_proj",))
    refused = load(server, "x", other)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "q_proj (rank 5)" in message and "Use an adapter" in message
    assert load(server, "y", tmp_path / "none").status_code == 400
    assert load(server, BASE, folders["wit"]).status_code == 400


def test_after_an_engine_kill_changed_adapter_files_are_reported(
    server: ServerProcess, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders["bag"], tmp_path / "bag"))
    assert load(server, "moved", folder).status_code == 200
    ask(server, body_of("moved"))
    shutil.copy(folders["wit"] / "adapter_config.json", folder)
    shutil.copy(folders["wit"] / "adapter_model.safetensors", folder)
    server.kill_engine()
    refused = post(server, "/v1/completions", **body_of("moved"))
    assert refused.json()["error"]["code"] == "model_changed"
    shutil.rmtree(folder)
    refused = post(server, "/v1/completions", **body_of("moved"))
    assert refused.json()["error"]["code"] == "load_failed"
    assert str(tmp_path) not in refused.text
    assert unload(server, "moved").status_code == 200


def test_a_malicious_adapter_regex_is_a_400_and_does_not_block_the_server(
    server: ServerProcess, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders["bag"], tmp_path / "bag"))
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"] = "((([a-z_0-9.])+)+)+X"
    (folder / "adapter_config.json").write_text(json.dumps(config))

    async def load_and_look() -> tuple[httpx.Response, int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client:
            body = {"lora_name": "bad", "lora_path": str(folder)}
            loading = asyncio.create_task(client.post("/v1/load_lora_adapter", json=body))
            num_alive = 0
            while not loading.done():
                num_alive += (await client.get("/health/live")).status_code == 200
            return await loading, num_alive

    refused, num_alive = asyncio.run(load_and_look())
    assert refused.status_code == 400 and "take too long to match" in refused.text
    assert num_alive > 10


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("x", "~nosuchuser/x"),
        ("x", "~a\0b/x"),
        ("x", "a\0b"),
        ("x", "a" * 10_000),
        ("x", "../../../../etc/passwd"),
        ("x", 3),
        ("x", ["a"]),
        ("a\nb", "/tmp"),
        ("a\0b", "/tmp"),
        ("a" * 257, "/tmp"),
        ("a=b", "/tmp"),
        ({}, "/tmp"),
    ],
)
def test_a_wrong_name_or_path_is_a_400(server: ServerProcess, name: Any, path: Any) -> None:
    refused = post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=path)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == ("lora_path" if name == "x" else "lora_name")


def test_metrics_count_requests_per_adapter(server: ServerProcess) -> None:
    ask(server, body_of("law"))
    text = httpx.get(f"{server.url}/metrics").text
    assert 'headrace_adapter_requests_total{adapter="law",outcome="finished"}' in text


@pytest.mark.slow
def test_no_answer_changes_while_adapters_reload_and_engines_are_killed(
    server: ServerProcess, folders: dict[str, Path]
) -> None:
    for name in COMING:
        assert load(server, name, folders[name]).status_code == 200
    bodies = [body_of(name, seed, max_tokens=60) for seed in range(4) for name in (BASE, *KINDS)]
    expected = [ask(server, body) for body in bodies]
    churn = Churn(folders, bodies, expected)
    asyncio.run(churn.run(server, min(KILLS, KILLS_PER_SERVER)))
    # Restarts are delayed longer after several kills, so each server gets only a few.
    while churn.num_kills < KILLS:
        given = [f"--adapter={name}={folder}" for name, folder in folders.items()]
        with running_server("--dtype", "bfloat16", *given) as another:
            asyncio.run(churn.run(another, min(KILLS - churn.num_kills, KILLS_PER_SERVER)))
    print(
        f"{churn.num_kills} kills, {churn.num_answers} answers, {churn.num_moves} adapters "
        f"reloaded: {len(churn.changed)} answers changed"
    )
    assert not churn.changed, churn.changed[0]


class Churn:
    """Clients that request all models while adapters reload and engines are killed."""

    def __init__(self, folders: dict[str, Path], bodies: list[Any], expected: list[Any]) -> None:
        self._folders, self._bodies, self._expected = folders, bodies, expected
        self._numbers = itertools.cycle(range(len(bodies)))
        self._is_over = asyncio.Event()
        self.changed: list[Any] = []
        self.num_kills = self.num_answers = self.num_moves = 0

    async def run(self, server: ServerProcess, kills: int) -> None:
        self._is_over = asyncio.Event()
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(6):
                tasks.create_task(self._read(client))
            tasks.create_task(self._move(client))
            for _ in range(kills):
                while not await _decodes(client, at_least=3):
                    await asyncio.sleep(0.01)
                server.kill_engine()
                self.num_kills += 1
                before = self.num_answers
                while self.num_answers < before + 8:
                    await asyncio.sleep(0.02)
            self._is_over.set()

    async def _read(self, client: httpx.AsyncClient) -> None:
        while not self._is_over.is_set():
            number = next(self._numbers)
            answer = await client.post("/v1/completions", json=self._bodies[number])
            if answer.status_code == 404 and self._bodies[number]["model"] in COMING:
                await asyncio.sleep(0.05)
                continue
            found = answer.json().get("choices", answer.text)
            self.num_answers += 1
            if found != self._expected[number]:
                self.changed.append((self._bodies[number]["model"], found))

    async def _move(self, client: httpx.AsyncClient) -> None:
        for name in itertools.cycle(COMING):
            if self._is_over.is_set():
                return
            gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
            assert gone.status_code == 200, gone.text
            given = {"lora_name": name, "lora_path": str(self._folders[name])}
            come = await client.post("/v1/load_lora_adapter", json=given)
            while come.status_code == 503:  # the engine was killed in the meantime
                await asyncio.sleep(0.1)
                come = await client.post("/v1/load_lora_adapter", json=given)
            assert come.status_code == 200, come.text
            self.num_moves += 1


async def _decodes(client: httpx.AsyncClient, at_least: int = 1) -> bool:
    state = (await client.get("/manage/state")).json()
    return sum(stream["state"] == "decode" for stream in state["requests"]) >= at_least
