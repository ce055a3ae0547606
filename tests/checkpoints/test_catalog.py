"""The models with short names: their facts agree with each other, and a name finds its file."""

import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from headrace.cli.models import gigabytes, models
from headrace_common.checkpoints.catalog import CatalogEntry, catalog, hub_id_of, usable_bytes
from headrace_common.checkpoints.find import MINI, can_be_fetched, find_model, is_hub_id, place_of
from headrace_common.checkpoints.package_index import PACKAGED
from headrace_common.errors import ModelError
from tests.checkpoints.small_hub import small_hub
from tests.checkpoints.test_find import look_up
from tools.harness.gguf_files import to_gguf
from tools.harness.tiny_models import make_tiny_model

BITS = {"Q4_K_M": (4.5, 5.6), "Q8_0": (8.0, 9.0), "MXFP4": (4.2, 4.8)}
ROOT = Path(__file__).parents[2]
ENTRIES = [pytest.param(it, id=it.name) for it in catalog().values()]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_facts_of_an_entry_agree(entry: CatalogEntry) -> None:
    assert re.fullmatch(r"[a-z0-9.-]+", entry.name) and entry.name != MINI
    assert can_be_fetched(entry.name) and place_of(entry.name) is None
    assert (entry.active is not None) == (entry.kind == "MoE")
    assert (entry.kind == "embedding") == ("embedding" in entry.name)
    if not entry.file:
        assert PACKAGED[entry.name].num_bytes == entry.bytes
        assert PACKAGED[entry.name].package in entry.source
        return
    repo, _, quantization = entry.file.partition(":")
    assert entry.source.startswith(f"https://huggingface.co/{repo}/tree/")
    assert re.fullmatch("[0-9a-f]{40}", entry.source.rpartition("/")[2])
    low, high = BITS[quantization]
    assert low <= 8 * entry.bytes / (1e9 * entry.parameters) <= high


def test_a_short_name_downloads_its_file_alone(tmp_path: Path) -> None:
    repo, _, quantization = hub_id_of("qwen3-0.6b").partition(":")
    folder = tmp_path / "gguf"
    folder.mkdir()
    to_gguf(make_tiny_model(tmp_path / "tiny"), folder / f"Qwen3-0.6B-{quantization}.gguf", "Q8_0")
    (folder / "Qwen3-0.6B-Q2_K.gguf").write_bytes(b"never asked for")
    with small_hub({repo: folder}) as hub:
        variables = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        found = look_up(tmp_path / "home", hub.url, "qwen3-0.6b", **variables)
        assert {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path} == {
            f"Qwen3-0.6B-{quantization}.gguf"
        }
    assert found["name"] == f"Qwen3-0.6B-{quantization}"


def test_a_hub_that_cannot_be_reached_offers_other_ways(tmp_path: Path) -> None:
    found = look_up(tmp_path / "home", "http://127.0.0.1:9", "qwen3-0.6b")
    assert "hub did not give a usable answer" in str(found["message"])
    assert "headrace models available" in str(found["message"])
    assert "smollm2" in str(found["message"])


@pytest.mark.parametrize("width", [80, 120])
def test_the_list_fits_the_terminal_and_json_has_all_facts(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = CliRunner().invoke(models, ["available", "--all"]).output.splitlines()
    assert all(len(line) <= width for line in shown)
    assert [line.split()[0] for line in shown if line[0] != " "] == ["name", *catalog()]
    assert " ".join(shown[1].split()).startswith("smollm2 0.1 GB 1.3 GB fluent in short answers")
    told = CliRunner().invoke(models, ["available", "--all", "--json"]).output
    assert msgspec.json.decode(told, type=list[CatalogEntry]) == [*catalog().values()]


def test_models_that_are_too_large_are_counted_among_those_that_match(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace_common.system.memory_limits.installed_bytes", lambda: 8 << 30)
    coding = CliRunner().invoke(models, ["available", "Coding"]).output
    assert coding == "1 more need over 6.4 GB, three quarters of the memory; --all shows them.\n"
    listed = CliRunner().invoke(models, ["available"]).output
    assert "qwen3-4b" in listed and "qwen3-8b" not in listed  # 4.1 and 7.0 GB
    assert "No model matches 'zzz'" in CliRunner().invoke(models, ["available", "zzz"]).output


def test_a_mistyped_short_name_is_corrected() -> None:
    with pytest.raises(ModelError, match=r"'qwen3-4' was found; did you mean qwen3-4b\?"):
        find_model("qwen3-4")


def test_other_names_stand_for_themselves() -> None:
    assert hub_id_of("someone/small") == "someone/small" and is_hub_id("someone/small")
    assert not is_hub_id("smollm2") and not can_be_fetched("qwen3")


def rows_of(path: str) -> list[list[str]]:
    """Return the cells of each table row that starts with a name or a memory size."""
    lines = (ROOT / path).read_text().splitlines()
    rows = [[cell.strip() for cell in it.strip("|").split("|")] for it in lines if it[:1] == "|"]
    return [row for row in rows if row[0].startswith("`") or re.match(r"\d+ GB", row[0])]


def test_the_docs_list_the_catalog() -> None:
    rows = [row for row in rows_of("docs/start/choose-a-model.md") if row[0].startswith("`")]
    for row, entry in zip(rows, catalog().values(), strict=True):
        active = "" if entry.active is None else f", {entry.active:g} B active"
        sizes = [gigabytes(entry.bytes), gigabytes(entry.memory_bytes)]
        facts = [f"{entry.parameters:g} B{active}", *sizes, entry.license, entry.about]
        assert row == [f"`{entry.name}`", *facts]


@pytest.mark.parametrize("path", ["README.md", "docs/start/choose-a-model.md"])
def test_the_docs_recommend_models_that_leave_a_quarter_of_the_memory(path: str) -> None:
    rows = [row for row in rows_of(path) if row[0][0].isdigit()]
    assert len(rows) == 5
    for memory, named, *download in rows:
        for name in re.findall(r"`(?:make serve ARGS=)?([\w.-]+)`", named):
            entry = catalog()[name]
            assert entry.memory_bytes <= usable_bytes(int(memory.split()[0]) * 10**9)
            assert not download or download[0].startswith(gigabytes(entry.bytes))
