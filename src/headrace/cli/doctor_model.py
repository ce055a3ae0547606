"""The doctor's look at one model: its files, its text, its lane, and what fits."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.checkpoints.find import find_here, find_model, is_hub_id
from headrace.checkpoints.headers import read_headers
from headrace.checkpoints.spec import read_spec
from headrace.cli.finding import Finding
from headrace.core.config import ModelConfig
from headrace.core.errors import HeadraceError, ModelError
from headrace.core.messages import Ready
from headrace.core.request import Chat
from headrace.runner.lanes.lane import Lane
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

_GREETING = "Good morning"


def findings(config: ModelConfig) -> Iterator[Finding]:
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
    return Finding("model", "ok", f"{detail}, {size >> 20} MiB of {spec.dtype}")


def _text(folder: Path, config: ModelConfig) -> Iterator[Finding]:
    tokenizer = Tokenizer.load(folder)
    token_ids = list(tokenizer.encode(_GREETING, False))
    back = tokenizer.decode(token_ids, False)
    detail = f"{tokenizer.vocab_size} tokens; {_GREETING!r} is {len(token_ids)} of them"
    if back == _GREETING:
        yield Finding("tokenizer", "ok", detail)
    else:
        yield Finding("tokenizer", "warn", f"{detail}, which read {back!r}")
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

    reason = "it has an implementation of its own"
    try:
        choose_lane(read_spec(folder), "native-text")
    except ModelError as error:
        reason = str(error)
    runner, ready = load_runner(msgspec.structs.replace(config, model=str(folder)), folder)
    if config.lane != "auto":
        reason = "as asked"
    yield Finding("lane", "ok", f"{ready.lane} on {ready.device} in {ready.dtype}: {reason}")
    yield Finding("weights", "ok", _weights(folder, config, ready))
    per_token, per_sequence = cache_bytes(runner.lane, ready.layout.block_size)
    yield Finding("cache", "ok", f"{per_token} bytes a token, {per_sequence} more a sequence")
    yield Finding("streams", "ok", _fit(ready))


def _weights(folder: Path, config: ModelConfig, ready: Ready) -> str:
    import torch

    from headrace.runner.footprint import footprint

    dtype, device = getattr(torch, ready.dtype), torch.device(ready.device)
    to_int8 = config.quantize == "int8"
    needed = footprint(read_spec(folder), dtype, ready.lane, device, to_int8)
    return f"{needed}, in {'int8 and ' if to_int8 else ''}{ready.dtype}"


def cache_bytes(lane: Lane, block_size: int) -> tuple[int, int]:
    """Of a token and, beside them, of a sequence: from what the lane makes of two budgets."""
    small, large = 1 << 30, 1 << 31
    lengths = [lane.layout(b, 1, 1 << 40, block_size).max_positions for b in (small, large)]
    per_token = round((large - small) / max(1, lengths[1] - lengths[0]))
    fixed = small - lengths[0] * per_token
    return per_token, fixed if fixed > block_size * per_token else 0  # less is a rest, not a cost


def _fit(ready: Ready) -> str:
    layout = ready.layout
    whole = layout.max_positions
    num = layout.num_slots
    if layout.num_blocks:
        num = layout.num_blocks // max(1, layout.blocks_for(whole))
    return f"{min(num, ready.max_num_seqs)} of {whole} tokens, {ready.max_num_seqs} shorter ones"
