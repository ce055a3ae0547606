"""Operators: they load, download, replace and delete models, and restart the server."""

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from detangle import choice, flip, randint, uniform

from stress.simulated_server.downloads import HUB_MODELS
from stress.simulated_server.http import Broken, connect
from stress.simulated_server.server import SimServer

if TYPE_CHECKING:
    from stress.simulated_server.fleet_world import FleetWorld

ADMIN_KEY = "admin"
ANSWER_S = 120.0
"""The virtual time within which a management request is answered, even if the disk stalls."""

Tables = list[dict[str, Any]]


class Asked:
    """The state that operators asked for. There are several if an answer was lost."""

    def __init__(self) -> None:
        self.has_no_document = True
        self.documents: list[Tables] = []
        # The allowed states of each download.
        self.pulls: dict[str, set[str]] = {}
        # The deleted models, each with the server that deleted the model.
        self.deleted: dict[str, SimServer] = {}
        # The requests per minute of a key, by the name of the server process.
        self.request_limits: dict[str, int | None] = {}


async def call(
    world: "FleetWorld", method: str, target: str, body: Any = None, key: str = ADMIN_KEY
) -> tuple[int, Any]:
    """Send a request and return the status and the JSON of the answer."""
    connection = connect(world.server, method, target, {"authorization": f"Bearer {key}"}, body)
    try:
        async with asyncio.timeout(ANSWER_S):
            data = await connection.read()
    except TimeoutError:
        raise AssertionError(f"{method} {target}: no answer for {ANSWER_S:g} s") from None
    return connection.status, json.loads(data) if data else None


async def call_until_answered(
    world: "FleetWorld", method: str, target: str, body: Any = None
) -> tuple[int, Any]:
    """Repeat a request while the server is busy."""
    for _ in range(60):
        status, answer = await call(world, method, target, body)
        if status not in (429, 503):
            break
        await asyncio.sleep(1.0)
    return status, answer


def check_status(world: "FleetWorld", what: str, status: int, body: Any) -> bool:
    """Return whether an operation succeeded; an operation may only fail for a known reason."""
    world.tell(f"operator: {what}: {status} {'' if status == 200 else body}")
    if status == 200:
        world.faults.note(f"operator: {what.partition(' ')[0]}")
        return True
    code = body["error"]["code"]
    is_busy = status in (429, 503)
    assert is_busy or world.may_fail(code), f"{what}: {status} {body}"
    return False


async def loads_and_unloads(world: "FleetWorld") -> None:
    for _ in range(randint(0, 8)):
        await asyncio.sleep(uniform(0.0, 10.0))
        name, route = choice(("a", "b", "c", "d", "far/one")), choice(("load", "unload"))
        # Unloading a model of the hub also stops its download (see `_stop`).
        route = "load" if name in HUB_MODELS else route
        try:
            status, body = await call(world, "POST", f"/models/{route}", {"model": name})
        except Broken:
            continue
        code = body.get("error", {}).get("code")
        if code == "model_not_found" and world.may_be_missing(name):
            world.faults.note("operator: names an unknown model")
        elif not (code == "unsupported_operation" and route == "unload"):
            check_status(world, f"{route}s {name}", status, body)


async def puts_documents(world: "FleetWorld") -> None:
    """Replace the list of models."""
    for _ in range(randint(0, 4)):
        await asyncio.sleep(uniform(0.0, 20.0))
        tables = world.tables()
        # A lost answer leaves open which document is stored.
        before, world.asked.documents = world.asked.documents, [*world.asked.documents, tables]
        try:
            status, body = await call(world, "PUT", "/manage/desired", {"models": tables})
        except Broken:
            continue
        if status == 400 and body["error"]["code"] == "unsupported_operation":
            world.asked.documents = before
        elif check_status(
            world, f"puts {[it['served_model_name'][0] for it in tables]}", status, body
        ):
            world.asked.documents, world.asked.has_no_document = [tables], False
            world.faults.note("operator: models replaced")
        elif "may undo the change" in body["error"]["message"]:
            world.asked.has_no_document = False
        else:
            world.asked.documents = before


async def pulls(world: "FleetWorld") -> None:
    """Download, stop and delete models."""
    for _ in range(randint(0, 8)):
        await asyncio.sleep(uniform(0.0, 12.0))
        known = [it for it in HUB_MODELS if world.asked.pulls.get(it, {"absent"}) != {"absent"}]
        if known and flip(0.5):
            await choice((_stop, _delete, _stop_and_pull))(world, choice(known))
        else:
            await choice((_pull, _pull, _stop, _delete))(world, choice(HUB_MODELS))
        world.check_downloads()


ANY = {"downloading", "stopped", "failed", "here", "absent"}


async def _pull(world: "FleetWorld", model: str) -> None:
    before = world.asked.pulls.get(model, {"absent"})
    world.asked.pulls[model] = before | {"downloading", "failed", "here"}
    try:
        status, body = await call(world, "POST", "/models", {"model": model})
    except Broken:
        return
    code = body.get("error", {}).get("code", "")
    if code.startswith("download_"):
        world.faults.note("operator: download failed")
        world.asked.pulls[model] = {"failed"}
    elif check_status(world, f"pulls {model}", status, body):
        world.asked.pulls[model] = {"downloading", "failed", "here"}


