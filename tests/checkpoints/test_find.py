"""Models by folder, by hub id and from the cache, over a small hub of our own.

Each look-up runs in a process of its own: the hub's library reads its variables when imported.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_common.checkpoints.find import find_model
from headrace_common.errors import ModelError
from tests.checkpoints.small_hub import COMMIT, SmallHub, small_hub
from tools.harness.eventually import eventually
from tools.harness.gguf_files import to_gguf
from tools.harness.tiny_models import make_tiny_model

LOOK_UP = """
import json, sys
from headrace_common.errors import ModelError
from headrace_common.checkpoints.find import find_model
told = []
try:
    report = lambda *p: told.append(p)
    folder = find_model(sys.argv[1], sys.argv[2] or None, report, sys.argv[3])
except ModelError as error:
    print(json.dumps({"code": error.code, "message": str(error)}))
else:
    files = sorted(path.name for path in folder.iterdir())
    print(json.dumps({"files": files, "told": told, "name": folder.name}))
"""
REPO = "someone/small-model"


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    for name in ("model.safetensors", "consolidated.safetensors"):
        (folder / name).write_bytes(bytes(100_000))
    for name in ("pytorch_model.bin", "modeling_small.py", "README.md"):
        (folder / name).write_text("never read")
    return folder


def look_up(
    home: Path,
    endpoint: str,
    model: str = REPO,
    revision: str = "",
    mmproj: str = "auto",
    **variables: str,
) -> dict[str, object]:
    environment = os.environ | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint} | variables
    found = subprocess.run(
        [sys.executable, "-c", LOOK_UP, model, revision, mmproj],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    assert not found.stderr
    return dict(json.loads(found.stdout))


def num_files_sent(hub: SmallHub) -> int:
    return sum("/resolve/" in path for path in hub.asked)


def test_only_what_is_read_is_downloaded(repo: Path, tmp_path: Path) -> None:
    with small_hub({REPO: repo}) as hub:
        found = look_up(tmp_path / "home", hub.url)
    assert found["files"] == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert found["name"] == COMMIT
    total = 100_000 + 3 * len("{}")
    assert found["told"][-1] == [total, total]  # type: ignore[index]


def test_the_parts_of_a_model_of_sentence_transformers_come_along(tmp_path: Path) -> None:
    """Its weights in a folder of their own, as older versions put them, and a layer's."""
    modules = [{"type": "x.Transformer", "path": "0_Transformer"}, {"type": "x.Dense"}]
    repo = tmp_path / "repo"
    files = {
        "modules.json": json.dumps(modules),
        "0_Transformer/config.json": "{}",
        "0_Transformer/model.safetensors": "12",
        "0_Transformer/pytorch_model.bin": "never read",
        "1_Pooling/config.json": "{}",
        "2_Dense/config.json": "{}",
        "2_Dense/model.safetensors": "345",
        "2_Dense/pytorch_model.bin": "never read",
    }
    for name, content in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(content)
    with small_hub({REPO: repo}) as hub:
        found = look_up(tmp_path / "home", hub.url)
    assert found.get("message") is None
    assert (found["name"], found["files"]) == (
        "0_Transformer",
        ["config.json", "model.safetensors"],
    )
    sent = {path.partition(f"{COMMIT}/")[2] for path in hub.asked if "/resolve/" in path}
    assert sent == {name for name in files if not name.endswith(".bin")}


def test_what_is_in_the_cache_is_not_downloaded_again(repo: Path, tmp_path: Path) -> None:
    with small_hub({REPO: repo}) as hub:
        first = look_up(tmp_path / "home", hub.url)
        sent = num_files_sent(hub)
        second = look_up(tmp_path / "home", hub.url)
        assert num_files_sent(hub) == sent
    assert second["files"] == first["files"]
    assert second["told"] == []


