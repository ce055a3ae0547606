"""`headrace doctor`: what it looks at, and what it says; it changes nothing."""

import asyncio
import errno
import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from headrace.cli import exits
from headrace.cli.capacity import cache_bytes, fit, on_disk, slots, smaller, weights
from headrace.cli.doctor_files import advice, choices, several
from headrace.cli.doctor_loss import loss
from headrace.cli.doctor_machine import Finding, Verdict, machine
from headrace.cli.load_lines import LoadLines
from headrace.cli.state import is_redis, streams_folder
from headrace.gateway.auth import Auth
from headrace.gateway.http_server import DESCRIPTORS_BESIDE
from headrace.streams.stores.state_dir import StateError
from headrace.text.encoder import Encoder
from headrace.text.model_names import told_apart
from headrace.text.output_splitter import HARMONY, reasoning_format
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_formats.generic import GENERIC
from headrace.text.tool_formats.table import tool_format
from headrace_common.checkpoints.find import can_be_fetched, find_here, find_model
from headrace_common.checkpoints.headers import read_headers, text_side
from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import HttpConfig, ModelConfig, ServerConfig
from headrace_common.errors import ConfigError, HeadraceError, ModelError
from headrace_common.loading import READING
from headrace_common.messages import Ready
from headrace_common.request import Chat
from headrace_common.without_engine import WITHOUT_ENGINE, has_engine

_WIDTH = 12
_SLOW_SYNC_MS = 50.0
_HEALTH_TIMEOUT_S = 2.0
_GREETING = "Good morning"


def doctor(config: ServerConfig, model: str | None, as_json: bool, text: Path | None = None) -> int:
    """Prints each finding as it is made; the exit code says whether one is a fault.

    `text`: what to measure the loss of fewer bits on.
    """
    if not has_engine():
        raise ConfigError(WITHOUT_ENGINE)
    found = []
    for finding in _examine(config, model, text):
        found.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print(msgspec.json.encode(found).decode())
    has_fault = any(finding.verdict == "fail" for finding in found)
    return exits.FAILED if has_fault else exits.DONE


def _examine(config: ServerConfig, model: str | None, text: Path | None) -> Iterable[Finding]:
    yield from machine(config)
    yield from _server(config)
    if model is None and len(config.models) == 1:
        return
    for one in told_apart(config.models):
        for finding in _model(one, text):
            if len(config.models) > 1:
                subject = f"{one.served_model_name[0]}: {finding.subject}"
                finding = msgspec.structs.replace(finding, subject=subject)
            yield finding


def _print(finding: Finding) -> None:
    print(f"{finding.verdict:<4}  {finding.subject:<{_WIDTH}}  {finding.detail}", flush=True)
    if finding.remedy:
        print(f"{'':<{_WIDTH + 8}}{finding.remedy}", flush=True)


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
    """Finds who has the port: a Headrace server and its health, or something else."""
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
    auth = Auth(http)
    if auth.num_keys:
        return Finding("keys", "ok", f"{auth.num_keys} configured")
    if not auth.is_open_to_all:
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
        from headrace.streams.stores.redis_link import risks_at
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


def _model(config: ModelConfig, text: Path | None) -> Iterator[Finding]:
    """Stops at the first fault, since what follows builds on it."""
    if files := several(config.model):
        found = []
        for one in choices(files, config):
            found.append(one)
            yield Finding(one.name, "ok" if one.fits else "warn", one.detail)
        is_one = any(one.fits for one in found)
        yield Finding("model", "ok" if is_one else "fail", advice(found, config.model))
        return
    try:
        folder = find_here(config.model, config.revision)
        if folder is None and can_be_fetched(config.model):
            remedy = "It is downloaded when it is first served."
            yield Finding("model", "warn", f"{config.model} is not in the cache", remedy)
            return
        folder = folder or find_model(config.model)
        yield _files(folder)
        yield _tokenizer(folder)
        yield from _computing(folder, config)
        if text is not None:
            with LoadLines(READING):
                words = loss(folder, config, text)
            yield Finding("loss", "ok", words)
    except HeadraceError as error:
        yield Finding("model", "fail", str(error))


def _files(folder: Path) -> Finding:
    spec = read_spec(folder)
    headers = read_headers(spec)
    size = sum((folder / name).stat().st_size for name in spec.weight_files)
    detail = f"{spec.architecture}, {len(headers)} tensors in {len(spec.weight_files)} files"
    if beside := len(headers) - len(text_side(headers)):
        detail += f" ({beside} for other things than text)"
    return Finding("model", "ok", f"{detail}, {size >> 20} MiB of {spec.dtype}")


