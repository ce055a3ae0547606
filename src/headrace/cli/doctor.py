"""`headrace doctor`: examines this machine and a model without changing anything."""

import asyncio
import errno
import os
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.cli import exit_codes
from headrace.cli.capacity import cache_bytes, draft_model, fit, on_disk, slots, smaller, weights
from headrace.cli.doctor_files import (
    advice,
    choices,
    several,
    stored_formats,
    streams_that_fit,
    vision_part,
)
from headrace.cli.doctor_loss import loss
from headrace.cli.doctor_machine import Finding, Verdict, machine
from headrace.cli.doctor_report import MACHINE, SERVER, print_report
from headrace.cli.listener import find_neighbour, listen
from headrace.cli.load_lines import LoadLines
from headrace.cli.models import gigabytes
from headrace.cli.state import is_redis, streams_folder
from headrace.gateway.auth import Auth
from headrace.gateway.http_server import OTHER_DESCRIPTORS
from headrace.streams.stores.state_dir import StateError
from headrace.text.encoder import Encoder
from headrace.text.model_names import with_unique_names
from headrace.text.output_splitter import HARMONY, reasoning_format
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_formats.generic import GENERIC
from headrace.text.tool_formats.table import tool_format
from headrace_common.checkpoints.catalog import catalog, usable_bytes
from headrace_common.checkpoints.find import ask_hub, can_be_fetched, find_here, find_model
from headrace_common.checkpoints.headers import read_headers, text_side
from headrace_common.checkpoints.hub import HubUnreachable
from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import HttpConfig, ModelConfig, ServerConfig
from headrace_common.errors import ConfigError, HeadraceError, ModelError
from headrace_common.loading import READING
from headrace_common.messages import Ready
from headrace_common.plan import UNIT_ROWS
from headrace_common.request import Chat
from headrace_common.system.memory_limits import installed_bytes
from headrace_common.without_engine import WITHOUT_ENGINE, has_engine

if TYPE_CHECKING:
    from headrace_engine.runner.load import LoadPlan

_SLOW_SYNC_MS = 50.0
_GREETING = "Good morning"


def doctor(
    config: ServerConfig,
    model: str | None,
    as_json: bool,
    text: Path | None = None,
    loads: bool = False,
) -> int:
    """Print a verdict and the findings. The exit code says whether a finding is a failure.

    With `loads`, each model is loaded to check its kernels and to measure its cache. `text` is a
    file: doctor measures the perplexity of its text with smaller formats.
    """
    if not has_engine():
        raise ConfigError(WITHOUT_ENGINE)
    found = list(_examine(config, model, text, loads))
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        print_report(found)
    has_fault = any(finding.verdict == "fail" for finding in found)
    return exit_codes.FAILED if has_fault else exit_codes.DONE


def _examine(
    config: ServerConfig, model: str | None, text: Path | None, loads: bool
) -> Iterator[Finding]:
    yield from _grouped(machine(config), MACHINE)
    yield from _grouped(_server(config), SERVER)
    if model is None and len(config.models) == 1:
        return
    for one in with_unique_names(config.models):
        name = one.served_model_name[0]
        for finding in _grouped(_model(one, text, loads), name):
            if len(config.models) > 1:
                subject = f"{name}: {finding.subject}"
                finding = msgspec.structs.replace(finding, subject=subject)
            yield finding


def _grouped(findings: Iterable[Finding], group: str) -> Iterator[Finding]:
    for finding in findings:
        yield msgspec.structs.replace(finding, group=group)


# ---- The server: port, keys, descriptors, state directory ----


def _server(config: ServerConfig) -> Iterator[Finding]:
    yield _port(config.http)
    yield _keys(config.http)
    yield _descriptors(config)
    yield _state_dir(config)


def _port(http: HttpConfig) -> Finding:
    address = f"{http.host}:{http.port}"
    try:
        listen(http).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return Finding("port", "fail", f"{address}: {error.strerror}", "Choose another --host.")
        return _neighbour(http, address)
    return Finding("port", "ok", f"{address} is free")


