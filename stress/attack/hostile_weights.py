"""Hostile weights: safetensors and GGUF files with false headers or damaged bytes."""

import json
import random
import struct
from pathlib import Path
from typing import Any

from stress.attack.hostile_json import dumped, hostile_value, nested, replace, spoil

_LENGTHS = (0, 1, 7, 2**20, 2**31, 2**32, 2**62, 2**63, 2**64 - 1)
_NAN = {"F32": b"\x00\x00\xc0\x7f", "BF16": b"\xc0\x7f", "F16": b"\x00\x7e"}
_MANY = 100_000


def spoil_safetensors(file: Path, rng: random.Random) -> str:
    """Damages a safetensors file, and returns what was done."""
    kind = rng.choice(
        (
            *("length", "length", "header", "header", "header", "truncated", "flipped", "empty"),
            *("nan", "overlap", "dtype", "shape", "names", "fields", "raw", "pickle", "longer"),
        )
    )
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    if kind == "length":
        size = rng.choice((*_LENGTHS, size - 1, size + 1, len(content), len(content) - 8))
        replace(file, struct.pack("<Q", size) + content[8:])
        return f"safetensors: header of {size} bytes"
    if kind in ("truncated", "flipped", "empty", "longer", "pickle"):
        replace(file, _damaged(content, kind, rng))
        return f"safetensors: {kind}"
    what = _spoil_header(header, data, kind, rng)
    if kind == "nan":
        data = _NAN[next(it for it in header.values() if "dtype" in it)["dtype"]] * (len(data) // 2)
        data = data[: len(content) - 8 - size]
    raw = dumped(header) if kind != "raw" else rng.choice((b"{", b"[]", b"null", nested(_MANY)))
    raw = raw.encode() if isinstance(raw, str) else raw
    replace(file, struct.pack("<Q", len(raw)) + raw + data)
    return f"safetensors: {what}"


def _damaged(content: bytes, kind: str, rng: random.Random) -> bytes:
    if kind == "truncated":
        return content[: rng.randrange(len(content))]
    if kind == "flipped":
        changed = bytearray(content)
        for _ in range(rng.choice((1, 20, 1000))):
            changed[rng.randrange(min(len(changed), 4096))] ^= rng.randrange(1, 256)
        return bytes(changed)
    if kind == "pickle":
        return b"PK\x03\x04" + content
    return b"" if kind == "empty" else content + rng.randbytes(1000)


def _spoil_header(header: dict[str, Any], data: bytes, kind: str, rng: random.Random) -> str:
    named = [name for name in header if name != "__metadata__"]
    one, other = header[rng.choice(named)], header[rng.choice(named)]
    if kind == "header":
        return spoil(header, rng)
    if kind == "overlap":
        one["data_offsets"] = rng.choice(
            (other["data_offsets"], [0, len(data)], [len(data), 0], [-1, 0], [0, 2**63], [2**64, 0])
        )
    elif kind == "dtype":
        one["dtype"] = rng.choice(("F64", "I64", "U8", "F8_E4M3", "X", "", 5, None))
    elif kind == "shape":
        one["shape"] = rng.choice(
            ([], [0], [-1], [2**63], [2**32, 2**32], one["shape"][::-1], ["1"], [1] * _MANY)
        )
    elif kind == "names":
        header |= {f"{'x' * 200}{n}": dict(one) for n in range(20_000)}
    elif kind == "fields":
        one[rng.choice(("rows", "name", "file", "shape", "length"))] = hostile_value(rng)
    return kind


def spoil_index(folder: Path, rng: random.Random) -> str:
    """Splits the weights into several files with a false index."""
    whole = folder / "model.safetensors"
    shard = folder / "model-00001-of-00002.safetensors"
    whole.rename(shard)
    with shard.open("rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        names = [name for name in json.loads(file.read(size)) if name != "__metadata__"]
    lie = rng.choice(
        (
            *(
                "model-00002-of-00002.safetensors",
                "../../../etc/passwd",
                "/etc/passwd",
                "/dev/zero",
            ),
            *("", "\0", "x" * 5000, 5, None, ["a"], "../good/model.safetensors", "."),
        )
    )
    weight_map: Any = dict.fromkeys(names, shard.name)
    for name in rng.sample(names, rng.choice((1, len(names)))):
        weight_map[name] = lie
    if rng.random() < 0.2:
        weight_map = hostile_value(rng)
    index = {"metadata": {"total_size": hostile_value(rng)}, "weight_map": weight_map}
    replace(folder / "model.safetensors.index.json", dumped(index))
    return f"index: weights in {str(lie)[:40]!r}"


_STRING, _ARRAY, _U32 = 8, 9, 4


def spoil_gguf(file: Path, rng: random.Random) -> str:
    """Damages a GGUF file, and returns what was done."""
    content = bytearray(file.read_bytes())
    kind = rng.choice(
        (
            *("magic", "version", "tensors", "fields", "key", "anywhere", "anywhere", "anywhere"),
            *("flipped", "truncated", "empty", "nesting", "alignment", "text", "array", "type"),
        )
    )
    absurd = rng.choice(_LENGTHS)
    if kind in ("flipped", "truncated", "empty"):
        replace(file, _damaged(bytes(content), kind, rng))
        return f"GGUF: {kind}"
    at = {"magic": 0, "version": 4, "tensors": 8, "fields": 16, "key": 24}.get(kind)
    if at is not None:
        length = 4 if at < 8 else 8
        content[at : at + length] = struct.pack("<Q", absurd)[:length]
    elif kind == "anywhere":
        at = rng.randrange(24, min(len(content) - 8, rng.choice((400, 4000, 40_000))))
        content[at : at + 8] = struct.pack("<Q", absurd)
    else:
        (number,) = struct.unpack_from("<Q", content, 16)
        struct.pack_into("<Q", content, 16, number + 1)
        content[24:24] = _field(kind, absurd, rng)
    replace(file, bytes(content))
    return f"GGUF: {kind} {absurd}"


def _field(kind: str, absurd: int, rng: random.Random) -> bytes:
    """Return a hostile metadata field, to be added to the file."""
    if kind == "alignment":
        value = rng.choice((0, 3, 2**31, 2**32 - 1))
        return _key("general.alignment") + struct.pack("<II", _U32, value)
    if kind == "nesting":
        levels = struct.pack("<IQ", _ARRAY, 1) * _MANY
        return _key("x") + struct.pack("<I", _ARRAY) + levels + struct.pack("<IQI", _U32, 1, 7)
    if kind == "array":
        return _key("x") + struct.pack("<IIQ", _ARRAY, rng.choice((_U32, _STRING, 0)), absurd)
    if kind == "type":
        return _key("x") + struct.pack("<I", rng.choice((13, 99, 2**31, 2**32 - 1)))
    names = ("tokenizer.chat_template", "general.architecture", "tokenizer.ggml.model", "x")
    text = rng.choice((b"\xff\xfe", b"", b"\0" * 100, b"{{" * 20_000, b"a" * 1_000_000))
    return _key(rng.choice(names)) + struct.pack("<IQ", _STRING, len(text)) + text


def _key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()
