"""A short name for exactly these weights as they are served; reads a sample, not all of them."""

import hashlib

from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.version import __version__

_SAMPLE_BYTES = 64 << 10


def fingerprint(spec: ModelSpec, dtype: str, device: str) -> str:
    """12 hex digits over version, config, tensor headers, a sample of each shard, form."""
    digest = hashlib.sha256(f"{__version__} {dtype} {device}".encode())
    digest.update((spec.folder / "config.json").read_bytes())
    for name in spec.weight_files:
        with (spec.folder / name).open("rb") as file:
            header_bytes = _SAMPLE_BYTES  # of a GGUF; config.json holds what matters of its head
            if not name.endswith(".gguf"):
                header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header_bytes))
            size = file.seek(0, 2)
            for offset in (8 + header_bytes, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]
