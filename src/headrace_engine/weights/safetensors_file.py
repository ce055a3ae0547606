"""Opens safetensors files with their library."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headrace_common.errors import ModelError


def open_safetensors(path: Path) -> Any:
    """Open a file as a context manager. Raises ModelError if the library refuses the header.

    The library refuses more than `headers.read_file`, for example unknown types of tensors that
    are not used, and repeated keys.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ModelError(
            f"{path.name} of {path.parent.name} is not a valid safetensors file; download it "
            "again, or save it again with the safetensors library.",
            "model_corrupt",
        ) from error
