"""From a model's name to the folder that holds it; never imports torch."""

import re
from pathlib import Path

from headrace.checkpoints.hub import OnProgress, cached, download
from headrace.core.errors import ModelError

MINI = "headrace-mini"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_model(
    model: str, revision: str | None = None, on_progress: OnProgress | None = None
) -> Path:
    """The folder of the model that comes with the package, or is named by its path or hub id.

    What is on the hub and not in its cache is downloaded, which may take long.
    """
    if (folder := _own_folder(model)) is not None:
        if not (folder / "config.json").is_file():
            message = f"{model!r} has no config.json; give the folder of a model."
            raise ModelError(message, "model_corrupt")
        return folder
    if is_hub_id(model):
        return download(model, revision, on_progress)
    raise ModelError(
        f"No model folder {model!r} was found; give the path of a folder with "
        f"config.json and safetensors files, a hub id (owner/name), or {MINI}.",
        "model_not_found",
    )


def find_here(model: str, revision: str | None = None) -> Path | None:
    """The same without the network: None if only the hub may have it."""
    folder = _own_folder(model)
    return cached(model, revision) if folder is None and is_hub_id(model) else folder


def is_hub_id(model: str) -> bool:
    """Whether it has the form of one; a folder of that name takes precedence."""
    return bool(_HUB_ID.fullmatch(model))


def _own_folder(model: str) -> Path | None:
    if model == MINI:
        return Path(__file__).parent / "mini"
    folder = Path(model).expanduser()
    return folder.resolve() if folder.is_dir() else None