def test_a_file_that_was_cut_goes_on_where_it_stopped(repo: Path, tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    (repo / "model.safetensors").write_bytes(content)
    home, model = tmp_path / "home", [REPO, "", "auto"]
    with small_hub({REPO: repo}) as hub:
        hub.flows.clear()
        environment = os.environ | {"HF_HOME": str(home), "HF_ENDPOINT": hub.url}
        with subprocess.Popen([sys.executable, "-c", LOOK_UP, *model], env=environment) as cut:
            eventually(lambda: len(parts(home)) == 1 and parts(home)[0].stat().st_size > 10**6, 60)
            cut.kill()
        hub.flows.set()
        found = look_up(home, hub.url)
        assert found["told"][0][0] > 10**6, "what had come counts"  # type: ignore[index]
        assert hub.starts[0] == 0 and min(hub.starts[1:]) > 10**6, "it is not sent again"
    (there,) = home.rglob("snapshots/*/model.safetensors")
    assert there.read_bytes() == content and not parts(home)


def parts(home: Path) -> list[Path]:
    return list(home.rglob("*.part"))


def test_a_file_with_another_hash_is_not_taken(repo: Path, tmp_path: Path) -> None:
    home, weights = tmp_path / "home", repo / "model.safetensors"
    blobs = home / "hub" / f"models--{REPO.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    (blobs / f"{digest}.part").write_bytes(b"damaged")
    with small_hub({REPO: repo}) as hub:
        refused = look_up(home, hub.url)
        assert refused["code"] == "download_failed" and "hash" in str(refused["message"])
        assert "model.safetensors" in str(look_up(home, hub.url)["files"])


def test_a_disk_that_is_too_small_is_told_before_a_byte_comes(repo: Path, tmp_path: Path) -> None:
    with small_hub({REPO: repo}) as hub:
        hub.claims["model.safetensors"] = 1 << 50
        refused = look_up(tmp_path / "home", hub.url)
        assert not hub.starts
    assert "needs 1073741824 MiB more" in str(refused["message"])
    assert "HF_HOME" in str(refused["message"])


def test_without_the_hub_the_cache_serves(repo: Path, tmp_path: Path) -> None:
    with small_hub({REPO: repo}) as hub:
        first = look_up(tmp_path / "home", hub.url)
    assert look_up(tmp_path / "home", hub.url)["files"] == first["files"]
    offline = look_up(tmp_path / "home", "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert offline["files"] == first["files"]


def test_without_hub_and_cache_the_remedy_is_named(tmp_path: Path) -> None:
    found = look_up(tmp_path / "home", "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert found["code"] == "model_not_found"
    assert "HF_HUB_OFFLINE" in str(found["message"])


def test_a_revision_is_a_branch_a_tag_or_a_commit(repo: Path, tmp_path: Path) -> None:
    with small_hub({REPO: repo}) as hub:
        for revision in ("v1", COMMIT):
            assert look_up(tmp_path / "home", hub.url, revision=revision)["name"] == COMMIT
        found = look_up(tmp_path / "home", hub.url, revision="v9")
    assert found["code"] == "model_not_found" and "v9" in str(found["message"])


@pytest.mark.parametrize("tells_all", [False, True])
def test_a_gated_model_asks_for_the_token_and_opens_with_it(
    repo: Path, tmp_path: Path, tells_all: bool
) -> None:
    with small_hub({REPO: repo}, token="hf_secret") as hub:
        hub.tells_all = tells_all
        refused = look_up(tmp_path / "home", hub.url)
        admitted = look_up(tmp_path / "home", hub.url, HF_TOKEN="hf_secret")
    assert refused["code"] == "download_denied" and "HF_TOKEN" in str(refused["message"])
    assert "model.safetensors" in str(admitted["files"])


def test_an_unknown_model_is_not_found(repo: Path, tmp_path: Path) -> None:
    with small_hub({REPO: repo}) as hub:
        found = look_up(tmp_path / "home", hub.url, model="someone/else")
    assert found["code"] == "model_not_found"


def test_pickled_weights_are_refused_before_a_byte_comes(repo: Path, tmp_path: Path) -> None:
    for file in repo.glob("*.safetensors"):
        file.unlink()
    with small_hub({REPO: repo}) as hub:
        found = look_up(tmp_path / "home", hub.url)
        assert num_files_sent(hub) == 0
    assert "pickled weights only (pytorch_model.bin)" in str(found["message"])


def test_all_shards_of_an_index_are_downloaded(repo: Path, tmp_path: Path) -> None:
    (repo / "model.safetensors").rename(repo / "model-00001-of-00002.safetensors")
    (repo / "model-00002-of-00002.safetensors").write_bytes(bytes(10))
    (repo / "model.safetensors.index.json").write_text("{}")
    with small_hub({REPO: repo}) as hub:
        found = look_up(tmp_path / "home", hub.url)
    weights = [name for name in found["files"] if name.endswith(".safetensors")]  # type: ignore[attr-defined]
    assert weights == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_a_folder_takes_precedence_over_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "small-model").mkdir(parents=True)
    (tmp_path / "someone" / "small-model" / "config.json").write_text("{}")
    assert find_model(REPO) == tmp_path / "someone" / "small-model"


def test_what_is_neither_folder_nor_hub_id_is_refused_as_it_was_typed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"No model folder '\.\./at/nowhere'") as refused:
        find_model("../at/nowhere")
    assert refused.value.code == "model_not_found"
    with pytest.raises(ModelError, match=f"'{tmp_path}' has no config.json"):
        find_model(str(tmp_path))


def test_a_file_that_is_no_model_is_called_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "model.safetensors").touch()  # it has the form of a hub id, too
    with pytest.raises(ModelError, match=r"'some/model.safetensors' is a file.*give the folder"):
        find_model("some/model.safetensors")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A repository of GGUF files, as most are: two quantizations, one of them in two parts."""
    folder = tmp_path / "gguf"
    tiny = to_gguf(make_tiny_model(tmp_path / "tiny"), tmp_path / "tiny.gguf", "Q8_0")
    folder.mkdir()
    (folder / "small-Q8_0.gguf").write_bytes(tiny.read_bytes())
    for number in (1, 2):
        (folder / f"small-q4_k_m-0000{number}-of-00002.gguf").write_bytes(b"never asked for")
    (folder / "README.md").write_text("never read")
    return folder


def test_the_named_quantization_alone_is_downloaded(files: Path, tmp_path: Path) -> None:
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with small_hub({REPO: files}) as hub:
        found = look_up(tmp_path / "home", hub.url, f"{REPO}:q8_0", **variables)
        sent = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert found["name"] == "small-Q8_0" and sent == {"small-Q8_0.gguf"}
    offline = look_up(tmp_path / "home", "http://127.0.0.1:9", f"{REPO}:Q8_0", **variables)
    assert offline["files"] == found["files"]
    other = look_up(tmp_path / "home", "http://127.0.0.1:9", f"{REPO}:Q4_K_M", **variables)
    assert "not on this machine" in str(other["message"])


def test_the_vision_part_comes_with_a_gguf_model(files: Path, tmp_path: Path) -> None:
    parts = ("mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf")
    for name in parts:
        (files / name).write_bytes(name.encode())
    with small_hub({REPO: files}) as hub:

        def sent(mmproj: str, architecture: object = "qwen35") -> set[str]:
            hub.asked.clear()
            hub.gguf = {"architecture": architecture}
            home = tmp_path / f"{mmproj}-{architecture}"
            variables = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
            found = look_up(home, hub.url, f"{REPO}:Q8_0", mmproj=mmproj, **variables)
            # A file without a vision part is refused if it was named, and ignored otherwise.
            assert ("message" in found) == (mmproj in parts)
            fetched = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
            return fetched - {"small-Q8_0.gguf"}

        assert sent("auto") == {"mmproj-F16.gguf"}
        assert sent("mmproj-BF16.gguf") == {"mmproj-BF16.gguf"}
        assert sent("none") == sent("auto", "gemma3") == set()


@pytest.mark.parametrize("model", [REPO, f"{REPO}:Q8_0"])
def test_gguf_files_in_subfolders_are_named(files: Path, tmp_path: Path, model: str) -> None:
    (tmp_path / "repo" / "Q8_0").mkdir(parents=True)
    (files / "small-Q8_0.gguf").rename(tmp_path / "repo" / "Q8_0" / "small-Q8_0.gguf")
    with small_hub({REPO: tmp_path / "repo"}) as hub:
        found = look_up(tmp_path / "home", hub.url, model)
    assert found["code"] == "invalid_value"
    assert "in subfolders only, such as Q8_0/small-Q8_0.gguf" in str(found["message"])


def test_a_token_that_the_hub_refuses_is_named(repo: Path, tmp_path: Path) -> None:
    with small_hub({REPO: repo}) as hub:
        hub.refuses_token = True
        found = look_up(tmp_path / "home", hub.url, HF_TOKEN="hf_old")
    assert "it refuses HF_TOKEN" in str(found["message"]), found


@pytest.mark.parametrize("model", [REPO, f"{REPO}:Q5_0"])
def test_quantizations_to_choose_from_are_listed(files: Path, tmp_path: Path, model: str) -> None:
    with small_hub({REPO: files}) as hub:
        found = look_up(tmp_path / "home", hub.url, model)
        assert num_files_sent(hub) == 0
    message = f"has 2 GGUF files (Q4_K_M, Q8_0); name one, as in {REPO}:Q4_K_M."
    assert message in str(found["message"])
    assert found["code"] == ("invalid_value" if model == REPO else "model_not_found")


def test_of_hundreds_of_files_some_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    repo = tmp_path / "many"
    repo.mkdir()
    for number in range(800):
        (repo / f"{number:03}{'x' * 197}.gguf").touch()
    with small_hub({REPO: repo}) as hub:
        found = look_up(tmp_path / "home", hub.url)
    message = str(found["message"])
    assert found["code"] == "invalid_value"
    assert "has 800 GGUF files" in message and "and 792 more" in message and len(message) < 1500


NAMES = [
    *("../../../outside.json", "/tmp/outside.json", "0_Transformer/../../outside.json"),
    *("a\\b.json", "a\nb.json", "*.json", "[a-z].json", "\ud800.json", "a/b/c/d/e.json"),
    *("x" * 5_000 + ".json", "", "..", "0_Transformer//x.json", 7, None, ["x.json"]),
]


def test_names_that_no_folder_of_a_model_has_are_passed_over(repo: Path, tmp_path: Path) -> None:
    with small_hub({REPO: repo}) as hub:
        hub.also_lists = [{"rfilename": name, "size": 2} for name in NAMES]
        found = look_up(tmp_path / "home", hub.url)
    assert len(found["files"]) == 4 and not list(tmp_path.rglob("outside.json"))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ["2", -5, 1.5, None, 1 << 200, {}])
def test_a_size_that_is_none_is_asked_for_with_the_file(
    repo: Path, tmp_path: Path, size: object
) -> None:
    with small_hub({REPO: repo}) as hub:
        hub.claims["model.safetensors"] = size
        assert "model.safetensors" in str(look_up(tmp_path / "home", hub.url)["files"])


def test_more_files_than_any_model_has_are_refused(repo: Path, tmp_path: Path) -> None:
    with small_hub({REPO: repo}) as hub:
        hub.also_lists = [{"rfilename": f"{n}.json", "size": 2} for n in range(3000)]
        found = look_up(tmp_path / "home", hub.url)
        assert num_files_sent(hub) == 0
    assert found["code"] == "invalid_value" and "3004 files" in str(found["message"])


@pytest.mark.parametrize("etag", ["../../outside", "/tmp/outside", "", "..", "a" * 4000, "a b"])
def test_a_hash_that_is_no_name_of_a_file_is_refused(repo: Path, tmp_path: Path, etag: str) -> None:
    with small_hub({REPO: repo}) as hub:
        hub.heads["ETag"] = f'"{etag}"'
        found = look_up(tmp_path / "home", hub.url)
    assert found["code"] == "download_failed" and "no usable hash" in str(found["message"])
    assert not list(tmp_path.rglob("outside*"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_without_end_is_given_up_at_its_stated_size(
    repo: Path, tmp_path: Path, name: str
) -> None:
    (repo / name).write_bytes(bytes(100_001))  # like no other file
    with small_hub({REPO: repo}) as hub:
        hub.endless = name
        found = look_up(tmp_path / "home", hub.url)
    assert found["code"] == "download_failed" and "stated size" in str(found["message"])
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.part")) < 200_000


def test_a_hub_that_sends_nothing_more_is_given_up(repo: Path, tmp_path: Path) -> None:
    with small_hub({REPO: repo}) as hub:
        hub.heads["X-Linked-Size"] = "200000"
        found = look_up(tmp_path / "home", hub.url)
    assert found["code"] == "download_failed", found


@pytest.mark.parametrize("commit", ["../../outside", "", None, 7, "main"])
def test_a_commit_that_is_none_is_refused(repo: Path, tmp_path: Path, commit: object) -> None:
    with small_hub({REPO: repo}) as hub:
        hub.commit = commit
        found = look_up(tmp_path / "home", hub.url)
    assert found["code"] == "model_not_found" and "hub did not give a usable answer" in str(
        found["message"]
    )


def test_a_hub_that_redirects_for_ever_is_given_up(repo: Path, tmp_path: Path) -> None:
    with small_hub({REPO: repo}) as hub:
        hub.redirects = True
        found = look_up(tmp_path / "home", hub.url)
    assert found["code"] == "model_not_found" and "hub did not give a usable answer" in str(
        found["message"]
    )
