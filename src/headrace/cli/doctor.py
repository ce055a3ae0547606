"""`headrace doctor`: what it looks at, and what it says; it changes nothing."""

import asyncio
import errno
import os
import platform
import re
import resource
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec

from headrace.checkpoints.find import find_here, find_model, is_hub_id
from headrace.checkpoints.headers import read_headers, text_side
from headrace.checkpoints.spec import read_spec
from headrace.cli import exits
from headrace.cli.state import is_redis, streams_folder
from headrace.core.config import HttpConfig, ModelConfig, ServerConfig
from headrace.core.errors import HeadraceError, ModelError
from headrace.core.layout import MemoryLayout
from headrace.core.messages import Ready
from headrace.core.request import Chat
from headrace.gateway.auth import Auth
from headrace.gateway.http_server import DESCRIPTORS_BESIDE
from headrace.generation.served import names_of
from headrace.runner.lanes.lane import Lane
from headrace.streams.state_dir import StateError
from headrace.text.encoder import Encoder
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

_WIDTH = 12
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
_SLOW_SYNC_MS = 50.0
_HEALTH_TIMEOUT_S = 2.0
_GREETING = "Good morning"

Verdict = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """`remedy` is empty where nothing needs one."""

    subject: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def doctor(config: ServerConfig, model: str | None, as_json: bool) -> int:
    """Prints each finding as it is made; the exit code says whether one is a fault."""
    found = []
    for finding in _examine(config, model):
        found.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print(msgspec.json.encode(found).decode())
    has_fault = any(finding.verdict == "fail" for finding in found)
    return exits.FAILED if has_fault else exits.DONE


def _examine(config: ServerConfig, model: str | None) -> Iterable[Finding]:
    yield from _machine(config)
    yield from _server(config)
    if model is None and len(config.models) == 1:
        return
    for one in config.models:
        for finding in _model(one):
            if len(config.models) > 1:
                subject = f"{names_of(one)[0]}: {finding.subject}"
                finding = msgspec.structs.replace(finding, subject=subject)
            yield finding


def _print(finding: Finding) -> None:
    print(f"{finding.verdict:<4}  {finding.subject:<{_WIDTH}}  {finding.detail}", flush=True)
    if finding.remedy:
        print(f"{'':<{_WIDTH + 8}}{finding.remedy}", flush=True)


# the machine: libraries, cores, memory, device


def _machine(config: ServerConfig) -> Iterator[Finding]:
    versions = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    yield Finding("libraries", "ok", f"Python {platform.python_version()}, {versions}")
    yield _processor()
    yield _threads(config.models[0].threads)
    yield from _device(config.models[0].device)


def _processor() -> Finding:
    sets = _instruction_sets()
    detail = f"{platform.machine()}, {_num_cores()} usable cores of {os.cpu_count()}"
    if sets:
        detail += f", {', '.join(sets)}"
    if platform.machine() == "x86_64" and "AVX2" not in sets:
        return Finding("processor", "warn", detail, "Without AVX2 it computes very slowly.")
    return Finding("processor", "ok", detail)


def _threads(wanted: int | None) -> Finding:
    cores = _num_cores()
    if wanted is not None and wanted > cores:
        remedy = f"Use {cores} or fewer: threads that share a core wait for each other."
        return Finding("threads", "warn", f"{wanted} threads on {cores} cores", remedy)
    return Finding("threads", "ok", f"{wanted or cores}")


