"""Hostile LoRA adapters: a valid adapter for headrace-mini, changed in ways drawn from a seed."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from headrace_common.checkpoints.find import MINI, find_model
from stress.attack.folders import CANNOT, ODD_FILES
from stress.attack.hostile_json import REGEXES, hostile_value, replace, rewrite, spoil
from stress.attack.hostile_texts import raw_documents
from stress.attack.hostile_weights import spoil_safetensors

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FIELDS = (
    *("target_modules", "rank_pattern", "alpha_pattern", "r", "lora_alpha", "bias", "peft_type"),
    *("modules_to_save", "layers_to_transform", "layers_pattern", "exclude_modules", "use_dora"),
    *("base_model_name_or_path", "task_type", "use_rslora", "fan_in_fan_out", "target_parameters"),
)


def make_valid_adapter(folder: Path) -> Path:
    """Makes an adapter that headrace-mini accepts."""
    # This import loads torch, so it is deferred.
    from tools.harness.tiny_adapters import ATTENTION, make_adapter

    return make_adapter(folder, find_model(MINI), 4, ATTENTION)


def make_hostile_adapter(folder: Path, base: Path, label: str) -> str:
    """Copies the valid adapter `base` with changes drawn from `label`; returns the changes."""
    rng = random.Random(label)
    shutil.copytree(base, folder, copy_function=os.link)
    kind = rng.choice(("config", "config", "config", "pattern", "pattern", "weights", "file"))
    try:
        if kind == "config":
            return f"config: {rewrite(folder / _CONFIG, lambda it: _change(it, rng))}"
        if kind == "pattern":
            return f"pattern: {rewrite(folder / _CONFIG, lambda it: _put_pattern(it, rng))}"
        if kind == "weights":
            return spoil_safetensors(folder / _WEIGHTS, rng)
        return _spoil_file(folder, rng)
    except CANNOT:
        return "nothing"


def _change(config: Any, rng: random.Random) -> str:
    if rng.random() < 0.3:
        return spoil(config, rng)
    name = rng.choice(_FIELDS)
    config[name] = hostile_value(rng)
    return f"{name} set to {repr(config[name])[:60]}"


def _put_pattern(config: Any, rng: random.Random) -> str:
    regex, absurd = rng.choice(REGEXES), rng.choice((0, -1, 2**63, 10**400, 1.5, "4", None))
    place = rng.choice(("target_modules", "rank_pattern", "alpha_pattern", "several"))
    if place == "several":
        config["rank_pattern"] = {f"{regex}{n}": 4 for n in range(1000)}
    else:
        config[place] = regex if place == "target_modules" else {regex: absurd}
    return f"{place} {regex[:40]}"


def _spoil_file(folder: Path, rng: random.Random) -> str:
    what = rng.choice(("kind", "bytes", "pickle", "both"))
    if what == "kind":
        kind = rng.choice(tuple(ODD_FILES))
        ODD_FILES[kind](folder / rng.choice((_CONFIG, _WEIGHTS)))
        return f"a file is {kind}"
    if what == "bytes":
        replace(folder / _CONFIG, rng.choice(raw_documents()))
        return "config: other bytes"
    if what == "pickle":
        (folder / _WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    return f"{what} .bin"


def bad_requests(rng: random.Random) -> bytes:
    """Return a body with a hostile `lora_path`, for the route that loads adapters."""
    path = rng.choice(
        (
            *("~nosuchuser/x", "~root", "", "/", "/dev/zero", "/proc/self/root", "a\0b", "\n"),
            *("x" * 5000, "../" * 1000, "\ud800", "file:///etc/passwd", "https://127.0.0.1:1/x"),
            *(5, None, [], {}, True),
        )
    )
    body: dict[str, Any] = {"lora_name": rng.choice(("odd", "", "\n", "😀", 5)), "lora_path": path}
    if rng.random() < 0.3:
        body["base_model_name"] = rng.choice(("headrace-mini", "no", "", 5))
    return json.dumps(body).encode()
