"""Chooses a model for `headrace serve` on a terminal if no model was named."""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from headrace.cli.logs import say
from headrace.cli.models import gigabytes
from headrace.fleet.model_check import check_model
from headrace.text.template import ChatTemplate
from headrace_common.checkpoints.catalog import catalog, memory_for, usable_bytes
from headrace_common.checkpoints.downloads import downloads
from headrace_common.checkpoints.find import MINI
from headrace_common.checkpoints.gguf_file_names import labels, stem_of
from headrace_common.checkpoints.gguf_folder import model_files
from headrace_common.checkpoints.hub import cached
from headrace_common.checkpoints.package_index import PACKAGED, packaged_file
from headrace_common.config.settings import ModelConfig, ServerConfig
from headrace_common.errors import ModelError
from headrace_common.system.memory_limits import installed_bytes

_NOT_FOR_CHAT = re.compile(r"embed|rerank", re.IGNORECASE)
_MOST_SHOWN = 4
_COLUMNS = 78


class _Local(NamedTuple):
    """A downloaded model. `headrace serve` accepts `name`, and `path` is where the model is."""

    name: str
    path: str
    num_bytes: int


def with_best_model(config: ServerConfig) -> ServerConfig:
    """Show the models on this machine and those that fit, and choose the largest chat model.

    Without a usable chat model, headrace-mini stays chosen. Nothing changes if a model was named or
    if the messages do not go to a terminal.
    """
    first, *others = config.models
    is_named = first.model != MINI or others or "HEADRACE_MODEL" in os.environ
    if is_named or first.adapter or config.cluster is not None or not sys.stderr.isatty():
        return config
    memory = usable_bytes(installed_bytes())
    try:
        found = sorted(_local_models(), key=lambda it: it.num_bytes, reverse=True)
    # A cache that cannot be read must not keep the server from starting.
    except (OSError, ValueError):
        found = []
    remarks = {it.name: "too large" for it in found if memory_for(it.num_bytes) > memory}
    best = None
    for model in found:
        if model.name not in remarks:
            if remark := _objection(first, model.path):
                remarks[model.name] = remark
                continue
            best = model.name
            break
    for line in _lines(found, remarks, best, memory):
        say(line)
    if best is None:
        return config
    return replace(config, models=(replace(first, model=best),))


def _local_models() -> Iterator[_Local]:
    """Yield the downloaded models, except models whose names show that they cannot chat."""
    short_names = {it.file: it.name for it in catalog().values()}
    for found in downloads():
        if found.name in PACKAGED:
            yield _Local(found.name, str(packaged_file(found.name)), found.num_bytes)
            continue
        folder = cached(found.name, None)
        if folder is None or _NOT_FOR_CHAT.search(found.name):
            continue
        if files := [*folder.glob("*.safetensors")]:
            yield _Local(found.name, str(folder), _size(files))
            continue
        ggufs = model_files(folder)
        for first, label in labels(it.name for it in ggufs).items():
            if not _NOT_FOR_CHAT.search(first):
                parts = [it for it in ggufs if stem_of(it.name) == stem_of(first)]
                name = f"{found.name}:{label}"
                yield _Local(short_names.get(name, name), f"{folder}:{label}", _size(parts))


def _size(files: list[Path]) -> int:
    # The file of an incomplete download may be missing.
    return sum(it.stat().st_size for it in files if it.exists())


def _objection(config: ModelConfig, path: str) -> str:
    """Return why a model is not chosen; "" if it can chat."""
    try:
        folder = check_model(replace(config, model=path)).folder
        return "" if ChatTemplate.load(folder, {}) else "has no chat template"
    except ModelError:
        return "cannot be read"


def _lines(
    found: list[_Local], remarks: dict[str, str], best: str | None, memory: int
) -> Iterator[str]:
    """Return at most 12 lines: the models on this machine, the choice, and models that fit."""
    command = "headrace" if shutil.which("headrace") else ".venv/bin/headrace"
    if found:
        yield "headrace: no model was named. On this machine:"
    for model in found[:_MOST_SHOWN]:
        remark = f" ({remarks[model.name]})" if model.name in remarks else ""
        yield f"  {model.name}  {gigabytes(model.num_bytes)}{remark}"
    if (num_more := len(found) - _MOST_SHOWN) > 0:
        yield f"  and {num_more} more: {command} ls"
    if best is not None:
        yield f"headrace: serving {best}; for another model: {command} serve NAME"
    else:
        yield "headrace: found no usable chat model; serving the test model headrace-mini"
        yield f"To chat, run: {command} serve smollm2 (93 MB from pip's index)"
    here = {it.name for it in found}
    fitting = (
        it.name
        for it in catalog().values()
        if it.file and it.kind != "embedding" and it.name not in here and it.memory_bytes <= memory
    )
    if names := ", ".join(fitting):
        room = gigabytes(memory)
        text = f"More models that can be downloaded and fit into {room} of memory: {names}"
        yield from textwrap.wrap(text, _COLUMNS, break_on_hyphens=False)
