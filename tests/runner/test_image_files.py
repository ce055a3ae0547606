"""Files of an image processor that no library should be given."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_common.errors import ModelError
from headrace_engine.runner.images import ImageProcessor

ODD: dict[str, Callable[[Path], object]] = {
    "endless zeros": lambda file: file.symlink_to("/dev/zero"),
    "nested brackets": lambda file: file.write_text("[" * 100_000),
    "numbers": lambda file: file.write_text("[1, 2]"),
}


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
@pytest.mark.parametrize("what", ODD)
def test_an_odd_file_makes_the_processor_unusable_in_one_sentence(
    what: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    (tmp_path / name).unlink(missing_ok=True)
    ODD[what](tmp_path / name)
    with pytest.raises(ModelError, match=r"^The image processor of \S+ cannot be loaded; "):
        ImageProcessor(tmp_path)