def _neighbour(http: HttpConfig, address: str) -> Finding:
    """Describe the program on the port: a Headrace server and its health, or another program."""
    if (found := find_neighbour(http)) is None:
        detail = f"{address} is in use by another program"
        return Finding("port", "fail", detail, "Stop that program, or choose another --port.")
    detail = f"{address} already has a Headrace server; its health is {found.state!r}"
    remedy = "Choose another --port for a second server."
    if not found.is_healthy:
        remedy = "Stop that server, or choose another --port."
    return Finding("port", "warn", detail, remedy)


def _keys(http: HttpConfig) -> Finding:
    auth = Auth(http)
    if auth.num_keys:
        return Finding("keys", "ok", f"{auth.num_keys} configured")
    if not auth.is_open_to_all:
        return Finding("keys", "ok", "none needed: only this machine can connect")
    remedy = "Set a key with HEADRACE_API_KEYS or --api-key-file."
    return Finding(
        "keys", "warn", f"none, although {http.host} is reachable from other machines", remedy
    )


def _descriptors(config: ServerConfig) -> Finding:
    wanted = config.http.max_connections + OTHER_DESCRIPTORS
    # The server raises its soft limit to its hard limit.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < wanted:
        remedy = f"For many connections, raise the limit: ulimit -Hn {wanted}"
        return Finding("descriptors", "warn", f"at most {hard} open files", remedy)
    return Finding("descriptors", "ok", "enough for all connections")