def _tokenizer(folder: Path) -> Finding:
    tokenizer = Tokenizer.load(folder)
    token_ids = list(tokenizer.encode(_GREETING, False))
    back = tokenizer.decode(token_ids, False)
    detail = f"{tokenizer.vocab_size} tokens; {_GREETING!r} is {len(token_ids)} of them"
    if back == _GREETING:
        return Finding("tokenizer", "ok", detail)
    # encoders often see small letters only
    verdict: Verdict = "ok" if back == _GREETING.lower() else "warn"
    return Finding("tokenizer", verdict, f"{detail}, which decode to {back!r}")


def _template(folder: Path, config: ModelConfig) -> Finding:
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer.special_tokens, config.chat_template)
    if template is None:
        remedy = "Only /v1/completions will work; give one with --chat-template."
        return Finding("template", "warn", "none", remedy)
    rendered = template.render(Chat(({"role": "user", "content": _GREETING},)))
    is_harmony = reasoning_format(template.source) == HARMONY
    found = HARMONY if is_harmony else tool_format(template.tools_source)
    used = found if config.tool_format == "auto" else config.tool_format
    tools = f"tools: {used}" + (", since it knows none" if found == used == GENERIC else "")
    return Finding("template", "ok", f"renders a greeting as {len(rendered)} characters; {tools}")


def _computing(folder: Path, config: ModelConfig) -> Iterator[Finding]:
    from headrace_engine.runner.lanes.choose import choose_lane
    from headrace_engine.runner.load import load_runner

    reason = "it has its own implementation"
    try:
        choose_lane(read_spec(folder), "native-text")
    except ModelError as error:
        reason = str(error)
    with LoadLines(READING):
        runner, ready = load_runner(msgspec.structs.replace(config, model=str(folder)), folder)
    if "generate" in ready.tasks:
        yield _template(folder, config)
    else:
        yield Finding("tasks", "ok", f"{' and '.join(ready.tasks)}; it generates no text")
    if config.lane != "auto":
        reason = "as asked"
    yield Finding("lane", "ok", f"{ready.lane} on {ready.device} in {ready.dtype}: {reason}")
    yield Finding("kernels", "ok", f"{ready.kernels}: {ready.kernels_reason}")
    yield Finding("weights", "ok", weights(folder, ready))
    if ready.mapped_bytes:
        remedy = "With more free memory, or fewer bits (--quantize), nothing is read from disk."
        yield Finding("experts", "warn", on_disk(folder, ready), remedy)
    if others := list(smaller(folder, ready)):
        yield Finding("smaller", "ok", ", ".join(others))
    if ready.is_whole:
        yield Finding("cache", "ok", "none: nothing is kept from one step to the next")
        yield _ingestion(folder, ready)
        longest = ready.layout.max_positions
        yield Finding("inputs", "ok", f"{ready.max_num_seqs} of {longest} tokens in a step")
        return
    per_token, per_sequence = cache_bytes(runner.lane, ready.layout.block_size)
    yield Finding("cache", "ok", f"{per_token} bytes a token, {per_sequence} more a sequence")
    yield _ingestion(folder, ready)
    yield Finding("streams", "ok", fit(ready) + slots(ready.layout, per_sequence))


def _ingestion(folder: Path, ready: Ready) -> Finding:
    facts = ready.facts
    memory = f"{facts.memory}: {facts.why}" if facts.why else facts.memory
    mask = "no mask" if facts.mask == "none" else "a mask for each chunk"
    text = "streamed" if Encoder(Tokenizer.load(folder)).can_stream else "in one call"
    if ready.is_whole:
        detail = f"each whole, attending both ways, long texts tokenized {text}"
        return Finding("prompts", "ok", detail)
    if ready.source is not None:
        num = ready.source.num_units
        pieces = f"in up to {num} pieces" if ready.source.can_be_cut else "in a step of its own"
        detail = f"a source encoded {pieces}, long ones tokenized {text}; memory: {memory}"
        return Finding("prompts", "ok", detail)
    detail = f"in chunks, {mask}, long texts tokenized {text}{_images(ready)}; memory: {memory}"
    return Finding("prompts", "ok", detail)


def _images(ready: Ready) -> str:
    how = {
        "pieces": ", images seen in pieces of a few blocks",
        "whole": ", each image seen in a step of its own",
    }
    return how.get(ready.facts.encoder or "", "")
