"""Every exit code of the command, and the one line that comes with it."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from headrace.cli.main import cli, main
from tests.cli.terminal import terminal
from tools.harness.servers import running_server, said
from tools.harness.tiny_models import make_tiny_model

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
        shown = CliRunner().invoke(cli, [verb, "--help"], prog_name="headrace")
        assert shown.exit_code == 0
        assert f"headrace {verb}" in shown.output.split("Usage", 1)[1].split("\n", 1)[1]


@pytest.mark.parametrize(
    ("words", "variables", "line"),
    [
        (("serve", "--prot", "1"), {}, "--port"),
        (("serve", "--port", "many"), {}, '--port is "many"; it must be a whole number'),
        (("serve", "--config", "nowhere.toml"), {}, "Cannot read nowhere.toml"),
        (("serve",), {"HEADRACE_KEYS": "secret"}, "did you mean HEADRACE_API_KEYS?"),
        (("generate", "a", "b", "c"), {}, "3 words are too many"),
        (("embed", "./my-modle", "A wheel"), {}, "There is no model './my-modle'"),
        (("generate", "./my-modle", "A wheel"), {}, "There is no model './my-modle'"),
        (("generate", "hi", "-o", "temprature=1"), {}, "did you mean temperature?"),
        (("generate", "hi", "-o", "temperature"), {}, "field=value"),
        (("serves",), {}, "serves"),
    ],
)
def test_a_wrong_flag_variable_or_file_is_2(
    words: tuple[str, ...],
    variables: dict[str, str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", *words])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capfd.readouterr().err
    assert ended.value.code == 2
    assert line in shown and len(said(shown)) == 1, shown


@pytest.mark.parametrize("level", ["info", "debug"])
def test_the_advice_after_a_bug_works_for_every_verb(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], level: str
) -> None:
    monkeypatch.setattr(cli, "main", lambda **_: 1 / 0)
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", level)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capfd.readouterr().err
    assert ended.value.code == 1
    assert "Run the command again with HEADRACE_LOG_LEVEL=debug" in said and "--" not in said
    assert ("Traceback" in said) == (level == "debug")


def test_a_full_disk_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/models/a.part")

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capfd.readouterr().err == "headrace: /models/a.part: No space left on device.\n"


def change_config(folder: Path, **keys: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def change_weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_short(folder: Path) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(30_000)


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def with_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_bytes(b"\xff\xfe")


NORM = "model.norm.weight"
BAD_FOLDERS: dict[str, Callable[[Path], object]] = {
    "pickled weights only": only_pickled,
    "needs code from its repository": lambda folder: change_config(
        folder, architectures=["OwnLM"], model_type="own", auto_map={"AutoModel": "own.OwnLM"}
    ),
    "neither a causal language model nor an encoder": lambda folder: change_config(
        folder, architectures=["OwnLM"], model_type="own"
    ),
    "awq": lambda folder: change_config(folder, quantization_config={"quant_method": "awq"}),
    "model-00001-of-00002.safetensors": without_a_shard,
    "model.safetensors": cut_short,
    "norm": lambda folder: change_weights(folder, lambda tensors: tensors.pop(NORM)),
    "model.odd": lambda folder: change_weights(
        folder, lambda tensors: tensors.update({"model.odd": tensors[NORM].clone()})
    ),
    "[7]": lambda folder: change_weights(
        folder, lambda tensors: tensors.update({NORM: tensors[NORM][:7].clone()})
    ),
    "tokenizer.json": without_tokenizer,
    "tokenizer": with_a_broken_tokenizer,
}


# Each is a start of a server. tests/runner/test_bad_folders.py covers more of them without one.
IN_THE_SUITE = ("[7]",)


@pytest.mark.parametrize(
    "word",
    [
        pytest.param(word, marks=[] if word in IN_THE_SUITE else pytest.mark.slow)
        for word in BAD_FOLDERS
    ],
)
def test_a_model_that_cannot_be_served_is_3_and_one_line_that_names_what_is_wrong(
    word: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    BAD_FOLDERS[word](folder)
    ended = headrace("serve", str(folder), "--port", "0", XDG_STATE_HOME=str(tmp_path))
    assert ended.returncode == 3, ended.stderr
    assert word in ended.stderr and len(said(ended.stderr)) == 1, ended.stderr


def test_a_model_whose_files_take_any_amount_of_memory_is_3_within_the_limit(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    doubled = {"type": "Replace", "pattern": {"String": "a"}, "content": 200 * "a"}
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    tokenizer["decoder"] = {"type": "Sequence", "decoders": 8 * [doubled]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    ended = headrace("serve", str(folder), "--port", "0", XDG_STATE_HOME=str(tmp_path))
    assert ended.returncode == 3, ended.stderr
    assert "took more than 2048 MiB of memory; download the model again." in ended.stderr
    assert len(said(ended.stderr)) == 1


@pytest.mark.parametrize(
    ("spoil", "flags", "word"),
    [
        (only_pickled, (), "pickled weights only"),
        (lambda folder: None, ("--kv-cache-memory-bytes", "65536"), "one sequence of"),
    ],
)
def test_a_model_that_cannot_be_run_in_process_is_3_too(
    spoil: Callable[[Path], object], flags: tuple[str, ...], word: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    spoil(folder)
    ended = headrace("generate", str(folder), "hi", *flags)
    assert ended.returncode == 3, ended.stderr
    assert word in ended.stderr and len(said(ended.stderr)) == 1, ended.stderr


@pytest.mark.slow
def test_an_engine_given_up_is_4(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    with running_server(str(folder), "--threads", "1") as server:
        (folder / "model.safetensors").unlink()
        subprocess.run(["pkill", "-KILL", "-P", str(server.process.pid)], check=True)
        assert server.process.wait(timeout=100) == 4


def test_a_port_in_use_is_5() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = headrace("serve", "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 5
    assert "is in use by another program; stop it, or choose another port: --port" in ended.stderr


def test_a_port_in_use_is_reported_before_a_model_is_chosen() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        terminal("serve", "--port", str(taken.getsockname()[1])) as shown,
    ):
        assert shown.wait_until_ended() == 5
    assert "is in use" in shown.text
    assert "serving" not in shown.text and "is served" not in shown.text


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_2(host: str) -> None:
    ended = headrace("serve", "--host", host, "--port", "0")
    assert ended.returncode == 2
    (line,) = said(ended.stderr)
    assert line.startswith(f"headrace: --host: {host} cannot be used (")
    assert "127.0.0.1" in line


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
