"""A model hub on loopback that gives false, endless, circular or incomplete answers.

A seed decides how each answer is wrong.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from headrace_common.checkpoints.find import MINI, find_model
from stress.attack.hostile_json import dumped, hostile_value, spoil
from stress.attack.hostile_texts import raw_documents

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_ROUTE = re.compile(
    r"/(?:api/models/)?(?P<repo>[^/]+/[^/]+?)"
    r"(?:/(?P<kind>revision|tree|resolve)/(?P<revision>[^/]+)(?:/(?P<file>.+))?)?"
)
_ENDLESS = b"10000\r\n" + b"[" * 65_536 + b"\r\n"
_NAMES = (
    *("../../../escaped.safetensors", "/tmp/escaped.json", "a/../../../escaped.json", "..", "."),
    *(
        "\0.json",
        "a\nb.json",
        "😀.json",
        "x" * 5000 + ".json",
        "C:\\escaped.json",
        "~/escaped.json",
    ),
    *("config.json/escaped.json", "%2e%2e/%2e%2e/escaped.json", "\ud800.json", ""),
)
_ETAGS = (
    '"../../../../escaped"',
    '"/tmp/escaped"',
    '""',
    '"."',
    '"' + "a" * 60_000 + '"',
    "W/x",
    "\xff",
)
_SIZES = (0, -1, 1, 2**31, 2**62, 2**64, 1.5, "5", None, 10**400)


class Reply:
    """An answer to send. If `is_endless` is set, `body` is sent again and again."""

    def __init__(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.status = status
        self.body = body
        self.headers = {"Content-Length": str(len(body)), **(headers or {})}
        self.is_endless = False
        self.pause_s = 0.0
        # How many bytes are sent before the connection is reset.
        self.sends = len(body)

    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} Odd", *(f"{k}: {v}" for k, v in self.headers.items())]
        return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1", "replace")


class HostileHub:
    """A hub whose answers are wrong in a way that depends on the repository's name.

    `said` maps each requested repository to the name of the fault in its answers.
    """

    def __init__(self, label: str) -> None:
        self.said: dict[str, str] = {}
        self.url = ""
        self._label = label
        self._files = {it.name: it.read_bytes() for it in find_model(MINI).iterdir()}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raw = await reader.readuntil(b"\r\n\r\n")
            method, path, _ = raw.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
            reply = self._reply(method, path.split("?")[0])
            await _send(writer, reply, method)
        writer.transport.abort()

    def _reply(self, method: str, path: str) -> Reply:
        found = _ROUTE.fullmatch(path)
        if found is None:
            return Reply(404, b"{}")
        repo, kind = found["repo"], found["kind"]
        rng = random.Random(f"{self._label}/{repo}")
        lie = rng.choice(tuple(_LIES))
        self.said[repo] = lie
        name = unquote(found["file"] or "")
        if kind == "resolve":
            reply = self._file(name)
        elif kind == "tree":
            reply = Reply(200, dumped([_entry(one, self._files[one]) for one in self._files]))
        else:
            reply = Reply(200, dumped(_info(repo, self._files)))
        return _LIES[lie](reply, kind or "info", path, rng)

    def _file(self, name: str) -> Reply:
        content = self._files.get(name, b"" if name.endswith(".gguf") else b"{}")
        digest = hashlib.sha256(content).hexdigest()
        return Reply(200, content, {"ETag": f'"{digest}"', "X-Repo-Commit": _COMMIT})


async def _send(writer: asyncio.StreamWriter, reply: Reply, method: str) -> None:
    writer.write(reply.head())
    await writer.drain()
    if method == "HEAD":
        return
    while reply.is_endless:
        writer.write(reply.body)
        await writer.drain()
    if reply.pause_s:
        for at in range(0, reply.sends, 100):
            writer.write(reply.body[at : at + 100])
            await writer.drain()
            await asyncio.sleep(reply.pause_s)
        return
    writer.write(reply.body[: reply.sends])
    await writer.drain()


def _info(repo: str, files: dict[str, bytes]) -> dict[str, Any]:
    siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
    about = {"_id": "1", "id": repo, "modelId": repo, "sha": _COMMIT, "tags": []}
    return {**about, "siblings": siblings}


def _entry(name: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha256(content).hexdigest()
    return {"type": "file", "oid": oid, "size": len(content), "path": name}


def _listed(names: list[str], size: Any = 2) -> Callable[[Reply, str], Reply]:
    """Return a fault: a function that adds these names to the list of files in an answer."""

    def change(reply: Reply, kind: str) -> Reply:
        if kind == "resolve":
            return reply
        document = json.loads(reply.body)
        if kind == "tree":
            document += [
                {"type": "file", "oid": "0" * 40, "size": size, "path": name} for name in names
            ]
        else:
            document["siblings"] += [{"rfilename": name, "size": size} for name in names]
        return Reply(reply.status, dumped(document))

    return change


def _many_names(reply: Reply, kind: str, path: str, rng: random.Random) -> Reply:
    ending = rng.choice((".gguf", ".gguf", ".json", ".safetensors"))
    # Only GGUF files are listed, so that a request must choose one.
    if ending == ".gguf" and kind == "info":
        reply.body = reply.body.replace(b".safetensors", b".other")
    names = [f"{n}-{'x' * 195}-Q{n % 90}{ending}" for n in range(rng.choice((800, 20_000)))]
    return _listed(names)(reply, kind)


def _odd_names(reply: Reply, kind: str, path: str, rng: random.Random) -> Reply:
    return _listed(rng.sample(_NAMES, 3), rng.choice((2, 0)))(reply, kind)


def _lying_sizes(reply: Reply, kind: str, path: str, rng: random.Random) -> Reply:
    if kind == "resolve":
        reply.headers["Content-Length"] = str(rng.choice((0, 2**40, len(reply.body) * 2, "a", -1)))
        return reply
    document = json.loads(reply.body)
    for file in document["siblings"] if kind == "info" else document:
        file["size"] = rng.choice(_SIZES)
    return Reply(200, dumped(document))


def _odd_etags(reply: Reply, kind: str, path: str, rng: random.Random) -> Reply:
    if kind == "resolve":
        reply.headers["ETag"] = rng.choice(_ETAGS)
        if rng.random() < 0.3:
            reply.headers["X-Repo-Commit"] = rng.choice(("../../../escaped", "", "a" * 5000))
    return reply


def _circle(reply: Reply, kind: str, path: str, rng: random.Random) -> Reply:
    if rng.random() < 0.3 and kind != "resolve":
        return reply
    targets = (
        path,
        path + "/",
        "//127.0.0.1:1/",
        "/etc/passwd",
        "file:///etc/passwd",
        "a" * 60_000,
    )
    return Reply(rng.choice((301, 302, 307, 308)), b"", {"Location": rng.choice(targets)})


def _endless(reply: Reply, kind: str, path: str, rng: random.Random) -> Reply:
    if kind == rng.choice(("info", "tree", "resolve")):
        reply.is_endless, reply.body = True, _ENDLESS
        del reply.headers["Content-Length"]
        reply.headers["Transfer-Encoding"] = "chunked"
    return reply


def _other_json(reply: Reply, kind: str, path: str, rng: random.Random) -> Reply:
    if kind == "resolve":
        return reply
    if rng.random() < 0.3:
        return Reply(200, rng.choice((*raw_documents(), dumped(hostile_value(rng)))))
    document = json.loads(reply.body)
    spoil(document, rng)
    return Reply(200, dumped(document))


def _status(reply: Reply, kind: str, path: str, rng: random.Random) -> Reply:
    odd = Reply(
        rng.choice((204, 400, 401, 403, 404, 418, 429, 500, 502, 503, 999)),
        rng.choice((b"", b"{}", b"<html>" * 10_000, b'{"error":"/root/secret"}')),
        {"Retry-After": rng.choice(("0", "1000000000", "x", "-1"))},
    )
    return odd if kind == rng.choice(("info", "resolve")) else reply


def _huge_headers(reply: Reply, kind: str, path: str, rng: random.Random) -> Reply:
    many = {f"X-{n}": "a" * 100 for n in range(20_000)}
    reply.headers |= rng.choice(
        (many, {"X-Long": "a" * 10_000_000}, {"X-Error-Message": "a" * 90_000})
    )
    return reply


def _other_content(reply: Reply, kind: str, path: str, rng: random.Random) -> Reply:
    if kind == "resolve":
        body = rng.choice((bytes(len(reply.body)), reply.body[:-1] + b"!", hostile_bytes(rng)))
        headers = {key: value for key, value in reply.headers.items() if key != "Content-Length"}
        return Reply(200, body, headers)
    return reply


def hostile_bytes(rng: random.Random) -> bytes:
    return rng.choice((*raw_documents(), rng.randbytes(10_000)))


def _breaks_off(reply: Reply, kind: str, path: str, rng: random.Random) -> Reply:
    if kind == rng.choice(("info", "resolve", "resolve")):
        reply.sends = rng.randrange(len(reply.body) + 1)
    return reply


def _drips(reply: Reply, kind: str, path: str, rng: random.Random) -> Reply:
    if kind == rng.choice(("info", "resolve")):
        reply.pause_s = 1.0
    return reply


_LIES: dict[str, Callable[[Reply, str, str, random.Random], Reply]] = {
    "many names": _many_names,
    "odd names": _odd_names,
    "lying sizes": _lying_sizes,
    "odd etags": _odd_etags,
    "circle": _circle,
    "endless": _endless,
    "other JSON": _other_json,
    "status": _status,
    "huge headers": _huge_headers,
    "other content": _other_content,
    "breaks off": _breaks_off,
    "drips": _drips,
}


@contextlib.asynccontextmanager
async def hostile_hub(label: str) -> AsyncIterator[HostileHub]:
    hub = HostileHub(label)
    server = await asyncio.start_server(hub.answer, "127.0.0.1", 0)
    hub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield hub
    finally:
        server.close()


def escaped(root: Path) -> list[str]:
    """Return the names of files that the hub's answers created outside the cache.

    All hostile file names start with "escaped".
    """
    # Unlike Path.rglob, os.walk accepts that folders vanish while it runs.
    within = [name for _, folders, files in os.walk(root) for name in (*folders, *files)]
    found = [*within, *os.listdir("/tmp"), *os.listdir("/")]
    return [name for name in found if name.startswith("escaped")]
