"""POST /completion, llama.cpp's route: goes on with a text, ids, or several of either."""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.protocols import requests
from headrace.protocols.fields.kinds import Kind
from headrace.protocols.framing import SSE
from headrace.protocols.llamacpp import answers as llama
from headrace.protocols.llamacpp.answers import LlamaBody, LlamaFrames
from headrace.protocols.openai import chunks as openai
from headrace.protocols.openai.completions import PromptList, Prompts
from headrace.text.text_model import TextModel
from headrace_common.request import Ids, Prompt, Request, Route, Text

ROUTE: Route = "/completion"
SUMMARY = "Continue a text, as llama.cpp has it"
ID_PREFIX = "llcmpl-"
REQUIRED: tuple[str, ...] = ("prompt",)
TABLE: Mapping[str, Kind] = {"prompt": Prompts(), **llama.FIELDS}
IN_PROMPTS = frozenset({"prompt"})
KEYS: tuple[str, ...] = ()  # several prompts are answered by an array
ERRORS = openai.ERRORS
FRAMING = SSE


def read(body: dict[str, Any]) -> dict[str, Any]:
    """The given fields, checked as far as they need no model."""
    return llama.read(TABLE, REQUIRED, body)


def to_prompts(fields: dict[str, Any]) -> tuple[Prompt, ...]:
    asked: PromptList = fields["prompt"]
    is_text = type(asked.prompts[0]) is str
    return tuple(Text(prompt) if is_text else Ids(prompt) for prompt in asked.prompts)


def to_request(fields: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel) -> Request:
    """The request, by the model's limits and with its defaults."""
    request = requests.make_request(ROUTE, prompts, fields, model)
    asked = fields.get("n_probs") or None
    sampling = msgspec.structs.replace(request.sampling, num_logprobs=asked)
    return msgspec.structs.replace(request, sampling=sampling)


frames, response_body = LlamaFrames, LlamaBody
