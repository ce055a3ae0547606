"""Computes a short name for the exact weights that are served, from a sample of their bytes."""

import hashlib

from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.version import __version__

_SAMPLE_BYTES = 64 << 10


def fingerprint(spec: ModelSpec, dtype: str, device: str) -> str:
    """Return 12 hex digits that identify the weights and how they are served.

    The digits are a hash of Headrace's version, the dtype, the device, the config and a sample of
    each file. The sample includes the file's header, which lists the tensors.
    """
    digest = hashlib.sha256(f"{__version__} {dtype} {device}".encode())
    digest.update((spec.folder / "config.json").read_bytes())
    for name in spec.weight_files:
        with (spec.folder / name).open("rb") as file:
            # A GGUF file does not state the size of its header. The important parts of the header
            # are also in config.json, and the hash covers the whole config.json.
            header_bytes = _SAMPLE_BYTES
            if not name.endswith(".gguf"):
                header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header_bytes))
            size = file.seek(0, 2)
            for offset in (8 + header_bytes, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]
