"""Measures the perplexity of a text with the original and with smaller formats of the weights."""

import math
from array import array
from pathlib import Path

import msgspec

from headrace.text.tokenizer import Tokenizer
from headrace_common.checkpoints.spec import is_mxfp4, read_spec
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError
from headrace_common.ids import SequenceId, SlotId
from headrace_common.loading import tell
from headrace_common.plan import NO_SLOT, Begin, Chunk, StepPlan
from headrace_common.sampling import Sampling

MAX_TOKENS = 1024
_CHUNK = 256
_MIN_TOKENS = 16


def loss(folder: Path, config: ModelConfig, text: Path) -> str:
    """Return a line with a text's perplexity for the original weights and each smaller format.

    Loads the model once per format. Raises ModelError if the text is too short, or if the lane
    supports only one format.
    """
    spec = read_spec(folder)
    words = text.read_text(errors="replace")
    limits = [n for n in (MAX_TOKENS, spec.max_positions, config.max_model_len) if n]
    ids = Tokenizer.load(folder).encode(words, True)[: min(limits)]
    if len(ids) < _MIN_TOKENS:
        raise ModelError(
            f"{text.name} has {len(ids)} tokens; use a text with at least {_MIN_TOKENS}."
        )
    kinds = ("int8", "int4") if config.quantize in ("auto", "none") else (config.quantize,)
    if (spec.is_gguf or is_mxfp4(spec.config)) and config.quantize == "auto":
        # The file's format has the same values as "none", but other kernels compute the products.
        kinds = ("auto", *kinds)
    plain = _mean_logprob(folder, config, "none", ids)
    parts = [f"none: perplexity {math.exp(-plain):.3f}"]
    for kind in kinds:
        mean = _mean_logprob(folder, config, kind, ids)
        name = "the file's own format" if kind == "auto" else kind
        parts.append(
            f"{name}: {math.exp(-mean):.3f} ({100 * math.expm1(plain - mean):+.2f} %, "
            f"{plain - mean:+.4f} per token)"
        )
    return f"{len(ids)} tokens of {text.name}: " + "; ".join(parts)


def _mean_logprob(folder: Path, config: ModelConfig, kind: str, ids: "array[int]") -> float:
    """Return the mean log probability of all tokens except the first."""
    from headrace_engine.runner.load import load_runner

    wanted = msgspec.structs.replace(
        config, quantize=kind, model=str(folder), max_model_len=len(ids)
    )
    runner, ready = load_runner(wanted, folder)
    tell("measuring")
    number = SequenceId(0)
    begin = Begin(number, ids, len(ids), 0, Sampling(num_prompt_logprobs=0))
    blocks = array("i", range(ready.layout.blocks_for(len(ids))))
    slot = SlotId(0) if ready.layout.num_slots else NO_SLOT
    runner.launch(StepPlan(begun=(begin,))).result()
    found: list[float] = []
    for start in range(0, len(ids), _CHUNK):
        length = min(_CHUNK, len(ids) - start)
        chunk = Chunk(number, start, length, length, (), blocks, slot)
        result = runner.launch(StepPlan(chunks=(chunk,))).result()
        if rows := result.chunks[0].prompt_logprobs:
            found += array("f", rows.values)
    return sum(found) / len(found)
