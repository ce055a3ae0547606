"""Hostile input, drawn from a seed: model folders, adapters, upload forms and hub answers."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import msgspec

from stress.attack.folders import GOOD, copy_of_gguf, copy_of_mini, make_hostile_folder
from stress.attack.hostile_adapters import bad_requests, make_hostile_adapter, make_valid_adapter
from stress.attack.hostile_forms import drawn_form, head
from stress.attack.hostile_hub import escaped, hostile_hub
from stress.attack.target import Attack, Target, post
from stress.attack.watched import (
    ATTACKER,
    ONE,
    OPERATOR,
    NotStarted,
    Watched,
    chat,
    reading,
    watched_server,
)
from stress.http import Call
from tools.harness.servers import ServerProcess

# Seconds for one attack. Inputs that are not reached in this time are skipped.
_BUDGET_S = 60.0
_NUM_AT_ONCE = 4
# The server must answer within this many seconds when it reads a model. The server itself gives
# up after 60 seconds.
_READ_S = 90.0
_LOAD_S = 60.0
_START_S = 60.0
_NUM_STARTS = 2
_NUM_CLIENTS = 32
_FORM_BYTES = 2 << 20
_PULL_S = 1.0
# Every fourth model is a GGUF file.
_EVERY_GGUF = 4


class Folders:
    """A folder of model folders and GGUF files, which are all valid until `spoil` is called."""

    def __init__(self, root: Path, label: str, number: int) -> None:
        self.root = root / "models"
        self._base = copy_of_mini(root / "base")
        self._gguf = copy_of_gguf(root / "GGUF base")
        self._labels = {f"hostile-{n}": f"{label}/{n}" for n in range(number)}
        self._files = [*self._labels][_EVERY_GGUF - 1 :: _EVERY_GGUF]
        for name in (GOOD, *self._labels):
            if name in self._files:
                shutil.copy(self._gguf / "model.gguf", self.root / f"{name}.gguf")
            else:
                shutil.copytree(self._base, self.root / name, copy_function=os.link)

    @property
    def flags(self) -> tuple[str, str]:
        return "--models-dir", str(self.root)

    def spoil(self) -> dict[str, str]:
        """Makes every model but the good one hostile, and returns the changes by model."""
        return {name: f"{label} ({self._spoil(name)})" for name, label in self._labels.items()}

    def _spoil(self, name: str) -> str:
        label, model = self._labels[name], self.root / name
        if name not in self._files:
            shutil.rmtree(model)
            return make_hostile_folder(model, self._base, label)
        made = self.root.parent / f"GGUF {name}"
        what = make_hostile_folder(made, self._gguf, label)
        file = model.with_name(f"{name}.gguf")
        file.unlink()
        if os.path.lexists(made / "model.gguf"):
            (made / "model.gguf").rename(file)
        return what


async def read_folders(watched: Watched, spoiled: dict[str, str]) -> int:
    """Makes the server read each folder, several at the same time.

    Returns how many folders were read before the server failed a check.
    """
    waiting, survived = list(spoiled.items()), 0

    async def read() -> None:
        nonlocal survived
        while waiting:
            model, what = waiting.pop()
            for call in reading(model):
                await watched.ask(f"{call.path} {what}", call, _READ_S)
            if not await watched.check(what):
                waiting.clear()
                return
            survived += 1

    await asyncio.gather(*(read() for _ in range(_NUM_AT_ONCE)))
    return survived


async def folders(target: Target) -> None:
    """Makes the server read hostile model folders, and then load each for a chat."""
    with tempfile.TemporaryDirectory(dir=target.folder) as name:
        made = Folders(Path(name), target.label, target.num_each)
        # The folders are hostile before the server starts, because the start must survive them as
        # well.
        spoiled = made.spoil()
        async with watched_server(target, Path(name), *made.flags) as watched:
            began = time.monotonic()
            for model, what in spoiled.items():
                for call in (*reading(model), chat(model)):
                    await watched.ask(f"{call.path} {what}", call, _LOAD_S)
                if not await watched.check(what) or time.monotonic() - began > _BUDGET_S:
                    break


async def adapters(target: Target) -> None:
    """Loads hostile adapters through the operator's route and uses them in a chat.

    Some adapters are also passed to a server when it starts.
    """
    with tempfile.TemporaryDirectory(dir=target.folder) as name:
        root = Path(name)
        base = make_valid_adapter(root / "base")
        made = {
            f"adapter-{n}": make_hostile_adapter(root / f"adapter-{n}", base, f"{target.label}/{n}")
            for n in range(target.num_each)
        }
        async with watched_server(target, root) as watched:
            began = time.monotonic()
            for adapter, kind in made.items():
                what = f"{target.label}/{adapter} ({kind})"
                await load_adapter(watched, what, adapter, root / adapter)
                await watched.ask(f"path {what}", _loading(bad_requests(target.rng())), _LOAD_S)
                if not await watched.check(what) or time.monotonic() - began > _BUDGET_S:
                    break
        for adapter in list(made)[:_NUM_STARTS]:
            what = f"--adapter {target.label}/{adapter} ({made[adapter]})"
            await asyncio.to_thread(_start_with, target, what, root / "start", root / adapter)


async def load_adapter(watched: Watched, what: str, name: str, path: Path) -> None:
    body = {"lora_name": name, "lora_path": str(path), "base_model_name": ONE}
    answer = await watched.ask(f"load {what}", _loading(msgspec.json.encode(body)), _LOAD_S)
    if answer.status == 200:
        chatted = await watched.ask(f"chat {what}", chat(name), _LOAD_S)
        if chatted.status >= 500:
            watched.fail(f"chat {what}: the adapter was loaded, but the chat got {chatted.status}")
        unload = post("/v1/unload_lora_adapter", b'{"lora_name":"%s"}' % name.encode(), *OPERATOR)
        await watched.ask(f"unload {what}", unload, _LOAD_S)


def _loading(body: bytes) -> Call:
    return post("/v1/load_lora_adapter", body, *OPERATOR)


def _start_with(target: Target, what: str, state: Path, adapter: Path) -> None:
    """Starts a server with the adapter. The server must either start or report why it cannot."""
    flags = ("--state-dir", str(state), "--threads", "1", "--adapter", f"odd={adapter}")
    server = ServerProcess(ONE, *flags)
    try:
        ended = time.monotonic() + _START_S
        while not server.url and server.process.poll() is None and time.monotonic() < ended:
            time.sleep(0.05)
        if not server.url and server.process.poll() is None:
            target.fail(f"{what}: the server neither started nor exited in {_START_S:g} s")
        if odd := [line for line in server.lines if "Traceback" in line or "of a bug" in line]:
            target.fail(f"{what}: {odd[0][:300]}")
    finally:
        server.stop(signal.SIGKILL)


async def forms(target: Target) -> None:
    """Sends hostile forms to /v1/files, first one after another, then many at the same time."""
    with tempfile.TemporaryDirectory(dir=target.folder) as name:
        async with watched_server(target, Path(name)) as watched:
            began, rng = time.monotonic(), target.rng()
            for number in range(target.num_each):
                what = await send_form(watched, rng, f"{target.label}/{number}", _FORM_BYTES)
                if not await watched.check(what) or time.monotonic() - began > _BUDGET_S:
                    return
            crowd = [
                send_form(watched, target.rng(n), f"{target.label} client {n}", _FORM_BYTES)
                for n in range(_NUM_CLIENTS)
            ]
            await asyncio.gather(*crowd)
            await watched.check(f"{_NUM_CLIENTS} forms at the same time")


async def send_form(watched: Watched, rng: random.Random, label: str, size: int) -> str:
    """Sends a form drawn from `rng`, and returns a description of the form."""
    kind, lines, pieces, manner = drawn_form(rng, size)
    what = f"form {label} ({kind})"
    talk = await watched.talk(what, [head(lines, ATTACKER), *pieces], manner)
    if manner.expects != "rude":
        watched.judge(what, talk.first, talk.end)
    return what


async def hub(target: Target) -> None:
    """Pulls models from a hostile hub as the operator, and names other models in a client's
    chat.
    """
    with tempfile.TemporaryDirectory(dir=target.folder) as name:
        cache = Path(name) / "far" / "below" / "hub"
        async with hostile_hub(target.label) as lying:
            variables = {"HF_ENDPOINT": lying.url, "HF_HOME": str(cache), "HF_TOKEN": ""}
            named = [f"--model=named-{n}=evil/named-{n}" for n in range(target.num_each // 2)]
            async with watched_server(target, Path(name), *named, environment=variables) as watched:
                began = time.monotonic()
                for number in range(target.num_each):
                    repo = f"evil/pulled-{number}"
                    await _pull(watched, repo, f"pull {target.label}/{repo}")
                    if number % 2:
                        repo = f"evil/named-{number // 2}"
                        call = chat(repo.removeprefix("evil/"))
                        await watched.ask(f"chat {target.label}/{repo}", call, _LOAD_S)
                    what = f"{target.label}/{repo} ({lying.said.get(repo, 'never asked')})"
                    if outside := escaped(Path(name)):
                        watched.fail(f"{what}: files outside the cache: {outside[:3]}")
                    if not await watched.check(what) or time.monotonic() - began > _BUDGET_S:
                        break
                await watched.restart()


async def _pull(watched: Watched, repo: str, what: str) -> None:
    """Starts a download, stops it after a while, and in half of the cases deletes the model."""
    body = b'{"model":"%s"}' % repo.encode()
    await watched.ask(what, post("/models", body, *OPERATOR), _LOAD_S)
    await asyncio.sleep(_PULL_S)
    await watched.ask(f"stop {what}", post("/models/unload", body, *OPERATOR), _LOAD_S)
    # The next start of the server finds the models that were not deleted.
    if random.Random(what).random() < 0.5:
        call = Call("DELETE", f"/models?model={quote(repo, safe='')}", headers=OPERATOR)
        await watched.ask(f"forget {what}", call, _LOAD_S)


def _contained(attack: Attack) -> Attack:
    async def run(target: Target) -> None:
        # The failed start has been reported already.
        with contextlib.suppress(NotStarted):
            await attack(target)

    return run


HOSTILE = {f"hostile-{it.__name__}": _contained(it) for it in (folders, adapters, forms, hub)}
