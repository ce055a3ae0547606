"""Finds the folder of a model by name; never imports torch.

Functions of os.path check the names, because these functions accept any text. Methods of Path
raise errors for too long names and for the home folder of an unknown user.
"""

import contextlib
import os
import re
from pathlib import Path

from headrace_common.checkpoints.catalog import catalog, hub_id_of
from headrace_common.checkpoints.gguf_folder import choose_file, gguf_folder, model_files
from headrace_common.checkpoints.gguf_vision import find_mmproj
from headrace_common.checkpoints.hub import OnProgress, ask, cached, download
from headrace_common.checkpoints.package_index import PACKAGED, fetch, packaged_file
from headrace_common.checkpoints.sentence_transformers import transformer_folder
from headrace_common.checkpoints.small_file import unreadable_refused
from headrace_common.checkpoints.spec import has_processor, refuse_others
from headrace_common.config.sources import nearest
from headrace_common.errors import ModelError

MINI = "headrace-mini"
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?")


@unreadable_refused()
def find_model(
    model: str,
    revision: str | None = None,
    on_progress: OnProgress | None = None,
    mmproj: str = "auto",
) -> Path:
    """Return the folder of a model. Downloads the model if it is not on this machine.

    `model` is the name of the built-in model, a path, a hub id or a name in the catalog. `mmproj`
    is the setting of this name.
    """
    if (folder := _own_folder(model, mmproj)) is not None:
        if not os.path.isfile(folder / "config.json"):
            refuse_others(folder, repr(model))
            message = f"{model!r} has no config.json; give the folder of a model."
            raise ModelError(message, "model_corrupt")
        return folder
    if model in PACKAGED:
        return gguf_folder(fetch(model, on_progress), mmproj)
    if is_hub_id(model):
        repo, quantization = _parts(model)
        found = download(repo, revision, quantization, on_progress, mmproj)
        return _in(found, quantization, repo, mmproj)
    raise ModelError(
        f"No model folder {model!r} was found{nearest(model, (MINI, *catalog()))} Give the path of "
        f"a folder with config.json and safetensors files, a GGUF file, a hub id (owner/name), or "
        "a name that `headrace models available` lists.",
        "model_not_found",
    )


def fetch_model(
    model: str,
    revision: str | None = None,
    on_progress: OnProgress | None = None,
    mmproj: str = "auto",
) -> str:
    """Return the path of a model on this machine. Downloads the model if it is missing.

    Unlike `find_model`, this function neither opens the model's files nor converts a GGUF file. The
    path may end with a colon and a quantization; `find_model` accepts such a path.
    """
    if model == MINI or place_of(model) is not None:
        return model
    if model in PACKAGED:
        return str(fetch(model, on_progress))
    repo, quantization = _parts(model)
    folder = str(download(repo, revision, quantization, on_progress, mmproj))
    return folder if quantization is None else f"{folder}:{quantization}"


def find_here(model: str, revision: str | None = None, mmproj: str = "auto") -> Path | None:
    """Find a model's folder without the network.

    Returns None if the model is not on this machine.
    """
    folder = _own_folder(model, mmproj)
    if folder is None and model in PACKAGED:
        file = packaged_file(model)
        return file and gguf_folder(file, mmproj)
    if folder is not None or not is_hub_id(model):
        return folder
    repo, quantization = _parts(model)
    found = cached(repo, revision, quantization)
    return found and _in(found, quantization, repo, mmproj)


def ask_hub(model: str, revision: str | None = None) -> None:
    """Ask the hub for a model, without downloading it. Does nothing for a packaged model.

    Raises ModelError if the hub has no such model or refuses it, and HubUnreachable if the hub
    gives no usable answer.
    """
    if model not in PACKAGED:
        ask(_parts(model)[0], revision)


def draft_model(draft: str | None) -> str | None:
    """Return the model that `--draft` names; None if it names none."""
    return None if draft in ("mtp", "off") else draft


def place_of(model: str) -> Path | None:
    """Return the path that a name stands for, even if nothing exists at that path.

    Returns None for a name that is not a path. Symbolic links to folders are resolved. Symbolic
    links to files are kept, because files in the hub's cache have hashes as names.
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


def may_have_images(model: str, revision: str | None = None, mmproj: str = "auto") -> bool:
    """Whether the model has an image processor or a vision part, or is not downloaded yet.

    This function only checks which files exist, so the gateway's event loop may call it.
    """
    folder = place_of(model)
    if folder is None and is_hub_id(model):
        repo, quantization = _parts(model)
        folder = cached(repo, revision, quantization)
        if folder is None:
            return True
    if folder is None or has_processor(folder):
        return folder is not None
    is_file = folder.suffix == ".gguf"
    if not is_file and not (os.path.isdir(folder) and model_files(folder)):
        return False
    file = folder if is_file else folder / "model.gguf"
    return mmproj not in ("auto", "none") or find_mmproj(file, mmproj) is not None


def is_hub_id(model: str) -> bool:
    """Whether a name stands for a model of the hub.

    It is a hub id, perhaps with a GGUF quantization after a colon, or a short name in the catalog.
    Callers must first look for a folder of that name, which takes precedence.
    """
    return bool(_HUB_ID.fullmatch(hub_id_of(model)))


def can_be_fetched(model: str) -> bool:
    """Whether a name stands for a model of the hub or of the package index.

    Callers must first look for a folder with this name, because a folder takes precedence.
    """
    return model in PACKAGED or is_hub_id(model)


def _parts(model: str) -> tuple[str, str | None]:
    found = _HUB_ID.fullmatch(hub_id_of(model))
    assert found is not None
    return found[1], found[2]


def _own_folder(model: str, mmproj: str) -> Path | None:
    if model == MINI:
        return Path(__file__).parent / "mini"
    path = Path(os.path.expanduser(model))
    if os.path.isfile(path):
        if path.suffix == ".gguf":
            # If the path is a link, the vision part is beside the link, not beside its target.
            return gguf_folder(Path(os.path.abspath(path)), mmproj)
        raise ModelError(
            f"{model!r} is a file, but only GGUF files can be served without a folder; "
            "give the folder with config.json and safetensors files.",
            "model_not_found",
        )
    if os.path.isdir(path):
        return _in(path.resolve(), None, model, mmproj)
    before, colon, quantization = model.rpartition(":")
    folder = Path(os.path.expanduser(before))
    if not colon or not os.path.isdir(folder):
        return None
    return _in(folder.resolve(), quantization, before, mmproj)


def _in(folder: Path, quantization: str | None, given: str, mmproj: str) -> Path:
    """Return the folder with the weights.

    The result is `folder` itself, a subfolder, or a folder that is made for a GGUF file.
    """
    has_tensors = quantization is None and any(folder.glob("*.safetensors"))
    if not has_tensors and (quantization is not None or model_files(folder)):
        return gguf_folder(choose_file(folder, quantization, given), mmproj)
    if mmproj not in ("auto", "none"):
        raise ModelError(
            f"--mmproj is for GGUF files, but {given!r} has none; the vision part of other models "
            "is in their own folder. Omit --mmproj."
        )
    return folder if has_tensors else transformer_folder(folder) or folder
