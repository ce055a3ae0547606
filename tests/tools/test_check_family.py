"""The checks of a model family pass for two families, and find a planted fault."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_engine.models.qwen3 import Qwen3
from tools.check_family import main

ROWS = 19


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3_5ForCausalLM"])
def test_a_family_passes(architecture: str, tmp_path: Path, capfd: Any) -> None:
    assert main([str(tmp_path), "--tiny", architecture]) == 0
    rows = capfd.readouterr().out.splitlines()
    assert len(rows) == ROWS
    assert not any(" failed " in row for row in rows)


def test_a_wrong_norm_is_found_and_chunks_that_still_agree_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    read = Qwen3.read

    def wrong(config: dict[str, Any]) -> Any:
        return msgspec.structs.replace(read(config), norm_eps=0.1)

    monkeypatch.setattr(Qwen3, "read", staticmethod(wrong))
    assert main([str(tmp_path), "--tiny", "Qwen3ForCausalLM", "--only", "logits"]) == 1
    rows = capfd.readouterr().out.splitlines()
    assert sum(" failed " in row for row in rows) == 4
    assert main([str(tmp_path / "model"), "--only", "chunks"]) == 0


def test_a_family_becomes_one_row_of_a_table(tmp_path: Path, capfd: Any) -> None:
    assert main([str(tmp_path), "--tiny", "LlamaForCausalLM", "--only", "logits", "--table"]) == 0
    (row,) = capfd.readouterr().out.splitlines()
    assert row.startswith("| LlamaForCausalLM | safetensors, GGUF | ")
    assert row.endswith(" | 5 | 0 | 0 |")
