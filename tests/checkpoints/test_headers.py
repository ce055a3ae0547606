"""Headers of safetensors files: what a file may say of its tensors, and what is refused."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from headrace_common.checkpoints.headers import read_file
from headrace_common.checkpoints.stacked_tensors import parts
from headrace_common.errors import ModelError

FINE = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def written(path: Path, header: bytes, num_bytes: int = 24) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
    return path


def test_a_file_cannot_set_fields_of_our_own(tmp_path: Path) -> None:
    own = {"rows": [10**12], "expert": 3, "is_transposed": True, "scales": ["/etc/passwd", "x"]}
    header = json.dumps({"a": FINE | own | {"file": "/etc/passwd", "stored_as": "b"}}).encode()
    found = read_file(written(tmp_path / "x.safetensors", header))["a"]
    assert (found.rows, found.expert, found.is_transposed, found.scales) == (
        (),
        None,
        False,
        ("",) * 2,
    )
    assert (found.file, found.stored_as) == ("x.safetensors", "a")


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": FINE | {"shape": [2, 4]}},
        {"a": FINE | {"shape": [-2, -3]}},
        {"a": FINE | {"shape": [2.0, 3]}},
        {"a": FINE | {"shape": [2**64, 3]}},
        {"a": FINE | {"dtype": 1}},
        {"a": FINE | {"data_offsets": [24, 0]}},
        {"a": FINE | {"data_offsets": [0, 24, 24]}},
        {"a": FINE, "b": FINE},
        {"a": FINE, "b": FINE | {"data_offsets": [12, 36]}},
        {"a": FINE | {"data_offsets": [4, 28]}},
        {"a": [FINE]},
        [FINE],
        "x",
    ],
)
def test_tensors_that_overlap_or_do_not_fill_their_place_are_damage(
    tensors: Any, tmp_path: Path
) -> None:
    file = written(tmp_path / "x.safetensors", json.dumps(tensors).encode())
    with pytest.raises(ModelError, match="truncated or damaged"):
        read_file(file)


@pytest.mark.parametrize("metadata", [1, "x", [], {"format": 1}, {"format": None}, FINE])
def test_metadata_that_the_library_refuses_is_named(metadata: Any, tmp_path: Path) -> None:
    header = json.dumps({"a": FINE, "__metadata__": metadata}).encode()
    file = written(tmp_path / "x.safetensors", header)
    with pytest.raises(ModelError, match=r"__metadata__ in x\.safetensors .* download") as refused:
        read_file(file)
    assert refused.value.code == "model_corrupt"


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_metadata_may_be_missing_or_hold_strings(metadata: Any, tmp_path: Path) -> None:
    header = json.dumps({"a": FINE, "__metadata__": metadata}).encode()
    assert [*read_file(written(tmp_path / "x.safetensors", header))] == ["a"]


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 7, b"\xff" * 8, (2**63).to_bytes(8, "little") + b"{}"]
)
def test_a_length_beyond_the_file_is_damage(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(ModelError, match="truncated or damaged"):
        read_file(tmp_path / "x.safetensors")


def test_a_tensor_whose_name_is_a_book_is_damage(tmp_path: Path) -> None:
    name = "model." + 100_000 * ".mlp.experts"
    file = written(tmp_path / "x.safetensors", json.dumps({name: FINE}).encode())
    with pytest.raises(ModelError, match="truncated or damaged"):
        read_file(file)


def test_more_tensors_than_any_model_has_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    none = b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = b"{%s}" % b",".join(none % number for number in range((1 << 19) + 1))
    file = written(tmp_path / "x.safetensors", header, 0)
    with pytest.raises(ModelError, match=r"has more than 524,288 tensors"):
        read_file(file)


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a broken link", "missing"])
def test_weights_that_cannot_be_read_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    if kind == "a pipe":
        os.mkfifo(file)
    elif kind != "missing":
        file.symlink_to("/dev/zero" if kind == "a device" else "/nowhere")
    with pytest.raises(ModelError, match=r"^x\.safetensors cannot be read \(") as failed:
        read_file(file)
    assert failed.value.code == "model_corrupt"


STACK = "model.layers.0.mlp.experts.gate_up_proj"
HEADS = "model.layers.0.linear_attn.in_proj_qkvz.weight"


@pytest.mark.parametrize("name", [STACK, f"{STACK}_blocks", f"{STACK}_bias", HEADS])
@pytest.mark.parametrize("shape", [(), (0, 2, 2), (1, 1 << 62, 0), (2, 1 << 40, 2), (1, 2, 2)])
@pytest.mark.parametrize("number", [0, -1, "x", 2.5, 1 << 62])
def test_a_tensor_that_no_model_takes_apart_is_left_whole(
    name: str, shape: tuple[int, ...], number: Any
) -> None:
    fields = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
    config = {f"linear_{field}": number for field in fields}
    config["architectures"] = ["GptOssForCausalLM"]
    assert len([*parts(name, shape, config)]) <= 2


def test_a_name_given_twice_is_damage(tmp_path: Path) -> None:
    first, second = json.dumps(FINE), json.dumps(FINE | {"data_offsets": [24, 48]})
    file = written(tmp_path / "x.safetensors", f'{{"a":{first},"a":{second}}}'.encode(), 48)
    with pytest.raises(ModelError, match="truncated or damaged"):
        read_file(file)


def test_a_header_longer_than_the_limit_is_refused_by_its_size(tmp_path: Path) -> None:
    file = written(tmp_path / "x.safetensors", json.dumps({"a": FINE}).encode())
    with pytest.raises(ModelError, match=r"has \d+ bytes; the limit is 10\."):
        read_file(file, 10)


@pytest.mark.parametrize(
    ("architecture", "name", "shape"),
    [
        ("Qwen3MoeForCausalLM", "model.layers.0.mlp.experts.gate_up_proj", (1, 2**18, 1)),
        ("GptOssForCausalLM", "model.layers.0.mlp.experts.gate_up_proj", (1, 1, 2**18)),
        ("Qwen3NextForCausalLM", "model.layers.0.linear_attn.in_proj_qkvz.weight", (12_288, 1)),
    ],
)
def test_thousands_of_stacked_tensors_take_little_memory(
    architecture: str, name: str, shape: tuple[int, ...]
) -> None:
    tracemalloc.start()
    kept = [list(parts(name, shape, {"architectures": [architecture]})) for _ in range(1000)]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(len(it) == 2 for it in kept) and size < 10_000_000