def _state_dir(config: ServerConfig) -> Finding:
    if (url := config.streams.state_dir) is not None and is_redis(url):
        return _redis(url)
    wanted = streams_folder(config.streams.state_dir, config.http.port)
    if wanted is None:
        return Finding("state", "ok", "none: streams are kept in memory")
    existing = next(path for path in (wanted, *wanted.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        remedy = "Choose a folder that you can write to with --state-dir, or --state-dir none."
        return Finding("state", "fail", f"{wanted} cannot be written", remedy)
    sync_ms = _measure_sync(existing)
    detail = f"{wanted}, {sync_ms:.1f} ms to sync a page"
    if sync_ms > _SLOW_SYNC_MS:
        remedy = "Resumable streams wait for each sync, so a faster disk would help."
        return Finding("state", "warn", detail, remedy)
    return Finding("state", "ok", detail)


def _redis(url: str) -> Finding:
    try:
        from headrace.streams.stores.redis_link import risks_at
    except ModuleNotFoundError:
        return Finding(
            "state", "fail", "no redis package", "Run pip install '.[redis]' in the checkout."
        )
    try:
        risks = asyncio.run(risks_at(url))
    except StateError as error:
        return Finding("state", "fail", "Redis cannot be used", str(error))
    if risks:
        return Finding("state", "warn", "Redis can lose streams", " ".join(risks))
    return Finding("state", "ok", "Redis, which syncs every append")


def _measure_sync(folder: Path) -> float:
    """Return the median time of five syncs of a temporary file, in milliseconds."""
    taken = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(5):
            file.write(bytes(4096))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(1000 * (time.perf_counter() - began))
    return sorted(taken)[len(taken) // 2]


# ---- One model: its files, tokenizer, template, lane and memory ----


def _model(config: ModelConfig, text: Path | None, loads: bool) -> Iterator[Finding]:
    """Examine a model. Stop at the first failure, because later findings depend on it."""
    if files := several(config.model):
        found = []
        for one in choices(files, config):
            found.append(one)
            yield Finding(one.name, "ok" if one.fits else "warn", one.detail)
        is_one = any(one.fits for one in found)
        yield Finding("model", "ok" if is_one else "fail", advice(found, config.model))
        return
    try:
        folder = find_here(config.model, config.revision, config.mmproj)
        if folder is None and can_be_fetched(config.model):
            yield _missing(config.model, config.revision)
            return
        folder = folder or find_model(config.model, mmproj=config.mmproj)
        yield _files(folder)
        if (vision := vision_part(read_spec(folder), config)) is not None:
            yield vision
        yield _tokenizer(folder)
        yield from _loaded(folder, config) if loads else _planned(folder, config)
        if text is not None:
            with LoadLines(READING):
                words = loss(folder, config, text)
            yield Finding("loss", "ok", words)
    except HeadraceError as error:
        yield Finding("model", "fail", str(error))


def _missing(model: str, revision: str | None) -> Finding:
    """Describe a model that is not downloaded. The catalog knows the size of some models.

    Raises ModelError if the hub has no such model or refuses it.
    """
    try:
        ask_hub(model, revision)
        remedy = "It will be downloaded when it is first served."
    except HubUnreachable as unreachable:
        remedy = str(unreachable)
    detail = f"{model} has not been downloaded"
    if (entry := catalog().get(model)) is None:
        return Finding("model", "warn", f"{detail}, so whether it fits is unknown", remedy)
    usable = usable_bytes(installed_bytes())
    detail += f"; it needs about {gigabytes(entry.memory_bytes)} of memory, and "
    room = f"{gigabytes(usable)}, three quarters of this machine's memory"
    if entry.memory_bytes <= usable:
        return Finding("model", "warn", f"{detail}fits into {room}", remedy)
    remedy = "Choose a smaller model: headrace models available."
    return Finding("model", "warn", f"{detail}does not fit into {room}", remedy)


def _files(folder: Path) -> Finding:
    spec = read_spec(folder)
    headers = read_headers(spec)
    size = sum((folder / name).stat().st_size for name in spec.weight_files)
    num = len(spec.weight_files)
    files = "1 file" if num == 1 else f"{num} files"
    detail = f"{spec.architecture}, {len(headers)} tensors in {files}"
    if beside := len(headers) - len(text_side(headers)):
        detail += f" ({beside} of them not for text)"
    return Finding("model", "ok", f"{detail}, {size >> 20} MiB in {stored_formats(headers)}")


def _tokenizer(folder: Path) -> Finding:
    tokenizer = Tokenizer.load(folder)
    token_ids = list(tokenizer.encode(_GREETING, False))
    back = tokenizer.decode(token_ids, False)
    detail = f"{tokenizer.vocab_size} tokens; {_GREETING!r} takes {len(token_ids)}"
    if back == _GREETING:
        return Finding("tokenizer", "ok", detail)
    # Many encoder models convert their input to lower case.
    verdict: Verdict = "ok" if back == _GREETING.lower() else "warn"
    return Finding("tokenizer", verdict, f"{detail} and decodes to {back!r}")


def _template(folder: Path, config: ModelConfig) -> Finding:
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer.special_tokens, config.chat_template)
    if template is None:
        remedy = "Only /v1/completions will work; set a template with --chat-template."
        return Finding("template", "warn", "none", remedy)
    rendered = template.render(Chat(({"role": "user", "content": _GREETING},)))
    is_harmony = reasoning_format(template.source) == HARMONY
    found = HARMONY if is_harmony else tool_format(template.tools_source)
    used = found if config.tool_format == "auto" else config.tool_format
    tools = f"tools: {used}" + (
        " (the template does not support tools)" if found == used == GENERIC else ""
    )
    return Finding("template", "ok", f"a greeting becomes {len(rendered)} characters; {tools}")


def _why_this_lane(folder: Path, config: ModelConfig) -> str:
    from headrace_engine.runner.lanes.choose import choose_lane

    if config.lane != "auto":
        return "set by --lane"
    try:
        choose_lane(read_spec(folder), "native-text")
    except ModelError as error:
        return str(error)
    return "Headrace implements this architecture"


def _planned(folder: Path, config: ModelConfig) -> Iterator[Finding]:
    """Describe how the model would run, without loading it."""
    from headrace_engine.models.registry import has_head
    from headrace_engine.runner.load import plan_load
    from headrace_engine.runner.probe import free_bytes
    from headrace_engine.runner.room import stored_as

    plan = plan_load(config, folder, checks_kernels=False)
    traits = plan.lane_class.traits
    generates = not traits.has_kernels or has_head(plan.spec.architecture)
    if generates and not traits.is_whole:
        yield _template(folder, config)
    else:
        yield Finding("tasks", "ok", "the model generates no text; --load says what it computes")
    why = _why_this_lane(folder, config)
    yield Finding("lane", "ok", f"{traits.id} on {plan.device.type} in {plan.dtype}: {why}")
    kernels = f"{plan.kernels}: {plan.choice.reason}; --load compiles and checks the kernels"
    yield Finding("kernels", "ok", kernels)
    yield from _weights(folder, plan)
    if plan.draft is not None:
        stored = stored_as(plan.draft.quantize, plan.draft.dtype)
        detail = f"{plan.draft.name}: {plan.draft.weights} of weights in {stored}"
        yield Finding("draft", "ok", detail)
    detail = "--load measures how many fit"
    if traits.has_kernels and plan.device.type == "cpu":
        draft = plan.draft
        held = plan.weights.held + (draft.weights.held if draft else 0)
        num, longest = streams_that_fit(
            *(config, plan.spec, plan.lane_class, plan.torch_dtype.itemsize),
            free_bytes(plan.device) - held,
            draft.position_bytes if draft else 0,
        )
        fit = (
            "1 stream of {:,} tokens fits"
            if num == 1
            else f"{num} streams of {{:,}} tokens each fit"
        )
        detail = f"about {fit.format(longest)}; --load measures it"
    yield Finding("streams", "ok", detail)


def _weights(folder: Path, ready: "Ready | LoadPlan") -> Iterator[Finding]:
    yield Finding("weights", "ok", weights(folder, ready))
    if ready.mapped_bytes:
        remedy = (
            "With more free memory or fewer bits (--quantize), nothing would be read from disk."
        )
        yield Finding("experts", "warn", on_disk(folder, ready), remedy)
    if others := list(smaller(folder, ready)):
        yield Finding("smaller", "ok", ", ".join(others))


def _loaded(folder: Path, config: ModelConfig) -> Iterator[Finding]:
    """Load the model and describe how it runs."""
    from headrace_engine.runner.load import load_runner

    with LoadLines(READING):
        runner, ready = load_runner(msgspec.structs.replace(config, model=str(folder)), folder)
    if "generate" in ready.tasks:
        yield _template(folder, config)
    else:
        yield Finding("tasks", "ok", f"{' and '.join(ready.tasks)}; the model generates no text")
    why = _why_this_lane(folder, config)
    yield Finding("lane", "ok", f"{ready.lane} on {ready.device} in {ready.dtype}: {why}")
    yield Finding("kernels", "ok", f"{ready.kernels}: {ready.kernels_reason}")
    yield from _weights(folder, ready)
    if ready.draft is not None:
        yield Finding("draft", "ok", draft_model(ready.draft))
    if ready.is_whole:
        yield Finding("cache", "ok", "none: the model keeps nothing between steps")
        yield _ingestion(folder, ready)
        longest = ready.layout.max_positions
        yield Finding(
            "inputs",
            "ok",
            f"at most {ready.max_num_seqs} inputs of up to {longest} tokens per step",
        )
        return
    per_token, per_sequence = cache_bytes(runner.lane, ready.layout.block_size)
    stored = (
        "" if ready.kv_cache_dtype == "auto" else f", keys and values in {ready.kv_cache_dtype}"
    )
    size = f"{per_token} bytes per token, and {per_sequence} per sequence{stored}"
    yield Finding("cache", "ok", size)
    yield _ingestion(folder, ready)
    yield Finding("streams", "ok", fit(ready) + slots(ready.layout, per_sequence))


def _ingestion(folder: Path, ready: Ready) -> Finding:
    facts = ready.facts
    memory = f"{facts.memory}: {facts.why}" if facts.why else facts.memory
    mask = "no mask" if facts.mask == "none" else "a mask for each chunk"
    text = "streamed" if Encoder(Tokenizer.load(folder)).can_stream else "in one call"
    if ready.is_whole:
        detail = f"each in one piece, with bidirectional attention; long texts tokenized {text}"
        return Finding("prompts", "ok", detail)
    if ready.source is not None:
        pieces = "in one step"
        if ready.source.can_be_cut:
            tokens = f", {UNIT_ROWS} tokens or more at a time" if ready.source.num_cross else ""
            pieces = f"layer by layer{tokens}"
        detail = f"source encoded {pieces}, long texts tokenized {text}; memory: {memory}"
        return Finding("prompts", "ok", detail)
    detail = f"in chunks, {mask}, long texts tokenized {text}{_images(ready)}; memory: {memory}"
    return Finding("prompts", "ok", detail)


def _images(ready: Ready) -> str:
    how = {
        "pieces": ", images encoded a few layers at a time",
        "whole": ", each image encoded in a separate step",
    }
    return how.get(ready.facts.encoder or "", "")