def _device(wanted: str) -> Iterator[Finding]:
    import torch

    from headrace.runner.probe import free_bytes

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
    """Those that matter here, read from Linux; none elsewhere."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.is_file() else ""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = set(line[1].split()) if line else set()
    return [name for flag, name in _SETS.items() if flag in flags]


# the server: port, keys, descriptors, state directory


def _server(config: ServerConfig) -> Iterator[Finding]:
    yield _port(config.http)
    yield _keys(config.http)
    yield _descriptors(config)
    yield _state_dir(config)


def _port(http: HttpConfig) -> Finding:
    address = f"{http.host}:{http.port}"
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    try:
        socket.create_server((http.host, http.port), family=family).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return Finding("port", "fail", f"{address}: {error.strerror}", "Give another --host.")
        return _neighbour(http, address)
    return Finding("port", "ok", f"{address} is free")


def _neighbour(http: HttpConfig, address: str) -> Finding:
    """What has the port: a Headrace server and its health, or something else."""
    import httpx

    host = "127.0.0.1" if http.host == "0.0.0.0" else http.host
    try:
        scheme = "https" if http.ssl_certfile else "http"
        url = f"{scheme}://{host}:{http.port}/health"
        # whoever signed the certificate, and for which name
        answer = httpx.get(url, timeout=_HEALTH_TIMEOUT_S, verify=False)
        state = answer.json()["status"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        detail = f"{address} is in use by something else"
        return Finding("port", "warn", detail, "Stop it, or give --port.")
    verdict = "ok" if answer.status_code == 200 else "warn"
    detail = f"{address} has a running server, whose health is {state!r}"
    return Finding("port", verdict, detail)  # type: ignore[arg-type]


def _keys(http: HttpConfig) -> Finding:
    door = Auth(http)
    if door.num_keys:
        return Finding("keys", "ok", f"{door.num_keys} configured")
    if not door.is_open_to_all:
        return Finding("keys", "ok", "none, and only this machine is served")
    remedy = "Give it a key with HEADRACE_API_KEYS or --api-key-file."
    return Finding("keys", "warn", f"none, and {http.host} serves other machines", remedy)


def _descriptors(config: ServerConfig) -> Finding:
    wanted = config.http.max_connections + DESCRIPTORS_BESIDE
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # the server raises its own to it
    if 0 <= hard < wanted:
        remedy = f"Raise it for many connections: ulimit -Hn {wanted}"
        return Finding("descriptors", "warn", f"{hard} files at once", remedy)
    return Finding("descriptors", "ok", "enough for all connections")


def _state_dir(config: ServerConfig) -> Finding:
    if (url := config.streams.state_dir) is not None and is_redis(url):
        return _redis(url)
    wanted = streams_folder(config.streams.state_dir, config.http.port)
    if wanted is None:
        return Finding("state", "ok", "none: streams are kept in memory")
    existing = next(path for path in (wanted, *wanted.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        remedy = "Give a folder that you can write to with --state-dir, or none."
        return Finding("state", "fail", f"{wanted} cannot be written", remedy)
    sync_ms = _measure_sync(existing)
    detail = f"{wanted}, {sync_ms:.1f} ms to sync a page"
    if sync_ms > _SLOW_SYNC_MS:
        remedy = "Streams that opted in wait for each sync; a faster disk would help them."
        return Finding("state", "warn", detail, remedy)
    return Finding("state", "ok", detail)


def _redis(url: str) -> Finding:
    try:
        from headrace.streams.redis_link import risks_at
    except ModuleNotFoundError:
        return Finding("state", "fail", "no redis package", "pip install 'headrace[redis]'")
    try:
        risks = asyncio.run(risks_at(url))
    except StateError as error:
        return Finding("state", "fail", "Redis cannot be used", str(error))
    if risks:
        return Finding("state", "warn", "Redis can lose streams", " ".join(risks))
    return Finding("state", "ok", "Redis, which syncs every append")


def _measure_sync(folder: Path) -> float:
    """Median of a few syncs of a temporary file."""
    taken = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(5):
            file.write(bytes(4096))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(1000 * (time.perf_counter() - began))
    return sorted(taken)[len(taken) // 2]


# one model: its files, its text, its lane, and what fits


def _model(config: ModelConfig) -> Iterator[Finding]:
    """Stops at the first fault, since what follows builds on it."""
    try:
        folder = find_here(config.model, config.revision)
        if folder is None and is_hub_id(config.model):
            remedy = "It is downloaded when it is first served."
            yield Finding("model", "warn", f"{config.model} is not in the cache", remedy)
            return
        folder = folder or find_model(config.model)
        yield _files(folder)
        yield from _text(folder, config)
        yield from _computing(folder, config)
    except HeadraceError as error:
        yield Finding("model", "fail", str(error))


def _files(folder: Path) -> Finding:
    spec = read_spec(folder)
    headers = read_headers(spec)
    size = sum((folder / name).stat().st_size for name in spec.weight_files)
    detail = f"{spec.architecture}, {len(headers)} tensors in {len(spec.weight_files)} files"
    if beside := len(headers) - len(text_side(headers)):
        detail += f" ({beside} for other things than text, which are not read)"
    return Finding("model", "ok", f"{detail}, {size >> 20} MiB of {spec.dtype}")


def _text(folder: Path, config: ModelConfig) -> Iterator[Finding]:
    tokenizer = Tokenizer.load(folder)
    token_ids = list(tokenizer.encode(_GREETING, False))
    back = tokenizer.decode(token_ids, False)
    detail = f"{tokenizer.vocab_size} tokens; {_GREETING!r} is {len(token_ids)} of them"
    if back == _GREETING:
        yield Finding("tokenizer", "ok", detail)
    else:
        yield Finding("tokenizer", "warn", f"{detail}, which decode to {back!r}")
    file = Path(config.chat_template) if config.chat_template else None
    template = ChatTemplate.load(folder, tokenizer.special_tokens, file)
    if template is None:
        remedy = "Only /v1/completions will work; give one with --chat-template."
        yield Finding("template", "warn", "none", remedy)
        return
    rendered = template.render(Chat(({"role": "user", "content": _GREETING},)))
    yield Finding("template", "ok", f"renders a greeting as {len(rendered)} characters")


def _computing(folder: Path, config: ModelConfig) -> Iterator[Finding]:
    from headrace.runner.lanes.choose import choose_lane
    from headrace.runner.load import load_runner

    reason = "it has its own implementation"
    try:
        choose_lane(read_spec(folder), "native-text")
    except ModelError as error:
        reason = str(error)
    runner, ready = load_runner(msgspec.structs.replace(config, model=str(folder)), folder)
    if config.lane != "auto":
        reason = "as asked"
    yield Finding("lane", "ok", f"{ready.lane} on {ready.device} in {ready.dtype}: {reason}")
    yield Finding("kernels", "ok", f"{ready.kernels}: {ready.kernels_reason}")
    yield Finding("weights", "ok", _weights(folder, ready))
    if others := list(_smaller(folder, ready)):
        yield Finding("smaller", "ok", ", ".join(others))
    per_token, per_sequence = cache_bytes(runner.lane, ready.layout.block_size)
    yield Finding("cache", "ok", f"{per_token} bytes a token, {per_sequence} more a sequence")
    yield _ingestion(folder, ready)
    yield Finding("streams", "ok", _fit(ready) + _slots(ready.layout, per_sequence))


def _ingestion(folder: Path, ready: Ready) -> Finding:
    facts = ready.facts
    memory = f"{facts.memory}: {facts.why}" if facts.why else facts.memory
    mask = "no mask" if facts.mask == "none" else "a mask for each chunk"
    text = "streamed" if Encoder(Tokenizer.load(folder)).can_stream else "in one call"
    detail = f"in chunks, {mask}, long texts tokenized {text}; memory: {memory}"
    return Finding("prompts", "ok", detail)


def _weights(folder: Path, ready: Ready) -> str:
    import torch

    from headrace.runner.footprint import footprint

    dtype = getattr(torch, ready.dtype)
    needed = footprint(read_spec(folder), dtype, ready.kernels, ready.quantize)
    kept = {"none": "", "own": "the file's own bits and "}.get(
        ready.quantize, f"{ready.quantize} and "
    )
    return f"{needed}, in {kept}{ready.dtype}"


def _smaller(folder: Path, ready: Ready) -> Iterator[str]:
    """What the weights would take in forms of fewer bits."""
    import torch

    from headrace.runner.footprint import footprint

    if ready.kernels == "plain":
        return
    spec, dtype = read_spec(folder), getattr(torch, ready.dtype)
    held = footprint(spec, dtype, ready.kernels, ready.quantize).held
    for kind in ("int8", "int4"):
        needed = footprint(spec, dtype, ready.kernels, kind)
        if needed.held < held:
            yield f"{needed.held >> 20} MiB with --quantize {kind}"


def cache_bytes(lane: Lane, block_size: int) -> tuple[int, int]:
    """Bytes per token and further bytes per sequence, from the lane's layouts of two budgets."""
    small, large = 1 << 40, 1 << 41
    lengths = [lane.layout(b, 1, 1 << 60, block_size).max_positions for b in (small, large)]
    per_token = round((large - small) / max(1, lengths[1] - lengths[0]))
    fixed = small - lengths[0] * per_token
    if fixed <= block_size * per_token:
        return per_token, 0  # it is rounding, not a cost
    layout = lane.layout(small, 1, 1 << 60, block_size)
    return per_token, fixed // max(1, layout.num_slots + layout.num_snapshots)


def _slots(layout: MemoryLayout, per_sequence: int) -> str:
    """What bounds the streams of a model with states."""
    if not layout.num_blocks or not layout.num_slots:
        return ""
    size = f"{per_sequence / (1 << 20):.1f} MiB"
    kept = f"{layout.num_snapshots} more keep states that prompts with the same begin go on from"
    return f"; there are {layout.num_slots} slots of {size} for their states, and {kept}"


def _fit(ready: Ready) -> str:
    layout = ready.layout
    whole = layout.max_positions
    num = layout.num_slots
    if layout.num_blocks:
        num = layout.num_blocks // max(1, layout.blocks_for(whole))
    return f"{min(num, ready.max_num_seqs)} of {whole} tokens, or {ready.max_num_seqs} shorter ones"
