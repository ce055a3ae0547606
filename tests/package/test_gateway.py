"""Tests of the package headrace-gateway, which has no engine and no PyTorch."""

import subprocess

import pytest

from headrace import __version__
from tests.package.conftest import ROOT
from tools.harness.servers import ServerProcess

ENVIRONMENT = ROOT / "build/gateway-venv"
MAX_BYTES = 250_000_000


def run(program: str, *words: str, said: str = "") -> subprocess.CompletedProcess[str]:
    command = ["env", "--unset=PYTHONPATH", str(ENVIRONMENT / "bin" / program), *words]
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=120)


def test_the_gateway_package_takes_at_most_250_mb_and_has_no_pytorch() -> None:
    site = next(ENVIRONMENT.glob("lib/*/site-packages"))
    assert not [name for name in ("torch", "transformers", "numba") if (site / name).exists()]
    size = sum(path.lstat().st_size for path in ENVIRONMENT.rglob("*"))
    print(f"{size / 1e6:.0f} MB")
    assert size <= MAX_BYTES


def test_the_gateway_package_can_chat_with_a_remote_server(server: ServerProcess) -> None:
    assert run("headrace", "--version").stdout.split()[-1] == __version__
    chat = run("headrace", "chat", "--url", server.url, said="What is 2 + 3?")
    assert chat.returncode == 0, chat.stderr
    assert "5" in chat.stdout


def test_the_python_client_streams(server: ServerProcess) -> None:
    code = (
        "from headrace import Client\n"
        f"with Client({server.url!r}) as client:\n"
        "    print(''.join(it.text for it in client.stream('Count from 1 to 5.', temperature=0)))"
    )
    assert "5" in run("python", "-c", code).stdout


@pytest.mark.parametrize(
    "words", [("serve",), ("doctor",), ("generate", "Hello"), ("cache", "show"), ("chat", "mini")]
)
def test_a_command_that_needs_an_engine_says_what_to_install(words: tuple[str, ...]) -> None:
    done = run("headrace", *words, said="Hello")
    assert done.returncode != 0
    assert "Install headrace in its place" in done.stderr
    assert "Traceback" not in done.stderr and "of a bug" not in done.stderr


def test_a_cluster_gateway_needs_only_ray() -> None:
    done = run("headrace", "serve", "--cluster", "auto", "--port", "0")
    assert "--cluster needs Ray" in done.stderr
