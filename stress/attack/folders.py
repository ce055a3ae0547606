"""Hostile model folders: a valid small model with one to three changes drawn from a seed."""

import contextlib
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace_common.checkpoints.find import MINI, find_model
from stress.attack.hostile_json import dumped, hostile_value, replace, rewrite, spoil
from stress.attack.hostile_texts import raw_documents, spoil_template, spoil_tokenizer
from stress.attack.hostile_weights import spoil_gguf, spoil_index, spoil_safetensors

GOOD = "good"
"""The name of the model that is left unchanged."""

_GGUF = Path(__file__).parents[2] / "tests" / "checkpoints" / "data" / "llama-Q4_K_M.gguf"
_SPARSE = 1 << 36
_ROPES: tuple[Any, ...] = (
    {"rope_type": "yarn", "factor": 0},
    {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 0},
    {"rope_type": "llama3", "factor": -1, "low_freq_factor": 4, "high_freq_factor": 4},
    {"rope_type": "longrope", "short_factor": [], "long_factor": [0] * 100_000},
    {"rope_type": "dynamic"},
    {"rope_type": "no such type", "factor": 2},
)
_ODD_SIZES: tuple[dict[str, Any], ...] = (
    {"num_attention_heads": 0},
    {"num_attention_heads": 3, "num_key_value_heads": 2},
    {"num_key_value_heads": -1},
    {"hidden_size": 2**31},
    {"vocab_size": 2**40},
    {"vocab_size": 1},
    {"num_hidden_layers": 2**31},
    {"num_hidden_layers": 10_000_000},
    {"head_dim": 0},
    {"head_dim": 7},
    {"max_position_embeddings": 2**62},
    {"max_position_embeddings": 0},
    {"layer_types": ["full_attention"] * 1_000_000},
    {"eos_token_id": list(range(1_000_000))},
    {"eos_token_id": 2**40},
    {"architectures": ["NoSuchForCausalLM"]},
    {"architectures": []},
    {"architectures": ["T5ForConditionalGeneration"]},
    {"auto_map": {"AutoConfig": "evil.Config"}},
    {"quantization_config": {"quant_method": "gptq", "bits": 0}},
    {"text_config": {"text_config": {}}, "vision_config": 5},
)


def make_hostile_folder(folder: Path, base: Path, label: str) -> str:
    """Copies the valid model `base`, and changes the copy in ways drawn from `label`.

    Returns the changes. Unchanged files are hard links to those of `base`.
    """
    rng = random.Random(label)
    shutil.copytree(base, folder, copy_function=os.link)
    kinds = list(_OF_GGUF if any(folder.glob("*.gguf")) else _OF_FOLDER)
    done = []
    places = rng.sample(range(len(kinds)), rng.choice((1, 1, 1, 2, 3)))
    # The changes are made in the order of the list. Changes that make a file unreadable come last.
    for kind in [kinds[place] for place in sorted(places)]:
        # An earlier change may have made this change impossible.
        with contextlib.suppress(*CANNOT):
            done.append(kind(folder, rng))
    return "; ".join(done)


CANNOT = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    StopIteration,
    RecursionError,
    struct.error,
)


def copy_of_mini(folder: Path) -> Path:
    """Copies the folder of headrace-mini, so that the caller can change the copy."""
    return Path(shutil.copytree(find_model(MINI), folder))


def copy_of_gguf(folder: Path) -> Path:
    """Make a folder that contains only a small GGUF file."""
    folder.mkdir()
    return Path(shutil.copy(_GGUF, folder / "model.gguf")).parent


def _spoil_config(folder: Path, rng: random.Random) -> str:
    def change(config: Any) -> str:
        if rng.random() < 0.4:
            odd = rng.choice(_ODD_SIZES)
            config.update(odd)
            return str(odd)[:60]
        if rng.random() < 0.3:
            config[rng.choice(("rope_scaling", "rope_parameters"))] = rng.choice(_ROPES)
            return "rope"
        return spoil(config, rng)

    return f"config: {rewrite(folder / 'config.json', change)}"


def _spoil_small_file(folder: Path, rng: random.Random) -> str:
    name = rng.choice(("tokenizer_config.json", "generation_config.json"))
    return f"{name}: {rewrite(folder / name, lambda document: spoil(document, rng))}"


def _spoil_defaults(folder: Path, rng: random.Random) -> str:
    name = rng.choice(("temperature", "top_p", "top_k", "min_p", "eos_token_id", "max_length"))
    document = {name: hostile_value(rng)}
    replace(folder / "generation_config.json", dumped(document))
    return f"generation_config: {str(document)[:60]}"


