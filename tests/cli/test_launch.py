"""`headrace launch` with programs in place of the agents, which record how they were started."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from headrace.cli.launch import as_script, choose, refuse_short_context, warn
from headrace.cli.launch_clients import CLIENTS, Model
from headrace.cli.main import cli
from headrace_common.errors import HeadraceError
from tests.cli.conftest import KEY
from tests.client.builders import Given, listed_server
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess

# Writes its arguments, its environment and the files of its flags, and ends with code 7.
AGENT = f"""#!{sys.executable}
import json, os, pathlib, re, sys
paths = [path for word in sys.argv for path in re.findall(r'/[^ "]+/launch/[^ "]+', word)]
files = {{path: pathlib.Path(path).read_text() for path in paths}}
folders = {{oct(pathlib.Path(path).parent.stat().st_mode) for path in paths}}
seen = [sys.argv[1:], dict(os.environ), files, list(folders)]
pathlib.Path(os.environ["SEEN"]).write_text(json.dumps(seen))
sys.exit(7)
"""
MODEL = Model("http://127.0.0.1:1", "tiny", 8192)


def program(folder: Path, name: str, text: str = AGENT) -> None:
    file = folder / name
    file.write_text(text)
    file.chmod(0o755)


def environment(folder: Path, **more: str) -> dict[str, str]:
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "SEEN": str(folder / "seen.json")}
    own |= {"XDG_CACHE_HOME": str(folder / "cache"), "HEADRACE_API_KEY": KEY}
    return {**os.environ, **own, **more}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "headrace", "launch", *words]


@pytest.mark.parametrize("name", CLIENTS)
def test_each_agent_gets_the_server_the_model_and_the_key_and_its_exit_code_is_passed_on(
    name: str, tmp_path: Path
) -> None:
    program(tmp_path, name)
    entry = {"id": "tiny", "kind": "text", "status": {}, "context_length": 32_768}
    with listed_server(Given(body=listing(entry))) as served:
        words = command(name, "--url", served.url, "--", "-p", "a 'b'", "--", "c")
        ended = subprocess.run(words, env=environment(tmp_path), capture_output=True, text=True)
    assert ended.returncode == 7, ended.stderr
    arguments, variables, files, modes = json.loads((tmp_path / "seen.json").read_text())
    told = json.dumps([arguments, variables.get("OPENCODE_CONFIG_CONTENT"), files])
    assert served.url in told and "tiny" in told
    # Codex does not show reasoning.
    assert "return_progress" in told or name == "codex"
    assert KEY not in told and variables["KEY_FOR_HEADRACE"] == KEY
    assert arguments[-4:] == ["-p", "a 'b'", "--", "c"]
    assert all(mode == "0o40700" for mode in modes)
    assert not any((tmp_path / "cache" / "headrace" / "launch").iterdir())


@pytest.mark.parametrize("name", CLIENTS)
def test_a_shell_that_runs_the_printed_lines_starts_the_agent_in_the_same_way(
    name: str, keyed: ServerProcess, tmp_path: Path
) -> None:
    program(tmp_path, name)
    words = command(name, "tiny", "--url", keyed.url, "--print", "--", "a 'b'\n$c")
    variables = environment(tmp_path)
    printed = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    assert KEY not in printed.stdout
    ended = subprocess.run(["sh", "-c", printed.stdout], env=variables)
    assert ended.returncode == 7
    arguments, seen, *_ = json.loads((tmp_path / "seen.json").read_text())
    assert arguments[-1] == "a 'b'\n$c" and seen["KEY_FOR_HEADRACE"] == KEY


def test_a_private_server_ends_with_the_agent_which_gets_the_signals(
    folder: Path, tmp_path: Path
) -> None:
    trap = "#!/bin/sh\ntrap 'exit 9' TERM\n"
    end = 'mv "$SEEN.new" "$SEEN"\nwhile :; do sleep 0.1; done\n'
    program(tmp_path, "pi", f'{trap}cat "$2" > "$SEEN.new"\n{end}')
    variables = environment(tmp_path, HEADRACE_THREADS="1")
    # An empty cache would have no compiled kernels.
    del variables["XDG_CACHE_HOME"]
    launched = subprocess.Popen(command("pi", str(folder)), env=variables)
    try:
        eventually((tmp_path / "seen.json").exists, within_s=60)
        url = re.search(r'"baseUrl": "(.+)/v1"', (tmp_path / "seen.json").read_text())
        assert url is not None
        health = f"{url[1]}/health"
        assert httpx.get(health).is_success
        launched.send_signal(signal.SIGINT)  # belongs to the agent alone
        launched.send_signal(signal.SIGTERM)
        assert launched.wait(60) == 9
    finally:
        launched.kill()
    with pytest.raises(httpx.ConnectError):
        httpx.get(health)


RUN_WITH_THREAD = """
import os, signal, sys, threading
from headrace.cli.launch import _run

def receive():
    open(sys.argv[1]).read()  # a named pipe: waits for the agent
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    threading.Event().wait()

threading.Thread(target=receive, daemon=True).start()
agent = "trap 'exit 9' TERM; echo ready > $1; while :; do sleep 0.1; done"
raise SystemExit(_run(["sh", "-c", agent, "agent", sys.argv[1]], os.environ))
"""


def test_a_signal_that_another_thread_receives_reaches_the_agent(tmp_path: Path) -> None:
    """On a busy machine, the second of two signals may go to any thread."""
    os.mkfifo(tmp_path / "ready")
    launched = subprocess.Popen(
        [sys.executable, "-c", RUN_WITH_THREAD, str(tmp_path / "ready")], start_new_session=True
    )
    try:
        assert launched.wait(60) == 9
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launched.pid, signal.SIGKILL)


RUN_IMPATIENTLY = """
import os, sys
from headrace.cli import launch

