"""Tests of the wheel as another user sees it, in a read-only environment."""

import re
import subprocess
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import httpx

from headrace import __version__
from tests.package.conftest import ENVIRONMENT, ROOT, OtherUser
from tools.harness import processes
from tools.harness.servers import ServerProcess

DIST = ROOT / "build/dist"
VENDOR = "src/headrace/web/vendor"


def sources() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split())


def test_the_wheel_and_the_archive_contain_every_source_file() -> None:
    (wheel,) = DIST.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        packed = {f"src/{name}" for name in opened.namelist() if ".dist-info/" not in name}
    assert packed == sources()
    (archive,) = DIST.glob("*.tar.gz")
    with tarfile.open(archive) as unpacked:
        names = {name.partition("/")[2] for name in unpacked.getnames()}
    assert names > sources() | {"LICENSE", "CHANGELOG.md", "constraints.txt", "pyproject.toml"}
    assert not {name for name in names if name.startswith(("tests", "build", "docs"))}


def test_the_wheel_contains_the_licence_of_each_library() -> None:
    (wheel,) = DIST.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        listed = Parser().parsestr(opened.read(metadata).decode()).get_all("License-File", [])
    libraries = {name for name in sources() if name.startswith(VENDOR) and name.endswith(".js")}
    assert set(listed) == {"LICENSE", *(f"{it.partition('.')[0]}.LICENSE" for it in libraries)}
    folder = metadata.removesuffix("METADATA") + "licenses/"
    assert {f"{folder}{name}" for name in listed} <= set(names)


def test_the_installation_reports_its_version_and_can_serve(user: OtherUser) -> None:
    assert user.run("headrace", "--version").split()[-1] == __version__
    code = "from importlib.metadata import version; print(version('headrace'))"
    assert user.run("python", "-c", code).strip() == __version__
    assert "native-text on cpu" in user.run("headrace", "doctor", "headrace-mini")


def test_the_installation_is_read_only(user: OtherUser) -> None:
    code = "import headrace, os; print(os.path.dirname(headrace.__file__))"
    folder = user.run("python", "-c", code).strip()
    assert folder.startswith(str(ENVIRONMENT))
    tried = f"open({folder!r} + '/written', 'w')"
    assert "refused" in user.run(
        "python", "-c", f"try: {tried}\nexcept PermissionError: print('refused')"
    )


def test_all_files_of_the_web_page_are_served(server: ServerProcess) -> None:
    for page in ("/", "/dashboard"):
        answer = httpx.get(server.url + page, headers={"Accept": "text/html"})
        linked = re.findall(r'(?:src|href)="(web/[^"]+)"', answer.text)
        assert answer.is_success and linked
        for name in linked:
            assert httpx.get(f"{server.url}/{name}").is_success, name
    for file in (ROOT / VENDOR).glob("*.js"):
        assert httpx.get(f"{server.url}/web/vendor/{file.name}").content == file.read_bytes()


def test_the_server_chats_and_embeds(server: ServerProcess, user: OtherUser) -> None:
    code = (
        "from headrace import Client\n"
        f"with Client({server.url!r}) as client:\n"
        "    print(''.join(it.text for it in client.stream('Count from 1 to 5.', temperature=0)))\n"
        "    print(len(client.embed('A word.')))"
    )
    *text, size = user.run("python", "-c", code).splitlines()
    assert re.findall(r"\d+", " ".join(text)) == ["1", "2", "3", "4", "5"]
    assert int(size) == httpx.get(f"{server.url}/v1/models").json()["data"][0]["meta"]["n_embd"]


def test_one_command_after_installation_starts_a_chat_with_a_trained_model(
    user: OtherUser,
) -> None:
    """Chat in the environment that `pip install WHEEL` has created."""
    words = ("chat", "smollm2", "-o", "temperature=0", "-o", "max_tokens=30")
    assert "Paris" in user.run("headrace", *words, said="Name the capital of France.")
    folder = user.run("headrace", "pull", "smollm2").strip()  # already downloaded
    assert folder.startswith(str(user.folder.parent))
    assert "smollm2" in user.run("headrace", "models", "downloaded")


def test_a_stopped_server_leaves_no_process(server: ServerProcess) -> None:
    """Run last, since this test stops the shared server."""
    started = processes.descendants(server.process.pid)
    assert server.stop() == 0 and started
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