def _add_sentences(folder: Path, rng: random.Random) -> str:
    """Adds the files of a sentence-transformers model; one of these files is hostile."""
    parts = ("Transformer", "Pooling", "Dense", "Normalize")
    modules: list[Any] = [
        {"idx": n, "name": str(n), "path": f"{n}_{part}", "type": f"sentence_transformers.{part}"}
        for n, part in enumerate(parts)
    ]
    modules[0]["path"] = ""
    pooling = {"word_embedding_dimension": 160, "pooling_mode_mean_tokens": True}
    dense = {"in_features": 160, "out_features": 2**40, "activation_function": "os.system"}
    what = spoil(rng.choice((modules, modules, pooling, dense)), rng)
    if rng.random() < 0.3:
        modules[1]["path"] = rng.choice(("../../..", "/dev", "\0", "x" * 300))
    for name, content in (("1_Pooling", pooling), ("2_Dense", dense)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_bytes(dumped(content))
    (folder / "modules.json").write_bytes(dumped(modules))
    return f"sentence-transformers: {what}"


def _spoil_bytes(folder: Path, rng: random.Random) -> str:
    """Flips or cuts off bytes of a text file, or replaces the file with another document."""
    files = sorted([*folder.glob("*.json"), *folder.glob("*.jinja")])
    file = rng.choice(files)
    content = bytearray(file.read_bytes())
    kind = rng.choice(("flip", "cut", "other"))
    if kind == "flip":
        for _ in range(rng.choice((1, 5, 500))):
            content[rng.randrange(len(content))] = rng.randrange(256)
    elif kind == "cut":
        del content[rng.randrange(len(content)) :]
    else:
        content[:] = rng.choice(raw_documents())
    replace(file, bytes(content))
    return f"{file.name}: bytes ({kind})"


def _spoil_safetensors(folder: Path, rng: random.Random) -> str:
    return spoil_safetensors(next(folder.glob("*.safetensors")), rng)


def _spoil_gguf(folder: Path, rng: random.Random) -> str:
    return spoil_gguf(next(folder.glob("*.gguf")), rng)


def _odd_file(folder: Path, rng: random.Random) -> str:
    """Replaces a file with something that is not a usable file, or adds files with odd names."""
    files = sorted(it for it in folder.iterdir() if it.is_file())
    file = rng.choice(files)
    kind = rng.choice(tuple(ODD_FILES))
    ODD_FILES[kind](file)
    return f"{file.name} is {kind}"


def _link(to: str) -> Callable[[Path], None]:
    return lambda file: (file.unlink(), file.symlink_to(to))[0]


def _remade(make: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda file: (file.unlink(), make(file))[0]


def _make_sparse(file: Path) -> None:
    with file.open("wb") as out:
        out.truncate(_SPARSE)


def _make_unreadable(file: Path) -> None:
    file.write_bytes(b"{}")
    file.chmod(0)


def _add_odd_names(file: Path) -> None:
    for name in ("\n", "a\nb.json", "😀.safetensors", "x" * 255, "tokenizer.json.", "a.gguf\n"):
        (file.parent / name).write_bytes(b"{}")


ODD_FILES: dict[str, Callable[[Path], None]] = {
    "a FIFO": _remade(os.mkfifo),
    "a folder": _remade(Path.mkdir),
    "a link to itself": lambda file: (file.unlink(), file.symlink_to(file.name))[0],
    "a link to /dev/zero": _link("/dev/zero"),
    "a link to /dev/random": _link("/dev/random"),
    "a link to /proc/self/mem": _link("/proc/self/mem"),
    "a link to nothing": _link("no such file"),
    "a link to a folder": _link(".."),
    "64 GiB of zeros": _remade(_make_sparse),
    "empty": _remade(Path.touch),
    "unreadable": _remade(_make_unreadable),
    "missing": Path.unlink,
    "next to files with odd names": _add_odd_names,
}
"""Functions that damage or replace a file, by the state in which they leave the file."""

_OF_FOLDER: tuple[Callable[[Path, random.Random], str], ...] = (
    spoil_tokenizer,
    spoil_tokenizer,
    spoil_tokenizer,
    spoil_template,
    spoil_template,
    _spoil_config,
    _spoil_config,
    _spoil_small_file,
    _spoil_defaults,
    _add_sentences,
    _spoil_safetensors,
    spoil_index,
    _spoil_bytes,
    _odd_file,
)
_OF_GGUF = (_spoil_gguf, _spoil_gguf, _odd_file)
