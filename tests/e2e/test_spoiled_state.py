"""Tests that a server starts although the files of its state directory are corrupt.

The files are those of a server that used all features, so new files are covered automatically.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.batch_lines import chat_line, in_lines
from tests.e2e.test_desired import desired, put
from tests.e2e.test_models import FLAGS, LIMIT_S, ask
from tools.harness.eventually import eventually
from tools.harness.servers import running_server

OFFLINE = {"HF_HUB_OFFLINE": "1"}


def flags(model: Path, state: Path) -> list[str]:
    return [f"--model=a={model}", f"--model=b={model}", "--state-dir", str(state), *FLAGS]


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the state directory of a server that was killed after using each feature."""
    state = tmp_path_factory.mktemp("written") / "state"
    with running_server(*flags(folder, state), environment=OFFLINE) as server:
        url = server.url
        put(url, desired(url))
        httpx.post(f"{url}/models", json={"model": "owner/name"}, timeout=LIMIT_S)
        body = {"model": "a", "input": "hello", "max_output_tokens": 4}
        assert httpx.post(f"{url}/v1/responses", json=body, timeout=LIMIT_S).status_code == 200
        files = {"file": ("lines.jsonl", in_lines([chat_line(1, model="a")]))}
        data = {"purpose": "batch"}
        file = httpx.post(f"{url}/v1/files", files=files, data=data, timeout=LIMIT_S).json()
        wish = {
            "input_file_id": file["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        assert httpx.post(f"{url}/v1/batches", json=wish, timeout=LIMIT_S).status_code == 200
        server.process.kill()
    names = {path.name for path in state.rglob("*") if path.is_file()}
    assert {"lock", "pulled.json", "desired.json", "streams.sqlite3", file["id"]} <= names
    # Add partial files, as an interrupted write leaves them.
    for partial in ("pulled.new", f"batches/records/file/.{file['id']}"):
        (state / partial).write_bytes(b"a part")
    return state


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def randomize(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size or 100))


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


SPOILS: dict[str, Callable[[Path], None]] = {
    "empty": empty,
    "cut": cut,
    "random": randomize,
    "a folder": replaced(Path.mkdir),
    "a pipe": replaced(os.mkfifo),
    "endless zeros": replaced(lambda path: path.symlink_to("/dev/zero")),
    "a broken link": replaced(lambda path: path.symlink_to("/nowhere/at/all")),
}


# tests/test_state_files.py covers the other kinds without a server.
IN_THE_SUITE = ("random", "a folder")


@pytest.mark.parametrize(
    "how",
    [it if it in IN_THE_SUITE else pytest.param(it, marks=pytest.mark.slow) for it in SPOILS],
)
def test_the_server_starts_with_corrupt_state_files(
    how: str, written: Path, folder: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    shutil.copytree(written, state)
    for path in [it for it in state.rglob("*") if it.is_file()]:
        SPOILS[how](path)
    zeros = os.stat("/dev/zero").st_mode
    check_start(folder, state)
    assert os.stat("/dev/zero").st_mode == zeros


@pytest.mark.slow
def test_the_server_starts_if_a_state_folder_was_replaced_by_a_file(
    written: Path, folder: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    shutil.copytree(written, state)
    shutil.rmtree(state / "batches")
    (state / "batches").write_text("a file")
    check_start(folder, state)


def check_start(folder: Path, state: Path) -> None:
    """Check that the server answers and starts again, and that only its user may read its state."""
    for start in ("first", "second"):
        with running_server(*flags(folder, state), environment=OFFLINE) as server:
            try:
                if start == "first":
                    assert ask(server.url, "a").status_code == 200
                eventually(
                    lambda: httpx.get(f"{server.url}/v1/batches").status_code == 200, LIMIT_S
                )
            except BaseException:
                print(*server.lines, sep="\n")
                raise
    folders = [state, *(path for path in state.rglob("*") if path.is_dir())]
    own = [path for path in folders if ".unreadable-" not in str(path)]
    assert {path.stat().st_mode & 0o777 for path in own} == {0o700}
