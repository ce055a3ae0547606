"""Finds a model's tokenizer.json.

Older tokenizer files are converted once. The result is stored in the user's cache.
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from headrace_common.checkpoints.small_file import read_small
from headrace_common.errors import ModelError
from headrace_common.system.file_systems import cache_folder

VOCABULARIES = (
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_SOURCES = (
    *VOCABULARIES,
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "config.json",
)
MAX_FILE = 128 << 20  # bytes of a tokenizer.json; the largest known file has 35 MB
_MAX_SECONDS = 600
_MAX_SOURCE = 128 << 20  # bytes of one file


def tokenizer_file(folder: Path) -> Path:
    """Return the path of the folder's tokenizer.json, or of a converted tokenizer.json.

    Raises ModelError if the folder has no tokenizer that can be converted.
    """
    if (folder / "tokenizer.json").exists():
        return folder / "tokenizer.json"
    found = [name for name in VOCABULARIES if (folder / name).exists()]
    if not found:
        raise ModelError(
            "The model has no tokenizer: tokenizer.json is missing, and so are "
            f"{', '.join(VOCABULARIES)}; download the model again, or put one of these files "
            "next to config.json.",
            "tokenizer_invalid",
        )
    converted = _cache() / f"{_digest(folder)}.json"
    if not converted.exists():
        _convert(folder, converted, found)
    return converted


def _convert(folder: Path, target: Path, found: list[str]) -> None:
    """Convert into a temporary folder next to the target, then rename the result.

    Another server may convert the same files at the same time.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as own:
        out = Path(own) / target.name
        module = "headrace_common.checkpoints.convert_tokenizer"
        command = [sys.executable, "-m", module, str(folder), str(out)]
        try:
            subprocess.run(
                command,
                check=True,
                timeout=_MAX_SECONDS,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            out.replace(target)
        except (subprocess.SubprocessError, OSError) as error:
            raise ModelError(
                f"The model has no tokenizer.json, and its {found[0]} cannot be converted; save "
                "the tokenizer with a current version of transformers.",
                "tokenizer_invalid",
            ) from error


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        file = folder / name
        if file.exists():
            data = read_small(file, _MAX_SOURCE)
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _cache() -> Path:
    return cache_folder("tokenizers")
