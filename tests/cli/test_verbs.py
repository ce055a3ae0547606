"""The verbs that people know from Ollama, and the completion of words in a shell."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from headrace.cli.main import cli
from headrace.cli.models import is_served
from headrace_common.checkpoints import downloads
from headrace_common.errors import HeadraceError
from headrace_common.version import __version__
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server

COMPLETING = "import sys; sys.argv = ['headrace']; from headrace.cli.main import main; main()"


def headrace(*words: str, **variables: str) -> Result:
    return CliRunner().invoke(cli, words, "Hi", prog_name="headrace", env=variables)


@pytest.fixture(scope="module")
def two_models(folder: Path) -> Iterator[ServerProcess]:
    given = ("--model", f"one={folder}", "--model", f"two={folder}")
    with running_server(*given, "--threads", "1") as running:
        yield running


def test_ps_lists_what_is_in_memory_and_stop_unloads_it(two_models: ServerProcess) -> None:
    at = {"HEADRACE_URL": two_models.url}
    assert headrace("ps", **at).output.startswith("No model is in memory")
    body = {"model": "two", "prompt": "a", "max_tokens": 1}
    assert httpx.post(f"{two_models.url}/v1/completions", json=body, timeout=120).is_success
    _, row = headrace("ps", **at).output.splitlines()
    assert row.split()[:2] == ["two", "loaded"]
    stopped = headrace("stop", "two", **at)
    assert stopped.output == "two is unloaded as soon as its streams have ended.\n"
    eventually(lambda: headrace("ps", **at).output.startswith("No model is in memory"))
    with pytest.raises(HeadraceError, match="nosuch"):
        raise headrace("stop", "nosuch", **at).exception or AssertionError


def test_run_uses_a_server_that_has_the_model_and_answers_a_prompt(
    two_models: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.client.http.URL", two_models.url)
    assert is_served("one", "")
    assert not is_served("headrace-mini", "")
    words = ["run", "one", "Hi", "-o", "max_tokens=24", "-o", "ignore_eos=true"]
    shown = subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "HEADRACE_URL": two_models.url},
        timeout=120,
    )
    assert shown.returncode == 0 and shown.stdout.strip(), shown.stderr


def test_run_starts_a_server_of_its_own_for_a_model_that_no_server_has() -> None:
    words = ["run", "headrace-mini", "Count from 1 to 5.", "-o", "temperature=0"]
    shown = subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=300,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.split() == ["1,", "2,", "3,", "4,", "5"]


@pytest.mark.parametrize("verb", ["ps", "stop tiny", "models", "chat", "run tiny Hi"])
def test_port_is_short_for_the_url_of_a_server_on_this_machine(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ended = headrace(*verb.split(), "--port", port, HEADRACE_URL="http://127.0.0.1:1")
    assert f"127.0.0.1:{port}" in str(ended.exception)
    both = headrace(*verb.split(), "--url", "localhost:1", "--port", port)
    assert both.exit_code == 2
    assert "--port and --url both name the server; give only one of the two." in both.output


def test_stop_without_a_name_says_how_to_stop_the_server() -> None:
    ended = headrace("stop")
    assert ended.exit_code == 2
    assert "press Ctrl-C in its terminal" in " ".join(ended.output.split())


@pytest.mark.parametrize("verb", ["ls", "list"])
def test_ls_lists_what_is_downloaded(verb: str, tmp_path: Path) -> None:
    empty = {"HF_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    shown = subprocess.run(
        [sys.executable, "-m", "headrace", verb],
        capture_output=True,
        text=True,
        env={**os.environ, **empty},
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("No model is downloaded yet;")


def test_ls_as_json_lists_the_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = downloads.Downloaded("a/model", 7, 1.5, tmp_path)
    monkeypatch.setattr(downloads, "downloads", lambda: [one])
    facts = {"name": "a/model", "bytes": 7, "since": 1.5, "folder": str(tmp_path)}
    assert json.loads(headrace("ls", "--json").output) == [facts]


def test_rm_of_a_model_that_is_not_there_names_it_and_where_names_are() -> None:
    error = str(headrace("rm", "nosuch").exception)
    assert "nosuch" in error and "`headrace ls`" in error


def test_version_and_help_are_verbs_too() -> None:
    assert headrace("version").output == f"{__version__}\n"
    assert headrace("help").output == headrace("--help").output
    assert headrace("help", "models", "rm").output == headrace("models", "rm", "--help").output
    assert "There is no command 'nosuch'" in headrace("help", "nosuch").output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_asks_the_command(shell: str) -> None:
    script = headrace("completion", shell).output
    assert f"_HEADRACE_COMPLETE={shell}_complete" in script


def test_the_command_completes_verbs_flags_and_choices() -> None:
    def completed(words: str, index: int) -> list[str]:
        asked = {
            "_HEADRACE_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(index),
        }
        shown = subprocess.run(
            [sys.executable, "-c", COMPLETING],
            capture_output=True,
            text=True,
            env={**os.environ, **asked, "_HEADRACE_COMPLETE": "bash_complete"},
        )
        return [line.partition(",")[2] for line in shown.stdout.splitlines()]

    assert completed("headrace ser", 1) == ["serve"]
    assert completed("headrace serve --max-num-s", 2) == ["--max-num-seqs"]
    assert completed("headrace serve --log-format j", 3) == ["json"]
