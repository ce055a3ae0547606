import json
import re
from pathlib import Path

from headrace_common.checkpoints.spec import read_spec
from headrace_engine.weights.fingerprint import fingerprint
from tools.harness.tiny_models import make_tiny_model


def of(folder: Path, dtype: str = "float32", device: str = "cpu") -> str:
    return fingerprint(read_spec(folder), dtype, device)


def test_it_is_twelve_hex_digits_and_the_same_each_time(folder: Path) -> None:
    assert re.fullmatch("[0-9a-f]{12}", of(folder)) and of(folder) == of(folder)


def test_it_does_not_depend_on_where_the_folder_lies(folder: Path, tmp_path: Path) -> None:
    assert of(make_tiny_model(tmp_path / "elsewhere")) == of(folder)


def test_it_tells_types_and_devices_apart(folder: Path) -> None:
    assert len({of(folder), of(folder, dtype="bfloat16"), of(folder, device="cuda")}) == 3


def test_it_tells_weights_and_configs_apart(folder: Path, tmp_path: Path) -> None:
    other = of(make_tiny_model(tmp_path / "seed", seed=1))
    changed = make_tiny_model(tmp_path / "config")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert len({of(folder), other, of(changed)}) == 3