async def _stop(world: "FleetWorld", model: str) -> None:
    before = world.asked.pulls.get(model, {"absent"})
    world.asked.pulls[model] = before | {"stopped"}
    try:
        status, body = await call(world, "POST", "/models/unload", {"model": model})
    except Broken:
        return
    if status == 404:
        assert "absent" in before, f"{model} is unknown"
        world.asked.pulls[model] = {"absent"}
    elif check_status(world, f"stops {model}", status, body):
        world.asked.pulls[model] = {"stopped", "failed", "here"}


async def _stop_and_pull(world: "FleetWorld", model: str) -> None:
    """Send two stops of a download at the same time, and start it again meanwhile."""
    before = world.asked.pulls.get(model, {"absent"})
    world.asked.pulls[model] = before | {"stopped"}

    async def stop() -> None:
        with contextlib.suppress(Broken):
            await call(world, "POST", "/models/unload", {"model": model})

    stopping = [asyncio.create_task(stop()) for _ in range(2)]
    await asyncio.wait(stopping, return_when=asyncio.FIRST_COMPLETED)
    await _pull(world, model)
    world.asked.pulls[model] |= {"stopped"}
    await asyncio.gather(*stopping)
    for _ in range(3):
        await asyncio.sleep(uniform(0.0, 0.5))
        world.check_downloads()


async def _delete(world: "FleetWorld", model: str) -> None:
    """Delete a model, sometimes with two requests at the same time."""
    before = world.asked.pulls.get(model, {"absent"})
    world.asked.pulls[model] = before | {"absent"}
    server = world.server
    both = [call(world, "DELETE", f"/models?model={model}") for _ in range(choice((1, 1, 2)))]
    answers = await asyncio.gather(*both, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, Broken):
            return
        if isinstance(answer, BaseException):
            raise answer
    # One of two deletions may come too late.
    status, body = min(
        (it for it in answers if not isinstance(it, BaseException)), key=lambda it: it[0]
    )
    for later, why in (it for it in answers if not isinstance(it, BaseException)):
        assert later != 500 or world.may_fail(why["error"]["code"]), f"deletes {model}: {why}"
    if status == 404:
        assert "absent" in before, f"{model} is unknown"
        world.asked.pulls[model] = {"absent"}
    elif check_status(world, f"deletes {model}", status, body):
        assert server is not None
        world.asked.pulls[model] = {"absent"}
        world.asked.deleted[model] = server


async def drains(world: "FleetWorld") -> None:
    """Stop admitting requests for a while."""
    for _ in range(randint(0, 2)):
        await asyncio.sleep(uniform(0.0, 30.0))
        for method in ("POST", "DELETE"):
            try:
                status, body = await call(world, method, "/manage/drain")
                check_status(world, f"drains ({method})", status, body)
            except Broken:
                break
            await asyncio.sleep(uniform(0.0, 8.0))


async def replaces_engines(world: "FleetWorld") -> None:
    """Replace an engine of a model with several engines."""
    for _ in range(randint(0, 5)):
        await asyncio.sleep(uniform(0.0, 10.0))
        try:
            _, state = await call(world, "GET", "/manage/state")
            found = [
                (shown["model"], it["number"])
                for shown in state.get("models", [state])
                for it in shown["replicas"]
            ]
            if found:
                name, number = choice(found)
                target = f"/manage/replicas/replace?model={name}&replica={number}"
                status, body = await call(world, "POST", target)
                # The engine may have ended meanwhile.
                if status not in (400, 404):
                    check_status(world, f"replaces-engine {number} of {name}", status, body)
        except Broken:
            continue


async def changes_keys(world: "FleetWorld") -> None:
    """Remove a key for a while, as SIGHUP does."""
    if not world.keys:
        return
    for _ in range(randint(0, 2)):
        await asyncio.sleep(uniform(0.0, 20.0))
        for keys in (world.keys[:-1], world.keys):
            world.write_keys(keys)
            if world.is_up and world.server is not None:
                world.server.auth.reload()
            world.faults.note("operator: reloads keys")
            await asyncio.sleep(uniform(0.0, 10.0))


async def restarts(world: "FleetWorld") -> None:
    """Kill, stop and restart the server, sometimes with other settings; revive a dead server."""
    num_left = randint(0, 4)
    while True:
        server = world.server
        assert server is not None
        world.asked.request_limits[server.process.name] = (
            server.config.streams.key_requests_per_minute
        )
        try:
            async with asyncio.timeout(uniform(0.0, 30.0) if num_left else None):
                await server.has_ended.wait()
            # The engine of the only model may have been given up, but no other part may fail.
            server.task.result()
            world.faults.note("server: ended by itself")
        except TimeoutError:
            num_left -= 1
            await _end(world, server)
        await asyncio.sleep(uniform(0.0, 5.0))
        if flip(0.4):
            world.change_settings()
        world.machine.start()


async def _end(world: "FleetWorld", server: SimServer) -> None:
    if flip(0.5):
        world.faults.note("server: killed")
        world.machine.kill()
        return
    world.faults.note("server: stopped")
    server.stop()
    world.is_stopping = True
    await world.ended(server)
    world.is_stopping = False


OPERATORS = (
    loads_and_unloads,
    puts_documents,
    pulls,
    drains,
    replaces_engines,
    changes_keys,
    restarts,
)
