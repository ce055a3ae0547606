"""Reads what the names of GGUF files say: model, part, quantization."""

import re
from collections import Counter
from collections.abc import Iterable

# The number of file names in a message, and the number of characters of each name.
_SHOWN, _SHOWN_CHARS = 8, 80
_QUANTIZATION = re.compile(r"(?:^|[-_.])((?:IQ|TQ|Q)\d\w*|MXFP4\w*|BF16|F16|F32)$", re.IGNORECASE)


def which_file(given: str, files: Iterable[str]) -> str:
    """Return a message that lists some of the GGUF files and says how to choose a file."""
    names = sorted(labels(files).values())
    if not names:
        return f"{given} has no GGUF files; leave out the colon and the part after it."
    shown = ", ".join(name[:_SHOWN_CHARS] for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    example = f"{given}:{names[0]}"
    return f"{given} has {len(names)} GGUF files ({shown}{more}); name one, as in {example}."


def matching(files: Iterable[str], wanted: str) -> list[str]:
    """Return the files with this name, with or without .gguf, including all parts.

    If no file has this name, return the files with this quantization.
    """
    files = list(files)
    named = [name for name in files if stem_of(name) == stem_of(wanted)]
    return named or [name for name in files if quantization_of(name) == wanted.upper()]


def labels(files: Iterable[str]) -> dict[str, str]:
    """Return a short label for each model, by the name of the model's first file.

    The label is the quantization if no other model has the same quantization. Otherwise the label
    is the file's name without a part number.
    """
    firsts: dict[str, str] = {}
    for name in sorted(files):
        firsts.setdefault(stem_of(name), name)
    kinds = Counter(quantization_of(name) for name in firsts.values())
    return {
        name: kind if (kind := quantization_of(name)) and kinds[kind] == 1 else f"{stem}.gguf"
        for stem, name in firsts.items()
    }


def stem_of(name: str) -> str:
    """Return the name of a GGUF file without its extension and part number."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name)


def quantization_of(name: str) -> str | None:
    """Return the quantization in a file's name, such as Q4_K_M for model-Q4_K_M.gguf.

    Returns None if the name has no quantization.
    """
    found = _QUANTIZATION.search(stem_of(name))
    return found[1].upper() if found else None


def base_of(name: str) -> str:
    """Return the name of a GGUF file without its extension, part number and quantization."""
    return _QUANTIZATION.sub("", stem_of(name))
