"""Finds the folder that holds the model of a name; never imports torch.

The functions of os.path answer for any text, where those of Path raise for a name that is too long
and for the home of an unknown user.
"""

import contextlib
import os
import re
from pathlib import Path

from headrace_common.checkpoints.gguf_folder import choose_file, gguf_folder
from headrace_common.checkpoints.hub import OnProgress, cached, download
from headrace_common.checkpoints.packaged import PACKAGED, fetch, packaged_file
from headrace_common.checkpoints.sentences import transformer_folder
from headrace_common.checkpoints.small_file import unreadable_refused
from headrace_common.checkpoints.spec import has_processor, refuse_others
from headrace_common.errors import ModelError

MINI = "headrace-mini"
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?")


@unreadable_refused()
def find_model(
    model: str, revision: str | None = None, on_progress: OnProgress | None = None
) -> Path:
    """The folder of the model that comes with the package, or is named by its path, hub id or a
    name in PACKAGED.

    What is elsewhere and not in the cache is downloaded, which may take long.
    """
    if (folder := _own_folder(model)) is not None:
        if not os.path.isfile(folder / "config.json"):
            refuse_others(folder, repr(model))
            message = f"{model!r} has no config.json; give the folder of a model."
            raise ModelError(message, "model_corrupt")
        return folder
    if model in PACKAGED:
        return gguf_folder(fetch(model, on_progress))
    if is_hub_id(model):
        repo, quantization = _parts(model)
        return _in(download(repo, revision, quantization, on_progress), quantization, repo)
    raise ModelError(
        f"No model folder {model!r} was found; give the path of a folder with "
        f"config.json and safetensors files, a GGUF file, a hub id (owner/name), {MINI}, or "
        f"{' or '.join(PACKAGED)}, which comes from the package index.",
        "model_not_found",
    )


def fetch_model(
    model: str, revision: str | None = None, on_progress: OnProgress | None = None
) -> str:
    """Return the path of a model on this machine, after its download if it must be fetched.

    Unlike `find_model` this opens none of the model's files, and does not convert a GGUF file. The
    path may have a quantization behind a colon, as `find_model` takes it.
    """
    if model == MINI or place_of(model) is not None:
        return model
    if model in PACKAGED:
        return str(fetch(model, on_progress))
    repo, quantization = _parts(model)
    folder = str(download(repo, revision, quantization, on_progress))
    return folder if quantization is None else f"{folder}:{quantization}"


def find_here(model: str, revision: str | None = None) -> Path | None:
    """Finds the folder without the network: None if it is not there, or must be downloaded."""
    folder = _own_folder(model)
    if folder is None and model in PACKAGED:
        file = packaged_file(model)
        return file and gguf_folder(file)
    if folder is not None or not is_hub_id(model):
        return folder
    repo, quantization = _parts(model)
    found = cached(repo, revision, quantization)
    return found and _in(found, quantization, repo)


def place_of(model: str) -> Path | None:
    """The file or folder that the name stands for, there or not; None for a name that is no path.

    A folder's links are followed. A file's are not: in the hub's cache they lead to bare digests.
    """
    if model == MINI:
        return None
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        return path.resolve()
    if os.path.isfile(path):
        return Path(os.path.abspath(path))
    before, colon, name = model.rpartition(":")
    folder = Path(os.path.expanduser(before))
    if colon and os.path.isdir(folder):
        with contextlib.suppress(ModelError):
            return choose_file(folder.resolve(), name)
    return None if can_be_fetched(model) else Path(os.path.abspath(path))


def may_have_images(model: str, revision: str | None = None) -> bool:
    """Whether the model's folder has a processor of images, or is still to be downloaded.

    This looks for names of files and opens none: the gateway's event loop may call it.
    """
    folder = place_of(model)
    if folder is None and is_hub_id(model):
        repo, quantization = _parts(model)
        folder = cached(repo, revision, quantization)
        if folder is None:
            return True
    return folder is not None and has_processor(folder)


def is_hub_id(model: str) -> bool:
    """Whether a name looks like a hub id, perhaps with a GGUF quantization behind a colon.

    A folder of that name takes precedence.
    """
    return bool(_HUB_ID.fullmatch(model))


def can_be_fetched(model: str) -> bool:
    """Whether a name is one of a hub or of PACKAGED. A folder of that name takes precedence."""
    return model in PACKAGED or is_hub_id(model)


def _parts(model: str) -> tuple[str, str | None]:
    found = _HUB_ID.fullmatch(model)
    assert found is not None
    return found[1], found[2]


def _own_folder(model: str) -> Path | None:
    if model == MINI:
        return Path(__file__).parent / "mini"
    path = Path(os.path.expanduser(model))
    if os.path.isfile(path):
        if path.suffix == ".gguf":
            return gguf_folder(path.resolve())
        raise ModelError(
            f"{model!r} is a file, and of single files those are served whose names end in .gguf; "
            "give the folder with config.json and safetensors files.",
            "model_not_found",
        )
    if os.path.isdir(path):
        return _in(path.resolve(), None, model)
    before, colon, quantization = model.rpartition(":")
    folder = Path(os.path.expanduser(before))
    return _in(folder.resolve(), quantization, before) if colon and os.path.isdir(folder) else None


def _in(folder: Path, quantization: str | None, given: str) -> Path:
    """The folder itself, or the one with the weights: in it, or made for a GGUF file in it."""
    if quantization is None and any(folder.glob("*.safetensors")):
        return folder
    has_files = quantization is not None or any(folder.glob("*.gguf"))
    if has_files:
        return gguf_folder(choose_file(folder, quantization, given))
    return transformer_folder(folder) or folder