launch._PATIENCE_S = 0.2
agent = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
raise SystemExit(launch._run(["sh", "-c", agent], os.environ))
"""


def test_an_agent_that_ignores_sigterm_is_killed() -> None:
    launched = subprocess.Popen(
        [sys.executable, "-c", RUN_IMPATIENTLY], start_new_session=True, stdout=subprocess.PIPE
    )
    try:
        assert launched.stdout and launched.stdout.readline() == b"ready\n"
        launched.terminate()
        assert launched.wait(60) == 128 + signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launched.pid, signal.SIGKILL)


def test_without_an_agent_each_is_listed_and_a_missing_one_names_its_package(
    tmp_path: Path,
) -> None:
    program(tmp_path, "pi")
    run = CliRunner(env={"PATH": str(tmp_path)})
    rows = run.invoke(cli, ["launch"]).output.splitlines()
    assert len(rows) == len(CLIENTS)
    assert rows[0].endswith("not installed: npm install -g @anthropic-ai/claude-code")
    assert rows[-1].endswith(str(tmp_path / "pi"))
    with pytest.raises(HeadraceError, match="npm install -g @openai/codex"):
        raise run.invoke(cli, ["launch", "codex"]).exception or AssertionError
    with pytest.raises(HeadraceError, match="No server answers"):
        refused = run.invoke(cli, ["launch", "pi", "tiny", "--url", "http://127.0.0.1:1"])
        raise refused.exception or AssertionError


def listing(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"data": entries}).encode()


def test_the_named_model_is_chosen_or_the_first_that_is_loaded_and_can_chat() -> None:
    vectors = {"id": "vectors", "kind": "embedding", "status": {"value": "loaded"}}
    later = {"id": "later", "kind": None, "status": {"value": "unloaded"}}
    sees = {"input_modalities": ["text", "image"]}
    chats = {"id": "a/b:Q4", "kind": "text", "status": {"value": "loaded"}, "architecture": sees}
    body = listing(vectors, later, {**chats, "context_length": 4096})
    assert choose(body, "u", None) == Model("u", "a/b:Q4", 4096, ("text", "image"))
    assert choose(body, "u", "later") == Model("u", "later")
    with pytest.raises(HeadraceError, match="no model vectors; it has: later, a/b:Q4"):
        choose(body, "u", "vectors")


@pytest.mark.parametrize("name", ["{file:/etc/passwd}", "$HOME", "!ls", "--x", "a\nb", "", "a'b"])
def test_names_that_an_agent_would_expand_are_refused(name: str) -> None:
    with pytest.raises(HeadraceError, match="no model"):
        choose(listing({"id": name, "kind": "text"}), "u", None)


@pytest.mark.parametrize("body", [b"[]", b'{"data": 1}', b'{"data": [{"id": 1}]}', b"<html>"])
def test_a_list_of_another_program_is_an_error(body: bytes) -> None:
    with pytest.raises(HeadraceError, match="no list of models in Headrace's format"):
        choose(body, "u", None)


def test_an_agent_does_not_start_if_its_first_prompt_exceeds_the_context() -> None:
    with pytest.raises(HeadraceError, match=r"12,200 .* 8,192.*launch pi`, which sends 1,300"):
        refuse_short_context(CLIENTS["claude"], MODEL)
    with pytest.raises(HeadraceError, match="raise --max-model-len"):
        refuse_short_context(CLIENTS["claude"], MODEL._replace(longest_context=40_960))
    with pytest.raises(HeadraceError, match=r"such as qwen3-4b, or use `headrace launch pi`"):
        refuse_short_context(CLIENTS["claude"], MODEL._replace(longest_context=8192))
    refuse_short_context(CLIENTS["claude"], MODEL._replace(context=12_200))
    refuse_short_context(CLIENTS["claude"], MODEL._replace(context=None))


def test_a_context_that_is_too_short_is_refused_before_the_model_loads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cli.launch._running", lambda *_: None)
    monkeypatch.setattr("shutil.which", lambda name: name)

    def load(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("headrace.cli.launch.private_server", load)
    run = CliRunner(env={"HEADRACE_MAX_MODEL_LEN": "100"})
    refused = run.invoke(cli, ["launch", "pi", str(folder)]).exception
    assert isinstance(refused, HeadraceError), refused
    assert re.search(r"1,300 tokens .* takes 100\. .*raise --max-model-len", str(refused))


def test_little_room_and_a_small_model_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert warn(CLIENTS["claude"], MODEL._replace(name="headrace-mini", context=14_000))
    small, short = capsys.readouterr().err.splitlines()
    assert "12,200 tokens" in short and "only 1,800 are left" in short and "too small" in small
    assert warn(CLIENTS["claude"], MODEL)
    assert "which is too short; use a model" in capsys.readouterr().err
    # pi leaves 4,096 tokens free.
    assert warn(CLIENTS["pi"], MODEL._replace(context=5_000))
    capsys.readouterr()
    assert not warn(CLIENTS["pi"], MODEL)
    assert not warn(CLIENTS["claude"], MODEL._replace(context=16_384))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", CLIENTS)
def test_a_context_that_is_not_known_is_left_out(name: str, tmp_path: Path) -> None:
    setup = CLIENTS[name].setup(MODEL._replace(context=None), tmp_path)
    script = as_script(name, setup, (), has_key=False)
    assert "None" not in script and "CONTEXT" not in script and "null" not in script
