"""The findings of `headrace doctor` about the machine."""

import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec

from headrace_common.config.settings import ServerConfig

_LIBRARIES = ("headrace", "torch", "transformers", "tokenizers", "numba")
_SETS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 bf16",
    "amx_bf16": "AMX bf16",
    "asimd": "NEON",
    "bf16": "bf16",
    "sve": "SVE",
}
_MIN_FREE_BYTES = 1 << 30

Verdict = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """A line of the report. `remedy` is empty if no action is needed.

    `group` is machine, server, or the name of a model.
    """

    subject: str
    verdict: Verdict
    detail: str
    remedy: str = ""
    group: str = ""


def machine(config: ServerConfig) -> Iterator[Finding]:
    """Yield findings about libraries, cores, memory and device."""
    versions = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    yield Finding("libraries", "ok", f"Python {platform.python_version()}, {versions}")
    yield _processor()
    yield _threads(config.models[0].threads)
    yield _kernels()
    yield from _device(config.models[0].device)


def _processor() -> Finding:
    sets = _instruction_sets()
    detail = f"{platform.machine()}, {_num_cores()} usable cores of {os.cpu_count()}"
    if sets:
        detail += f", {', '.join(sets)}"
    if platform.machine() == "x86_64" and "AVX2" not in sets:
        return Finding("processor", "warn", detail, "Without AVX2, models run very slowly.")
    return Finding("processor", "ok", detail)


def _threads(wanted: int | Literal["auto"]) -> Finding:
    from headrace_engine.runner.probe import is_portable, num_threads

    cores = _num_cores()
    if wanted != "auto" and wanted > cores:
        remedy = f"Use at most {cores}: threads that share a core slow each other down."
        return Finding("threads", "warn", f"{wanted} threads on {cores} cores", remedy)
    why = ", which leaves one core of this laptop to you" * (wanted == "auto" and is_portable())
    return Finding("threads", "ok", f"{num_threads(wanted)}{why}")


def _kernels() -> Finding:
    """Report the compiled kernels in the cache. The first load of a model compiles them."""
    from headrace_kernels import kept_code

    if (found := kept_code()) is None:
        remedy = "Set XDG_CACHE_HOME to a writable folder; otherwise each start compiles again."
        return Finding("kernel code", "warn", "the cache folder is not writable", remedy)
    detail = f"{found.num_kernels} compiled, {found.num_bytes >> 10} KiB in {found.folder}"
    if found.others_bytes:
        detail += f"; {found.others_bytes >> 10} KiB of other versions"
    return Finding("kernel code", "ok", detail)


def _device(wanted: str) -> Iterator[Finding]:
    import torch

    from headrace_engine.runner.probe import free_bytes

    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        yield Finding("device", "fail", "PyTorch finds no CUDA device", "Use --device cpu.")
        return
    device = torch.device("cuda" if has_cuda and wanted != "cpu" else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    yield Finding("device", "ok", name)
    free = free_bytes(device)
    verdict, remedy = ("ok", "") if free >= _MIN_FREE_BYTES else ("warn", "Only small models fit.")
    yield Finding("memory", verdict, f"{free >> 20} MiB free", remedy)  # type: ignore[arg-type]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _instruction_sets() -> list[str]:
    """Return the instruction sets in _SETS that this processor has.

    Return none on systems without /proc/cpuinfo.
    """
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.is_file() else ""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = set(line[1].split()) if line else set()
    return [name for flag, name in _SETS.items() if flag in flags]
