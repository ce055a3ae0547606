"""Tests that Codex runs a tool of an MCP server and sends its result back."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents import mcp_server
from tests.agents.agents import CODEX_WITH_CATALOG, Workspace, check
from tests.agents.conftest import WITHIN_S, Site

NAMESPACE = "mcp__places"
CALL = {"name": mcp_server.TOOL["name"], "arguments": {"thing": "wheel"}}


class Forcing(ThreadingHTTPServer):
    """A proxy that forces a tool call in the first turn and a short answer in the second one.

    The model is too small to choose the call by itself, and without a schema its answer may repeat
    a word without end.
    """

    daemon_threads = True

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.bodies = url, list[dict[str, Any]]()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Forcing

    def do_GET(self) -> None:
        self._pass_on(b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.server.bodies:
            choice = {"type": "function", "namespace": NAMESPACE, "name": CALL["name"]}
            body["tool_choice"] = choice
        else:
            body["tool_choice"] = "none"
            schema = {"enum": ["It is behind the mill."]}
            body["text"] = {"format": {"type": "json_schema", "name": "place", "schema": schema}}
        self.server.bodies.append(body)
        self._pass_on(json.dumps(body).encode())

    def _pass_on(self, content: bytes) -> None:
        kept = ("accept", "authorization", "content-type", "user-agent")
        headers = {name: self.headers[name] for name in kept if name in self.headers}
        url = self.server.target + self.path
        with httpx.stream(
            self.command, url, content=content, headers=headers, timeout=WITHIN_S
        ) as answer:
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers["content-type"])
            self.end_headers()
            for piece in answer.iter_bytes():
                self.wfile.write(piece)
                self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def forcing(site: Site) -> Iterator[Forcing]:
    site.start()
    proxy = Forcing(site.wire.url)
    yield proxy
    proxy.shutdown()


def test_codex_runs_a_tool_of_an_mcp_server(agents: None, forcing: Forcing, tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def settings(url: str, home: Path) -> dict[str, str]:
        made = CODEX_WITH_CATALOG.settings(url, home)
        command, words = json.dumps(sys.executable), json.dumps([mcp_server.__file__, str(calls)])
        with (Path(made["CODEX_HOME"]) / "config.toml").open("a") as file:
            file.write(f"[mcp_servers.places]\ncommand = {command}\nargs = {words}\n")
        return made

    codex = CODEX_WITH_CATALOG._replace(name="Codex with MCP", settings=settings)
    turn = Workspace(tmp_path, forcing.url, WITHIN_S).ask(codex, "Where is the wheel?")
    check(codex, turn)
    assert [json.loads(line) for line in calls.read_text().splitlines()] == [CALL]
    sent = {item["type"]: item for item in forcing.bodies[1]["input"]}
    call, output = sent["function_call"], sent["function_call_output"]
    assert (call["namespace"], call["name"]) == (NAMESPACE, CALL["name"])
    assert output["call_id"] == call["call_id"] and mcp_server.ANSWER in json.dumps(output)
