"""POST /infill, llama.cpp's route: text that belongs between what stands before and behind it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.protocols import requests
from headrace.protocols.fields.kinds import Array, Kind, Object, String
from headrace.protocols.framing import SSE
from headrace.protocols.llamacpp import answers as llama
from headrace.protocols.llamacpp.answers import LlamaBody, LlamaFrames
from headrace.protocols.openai import chunks as openai
from headrace.protocols.openai.completions import ends_of_gap
from headrace.text.text_model import TextModel
from headrace_common.request import Infill, Prompt, Request, Route

ROUTE: Route = "/infill"
SUMMARY = "Fill in a text's middle"
ID_PREFIX = "infill-"
REQUIRED: tuple[str, ...] = ("input_prefix", "input_suffix")
_MAX_FILES = 1024
_SIDES: Mapping[str, Kind] = {
    "input_prefix": String(),
    "input_suffix": String(),
    "prompt": String(),
    "input_extra": Array(Object({"filename": String(), "text": String()}), _MAX_FILES),
}
TABLE: Mapping[str, Kind] = {**_SIDES, **llama.FIELDS}
IN_PROMPTS = frozenset(_SIDES)
KEYS: tuple[str, ...] = ("index", "content", "tokens", "stop", "model", "stop_type", "timings")
ERRORS = openai.ERRORS
FRAMING = SSE


def read(body: dict[str, Any]) -> dict[str, Any]:
    """The given fields, checked as far as they need no model."""
    return llama.read(TABLE, REQUIRED, body)


def to_prompts(fields: dict[str, Any]) -> tuple[Prompt, ...]:
    """As llama.cpp has it, `prompt` is what was typed at the gap: more of the text before it."""
    files = tuple(
        (file.get("filename", ""), file.get("text", "")) for file in fields.get("input_extra", ())
    )
    before = fields["input_prefix"] + fields.get("prompt", "")
    return (Infill(before, fields["input_suffix"], files),)


def to_request(fields: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel) -> Request:
    """The request, by the model's limits and with its defaults."""
    request = requests.make_request(ROUTE, prompts, fields, model)
    stops = request.sampling.stop_token_ids + ends_of_gap(prompts, model, "input_suffix")
    sampling = msgspec.structs.replace(
        request.sampling, stop_token_ids=stops, num_logprobs=fields.get("n_probs") or None
    )
    return msgspec.structs.replace(request, sampling=sampling)


frames, response_body = LlamaFrames, LlamaBody
