from pathlib import Path

from headrace.runner.probe import _container_bytes


def group(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return folder


def test_a_container_leaves_its_limit_less_what_cannot_be_given_up(tmp_path: Path) -> None:
    stat = "anon 300\ninactive_file 500\nactive_file 50\n"
    files = {"memory_max": "1000\n", "memory_current": "900\n", "memory_stat": stat}
    assert _container_bytes(group(tmp_path, **files)) == 600


def test_a_container_without_a_limit_leaves_everything(tmp_path: Path) -> None:
    assert _container_bytes(tmp_path) == _container_bytes(group(tmp_path, memory_max="max\n"))
