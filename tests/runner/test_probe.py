from pathlib import Path

import pytest

from headrace_common.system.memory_limits import free_group_bytes, installed_bytes
from headrace_engine.runner import probe
from headrace_engine.runner.probe import is_portable, num_threads


def group(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return folder


def test_a_container_leaves_its_limit_less_what_cannot_be_given_up(tmp_path: Path) -> None:
    stat = "anon 300\ninactive_file 500\nactive_file 50\n"
    files = {"memory_max": "1000\n", "memory_current": "900\n", "memory_stat": stat}
    assert free_group_bytes(group(tmp_path, **files), tmp_path / "none") == 600


def test_a_container_without_a_limit_leaves_everything(tmp_path: Path) -> None:
    assert free_group_bytes(tmp_path, tmp_path) == UNLIMITED
    stat = {"memory_current": "5", "memory_stat": ""}
    unlimited = group(tmp_path, memory_max="max\n", **stat)
    assert free_group_bytes(unlimited, tmp_path) == UNLIMITED


UNLIMITED = 1 << 60
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def limit(folder: Path, names: tuple[str, str, str], most: int | str, used: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"{names[2]} 50\n")


@pytest.mark.parametrize(
    "names, line, base",
    [(V1, "4:cpu,memory:/user/job", "memory"), (V2, "0::/user/job", "")],
)
def test_the_tightest_of_all_groups_that_hold_a_process_counts(
    names: tuple[str, str, str], line: str, base: str, tmp_path: Path
) -> None:
    own, root = tmp_path / "own", tmp_path / "groups" / base
    own.write_text(f"{line}\n")
    assert free_group_bytes(tmp_path / "groups", own) >= UNLIMITED
    whole = installed_bytes(tmp_path / "groups", own)
    limit(root / "user" / "job", names, 5000, 1000)
    assert free_group_bytes(tmp_path / "groups", own) == 4050
    limit(root / "user", names, 3000, 2500)  # with others' programs
    assert free_group_bytes(tmp_path / "groups", own) == 550
    limit(root / "user" / "other", names, 100, 100)
    assert free_group_bytes(tmp_path / "groups", own) == 550
    assert installed_bytes(tmp_path / "groups", own) == 3000 < whole


def test_a_group_outside_the_container_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/../../elsewhere\n9:cpuset:/user\n")
    limit(tmp_path / "user", V2, 10, 10)
    assert free_group_bytes(tmp_path, tmp_path / "own") >= UNLIMITED


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, False),
        ({"dmi/id/chassis_type": "3"}, False),
        ({"dmi/id/chassis_type": "10"}, True),
        ({"power_supply/BAT0/type": "Battery"}, True),
        ({"power_supply/AC/type": "Mains", "power_supply/ups/type": "UPS"}, False),
        ({"power_supply/m/type": "Battery", "power_supply/m/scope": "Device"}, False),
    ],
)
def test_a_laptop_is_known_by_its_chassis_or_its_battery(
    files: dict[str, str], expected: bool, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert is_portable(tmp_path) == expected


def test_on_a_laptop_a_core_is_left_unless_threads_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "num_cores", lambda: 4)
    monkeypatch.setattr(probe, "is_portable", lambda: False)
    assert num_threads("auto") == 4
    monkeypatch.setattr(probe, "is_portable", lambda: True)
    assert (num_threads("auto"), num_threads(4)) == (3, 4)
    monkeypatch.setattr(probe, "num_cores", lambda: 1)
    assert num_threads("auto") == 1
