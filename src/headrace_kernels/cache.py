"""Stores compiled kernels in a folder that all checkouts and processes of a user share.

The folder's name is a hash of the kernels' sources, the compiler and the processor, so the stored
code never becomes stale. Each file is written under a temporary name and then renamed. So two
processes may write the same file at the same time.
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
# Only the most recently used folders are kept, at most this many.
_MOST = 16
_DIGEST_BYTES = 32
_SUFFIX = ".kernel"


class KernelCache:
    """The cached machine code of one kernel, with the methods that Numba's CFunc calls."""

    def __init__(self, function: Callable[[Any], None], folder: Path | None) -> None:
        name = f"{function.__module__}.{function.__qualname__}{_SUFFIX}"
        self._file = None if folder is None else folder / name

    @property
    def has_code(self) -> bool:
        """Return whether the code is stored and intact."""
        return self._read() is not None

    def load_overload(self, sig: Any, context: Any) -> Any:
        if (data := self._read()) is None:
            return None
        # Loaded code needs only this part of Numba's runtime. The other parts serve compilation.
        rtsys.initialize(context)
        return CompileResult._rebuild(context, *pickle.loads(data))

    def save_overload(self, sig: Any, result: Any) -> None:
        """Store the machine code if there is a folder."""
        if self._file is None or result.library.has_dynamic_globals:
            return
        data = dumps(result._reduce())
        # An OSError means, for example, that the disk is full. The next process then compiles the
        # kernel again.
        with contextlib.suppress(OSError):
            with tempfile.NamedTemporaryFile(dir=self._file.parent, delete=False) as file:
                file.write(hashlib.sha256(data).digest() + data)
            Path(file.name).replace(self._file)

    def _read(self) -> bytes | None:
        """Return the data that `save_overload` wrote, or None if it is missing or damaged."""
        try:
            found = self._file.read_bytes() if self._file else b""
        except OSError:
            return None
        data = found[_DIGEST_BYTES:]
        is_whole = data and hashlib.sha256(data).digest() == found[:_DIGEST_BYTES]
        return data if is_whole else None


class KeptCode(NamedTuple):
    """The folder with the stored machine code, and the size of the stored code.

    `num_kernels` and `num_bytes` count only the code for these sources, this compiler and this
    processor.
    """

    folder: Path
    num_kernels: int
    num_bytes: int
    # The bytes of code for other sources, compilers or processors.
    others_bytes: int


def kept_code() -> KeptCode | None:
    """Return what is stored, or None if nothing can be stored.

    If nothing can be stored, each process compiles the kernels again.
    """
    if (folder := kernel_folder()) is None:
        return None
    sizes = [file.stat().st_size for file in folder.glob("*" + _SUFFIX)]
    others = sum(it.stat().st_size for it in folder.parent.glob(f"*/*{_SUFFIX}"))
    return KeptCode(folder, len(sizes), sum(sizes), others - sum(sizes))


@cache
def kernel_folder() -> Path | None:
    """Return the folder for these sources, compiler and processor, or None if none is writable."""
    key = _key(Path(__file__).parent)
    for base in _bases():
        if _can_write(base / key):
            os.utime(base / key)
            _prune(base)
            return base / key
    return None


def digest(folder: Path) -> str:
    """Return a hash of the names and contents of the folder's Python files."""
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
    """Yield the parent folders to try, in order of preference."""
    if stated := config.CACHE_DIR:  # type: ignore[attr-defined]
        yield Path(stated) / _NAME
    # The user may have no home directory.
    with contextlib.suppress(RuntimeError):
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _NAME
    own = Path(tempfile.gettempdir()) / f"{_NAME}-{os.getuid()}"
    with contextlib.suppress(OSError):
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        # A folder that another user can write to could contain that user's code.
        if found.st_uid == os.getuid() and not found.st_mode & 0o022:
            yield own


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _prune(base: Path) -> None:
    """Remove the least recently used folders.

    A process that uses code from a removed folder already has the code in memory.
    """
    with contextlib.suppress(OSError):
        by_use = sorted(base.iterdir(), key=lambda it: it.stat().st_mtime, reverse=True)
        for folder in by_use[_MOST:]:
            shutil.rmtree(folder, ignore_errors=True)
