"""Owns where machine code is kept: one folder for all checkouts and processes that would make it.

A folder's name stands for the kernels' sources, the compiler and the processor, so what is in it is
never stale. Files appear whole or not at all, so that two processes may write them at once.
"""

import contextlib
import hashlib
import os
import pickle
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite  # type: ignore[import-untyped]
import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba
from numba.core import config
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

_NAME = "headrace_kernels"
_MOST = 16  # folders; those that were used last are kept
_DIGEST_BYTES = 32
_SUFFIX = ".kernel"


class KernelCache:
    """One kernel's machine code, as numba.core.ccallback.CFunc asks for it."""

    def __init__(self, function: Callable[[Any], None], folder: Path | None) -> None:
        name = f"{function.__module__}.{function.__qualname__}{_SUFFIX}"
        self._file = None if folder is None else folder / name

    @property
    def has_code(self) -> bool:
        """Whether it would be found, and is whole."""
        return self._read() is not None

    def load_overload(self, sig: Any, context: Any) -> Any:
        if (data := self._read()) is None:
            return None
        rtsys.initialize(context)  # all that code needs; the rest is for who compiles
        return CompileResult._rebuild(context, *pickle.loads(data))

    def save_overload(self, sig: Any, result: Any) -> None:
        """Keeps it where that is possible."""
        if self._file is None or result.library.has_dynamic_globals:
            return
        data = dumps(result._reduce())
        with contextlib.suppress(OSError):  # a full disk, say: it is compiled again next time
            with tempfile.NamedTemporaryFile(dir=self._file.parent, delete=False) as file:
                file.write(hashlib.sha256(data).digest() + data)
            Path(file.name).replace(self._file)

    def _read(self) -> bytes | None:
        """The data that `save_overload` wrote; None if it is not there, or not whole."""
        try:
            found = self._file.read_bytes() if self._file else b""
        except OSError:
            return None
        data = found[_DIGEST_BYTES:]
        is_whole = data and hashlib.sha256(data).digest() == found[:_DIGEST_BYTES]
        return data if is_whole else None


class KeptCode(NamedTuple):
    """The machine code that is kept for these sources here, and the folder of all such folders."""

    folder: Path
    num_kernels: int
    num_bytes: int
    others_bytes: int  # of other sources, compilers and processors


def kept_code() -> KeptCode | None:
    """None if nothing can be kept: each process then compiles anew."""
    if (folder := kernel_folder()) is None:
        return None
    sizes = [file.stat().st_size for file in folder.glob("*" + _SUFFIX)]
    others = sum(it.stat().st_size for it in folder.parent.glob(f"*/*{_SUFFIX}"))
    return KeptCode(folder, len(sizes), sum(sizes), others - sum(sizes))


@cache
def kernel_folder() -> Path | None:
    """The folder for these sources, this compiler and this processor; None if there can be none."""
    key = _key(Path(__file__).parent)
    for base in _bases():
        if _can_write(base / key):
            os.utime(base / key)
            _prune(base)
            return base / key
    return None


def digest(folder: Path) -> str:
    """Over the names and contents of its files of Python."""
    whole = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        whole.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def _key(sources: Path) -> str:
    stated = config.CPU_NAME, config.CPU_FEATURES  # type: ignore[attr-defined]
    features = sorted(name for name, has in llvm.get_host_cpu_features().items() if has)
    processor = *stated, llvm.get_process_triple(), llvm.get_host_cpu_name(), features
    compiler = numba.__version__, llvmlite.__version__, platform.python_version()
    given = digest(sources), compiler, processor
    return hashlib.sha256(repr(given).encode()).hexdigest()[:32]


def _bases() -> Iterator[Path]:
    """Places for such folders, best first."""
    if stated := config.CACHE_DIR:  # type: ignore[attr-defined]
        yield Path(stated) / _NAME
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _NAME
    own = Path(tempfile.gettempdir()) / f"{_NAME}-{os.getuid()}"
    with contextlib.suppress(OSError):
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        if found.st_uid == os.getuid() and not found.st_mode & 0o022:  # nobody else can put code
            yield own


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _prune(base: Path) -> None:
    """Removes the folders that were not used for longest. Who runs their code has it in memory."""
    with contextlib.suppress(OSError):
        by_use = sorted(base.iterdir(), key=lambda it: it.stat().st_mtime, reverse=True)
        for folder in by_use[_MOST:]:
            shutil.rmtree(folder, ignore_errors=True)
