"""Every exit code of the command, and the one line that comes with it."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import make_tiny_model

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def headrace(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
        env=ENVIRONMENT | variables,
    )


def test_help_has_examples_and_ends_well() -> None:
    for verb in ("serve", "chat", "generate", "doctor"):
        shown = headrace(verb, "--help")
        assert shown.returncode == 0
        assert f"headrace {verb}" in shown.stdout.split("Usage", 1)[1].split("\n", 1)[1]


@pytest.mark.parametrize(
    ("words", "variables", "line"),
    [
        (("serve", "--prot", "1"), {}, "--port"),
        (("serve", "--port", "many"), {}, "--port: Expected int"),
        (("serve", "--config", "nowhere.toml"), {}, "Cannot read nowhere.toml"),
        (("serve",), {"HEADRACE_MAX_NUM_SEQ": "4"}, "did you mean HEADRACE_MAX_NUM_SEQS?"),
        (("generate", "a", "b", "c"), {}, "3 words are too many"),
        (("generate", "hi", "-o", "temprature=1"), {}, "did you mean temperature?"),
        (("generate", "hi", "-o", "temperature"), {}, "field=value"),
        (("serves",), {}, "serves"),
    ],
)
def test_a_wrong_flag_variable_or_file_is_2(
    words: tuple[str, ...], variables: dict[str, str], line: str
) -> None:
    ended = headrace(*words, **variables)
    assert ended.returncode == 2
    assert line in ended.stderr and len(ended.stderr.splitlines()) == 1, ended.stderr


def test_a_model_that_cannot_be_served_is_3(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["A"], "vocab_size": 5}')
    (tmp_path / "pytorch_model.bin").touch()
    for words in (("serve", str(tmp_path), "--port", "0"), ("generate", str(tmp_path), "hi")):
        ended = headrace(*words, XDG_STATE_HOME=str(tmp_path))
        assert ended.returncode == 3
        assert "pickled weights only" in ended.stderr
        assert len(ended.stderr.splitlines()) == 1


def test_a_port_in_use_is_5() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = headrace("serve", "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 5
    assert "is in use" in ended.stderr


def test_ctrl_c_is_130(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    command = [sys.executable, "-m", "headrace", "generate", str(folder), "hi", "--threads", "1"]
    fields = ["-o", "max_tokens=2000", "-o", "ignore_eos=true"]
    with subprocess.Popen(
        [*command, *fields, "--max-step-tokens", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        # a background job of a shell would pass on that it ignores Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:
        assert running.stdout is not None
        running.stdout.read(1)  # it generates
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=250) == 130
