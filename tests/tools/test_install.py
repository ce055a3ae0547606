"""`tools/install.py` says what pip does, and shows errors of pip, and warnings if it fails."""

import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools.install import Progress, Screen, index_options, pip_command, run

# Lines of pip 23 to 25: an index, a local file, and a file from pip's cache.
_LINES = [
    ("Obtaining file:///home/me/headrace", "preparing the installation"),
    ("Collecting torch<3,>=2.11 (from headrace==0.2.0)", "resolving packages, 1 found"),
    (
        "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (887.9 MB)",
        "downloading packages: torch, 887.9 MB",
    ),
    (
        "  Downloading https://a.example/whl/torch-2.13.0%2Bcpu-cp311-cp311-linux.whl (191.8 MB)",
        "downloading packages: torch, 191.8 MB",
    ),
    ("Processing /wheels/sympy-1.14.0-py3-none-any.whl", "resolving packages, 2 found"),
    ("Collecting SymPy>=1 (from torch)", "resolving packages, 2 found"),
    ("Collecting numpy>=2", "resolving packages, 3 found"),
    (
        "  Downloading numpy-2.4.6-cp311-cp311-linux_x86_64.whl.metadata (6.6 kB)",
        "resolving packages, 3 found",
    ),
    ("Requirement already satisfied: six in /lib (1.0)", "resolving packages, 4 found"),
    (
        "  Using cached numpy-2.4.6-cp311-cp311-linux_x86_64.whl (16.6 MB)",
        "downloading packages: numpy, 16.6 MB",
    ),
    ("  Preparing metadata (pyproject.toml): finished", "downloading packages: numpy, 16.6 MB"),
    ("  Downloading six-1.0-py3-none-any.whl (32 kB)", "downloading packages"),
    ("Installing collected packages: sympy, numpy, torch", "unpacking packages, 1 of 3"),
    ("Successfully installed numpy-2.4.6 sympy-1.14.0 torch-2.13.0", "unpacking packages, 1 of 3"),
]


def test_each_line_of_pip_gives_its_stage() -> None:
    progress = Progress()
    for line, stage in _LINES:
        progress.read(line)
        assert progress.describe(1) == stage


def test_the_number_of_unpacked_packages_never_falls() -> None:
    progress = Progress()
    progress.read("Installing collected packages: a, b, c")
    assert [progress.describe(number)[-6:] for number in (1, 2, 1, -1, 3)] == [
        "1 of 3", "2 of 3", "2 of 3", "2 of 3", "3 of 3",
    ]  # fmt: skip


def test_off_a_terminal_a_long_stage_is_shown_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("tools.install.time.monotonic", lambda: now)
    screen = Screen()
    for now in (1.0, 20.0, 32.0, 40.0, 63.0):
        screen.show("unpacking", f"unpacking, {now:.0f}")
    screen.show("other", "other")
    assert capsys.readouterr().err.splitlines() == [
        "headrace: unpacking, 1 (1 s)",
        "headrace: unpacking, 32 (32 s)",
        "headrace: unpacking, 63 (63 s)",
        "headrace: other (63 s)",
    ]


def test_no_more_packages_are_unpacked_than_there_are() -> None:
    progress = Progress()
    progress.read("Installing collected packages: a, b")
    assert progress.describe(7) == "unpacking packages, 2 of 2"


def test_off_a_terminal_each_stage_is_one_line_and_errors_and_the_code_come_through(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The pause lets the screen show the stage more than once.
    program = (
        "import time\n"
        "import sys\n"
        "print('WARNING: old', file=sys.stderr)\n"
        "for line in 2 * ['Collecting a', '  Using cached a-1.whl (2 MB)']:\n"
        "    print(line, flush=True)\n"
        "    time.sleep(1)\n"
        "raise SystemExit('no')"
    )
    assert run([sys.executable, "-c", program], Screen()) == 1
    lines = capsys.readouterr().err.splitlines()
    first = "headrace: preparing the installation"
    stages = ["headrace: resolving packages, 1 found", "headrace: downloading packages: a, 2 MB"]
    assert [line.rpartition(" (")[0] for line in lines[:-2]] in (
        [first, *stages],
        stages,
    )
    assert lines[-2:] == ["no", "WARNING: old"]


def test_a_warning_of_an_installation_that_succeeds_is_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = "import sys; print('WARNING: old', file=sys.stderr)"
    assert run([sys.executable, "-c", program], Screen()) == 0
    assert "WARNING" not in capsys.readouterr().err


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "torch").mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_pytorchs_index_is_used_if_it_answers(index: str) -> None:
    assert index_options("global.cert='c'", index) == ["--extra-index-url", index]
    # This index has no PyTorch, and nothing listens on port 9 of this machine.
    assert index_options("", f"{index}/empty") == []
    assert index_options("", "http://127.0.0.1:9") == []


@pytest.mark.parametrize("own", ["global.index-url='a'", ":env:.extra-index-url='b'", "find-links"])
def test_an_index_of_the_persons_own_takes_precedence_over_pytorchs(index: str, own: str) -> None:
    assert index_options(f"global.cert='c'\n{own}\n", index) == []


@pytest.mark.parametrize("writes", [True, False])
def test_pip_compiles_only_if_python_stores_no_byte_code(
    monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes)
    assert ("--no-compile" in pip_command(".", "global.index-url")) == writes


def test_a_machine_with_an_nvidia_driver_gets_the_build_with_cuda(
    index: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert index_options("", index) == []
