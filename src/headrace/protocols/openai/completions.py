"""POST /v1/completions: turns bodies into requests, and events into chunks or an answer."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.protocols import requests
from headrace.protocols.fields.common import COMMON, TokenIds, read_common
from headrace.protocols.fields.kinds import (
    Array,
    Flag,
    Integer,
    Kind,
    String,
    check_count,
    wrong_type,
)
from headrace.protocols.framing import SSE
from headrace.protocols.openai import chunks as openai
from headrace.protocols.openai.chunks import Choice, ChunkBody, ChunkFrames, Part
from headrace.streams.events import ChoiceEnd, TokenLogprob
from headrace.streams.record import Record
from headrace.text.text_model import TextModel
from headrace_common.errors import RequestError
from headrace_common.request import Ids, Infill, Prompt, Request, Route, Text

ROUTE: Route = "/v1/completions"
SUMMARY = "Continue a text"
ID_PREFIX = "cmpl-"
REQUIRED: tuple[str, ...] = ("prompt",)
MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16
_IDS = TokenIds(least=1)
IN_PROMPTS = frozenset({"prompt", "add_special_tokens", "suffix"})


class PromptList(NamedTuple):
    """Prompts, which are either all texts or all tuples of token ids.

    `is_list` is true if the client sent an array of prompts.
    """

    prompts: tuple[Any, ...]
    is_list: bool


class Prompts(msgspec.Struct, frozen=True):
    """Reads one prompt or an array of prompts. A prompt is a string or an array of token ids."""

    def check(self, value: Any, path: str) -> PromptList:
        if type(value) is str:
            return PromptList((value,), False)
        if type(value) is not list:
            raise wrong_type(value, path, "a string or an array")
        if value and type(value[0]) in (int, float):
            return PromptList((_IDS.check(value, path),), False)
        check_count(len(value), path, 1, MAX_PROMPTS)
        first = type(value[0])
        prompts = tuple(_one(item, first, f"{path}[{i}]") for i, item in enumerate(value))
        return PromptList(prompts, True)

    def schema(self) -> dict[str, Any]:
        of_lists = [Array(kind, MAX_PROMPTS, 1).schema() for kind in (String(), _IDS)]
        return {"anyOf": [String().schema(), _IDS.schema(), *of_lists]}


TABLE: Mapping[str, Kind] = {
    "prompt": Prompts(),
    **COMMON,
    "max_tokens": Integer(low=0, also=(-1,)),
    "logprobs": Integer(0, 20),
    "echo": Flag(),
    "add_special_tokens": Flag(),
    "suffix": String(),
}

KEYS = openai.KEYS
ERRORS = openai.ERRORS
FRAMING = SSE


def read(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a body sets, after every check that needs no model."""
    limits = ("max_tokens", "max_completion_tokens")
    if all(body.get(name) is None for name in limits):
        body = body | {"max_tokens": DEFAULT_MAX_TOKENS}
    fields = read_common(TABLE, REQUIRED, body)
    if fields.get("suffix") and fields.get("echo"):
        message = "echo cannot repeat a prompt that has a suffix; send only echo or only suffix."
        raise RequestError("invalid_value", message, "echo")
    if fields.get("suffix") and type(fields["prompt"].prompts[0]) is not str:
        message = "A suffix needs a prompt that is text, not token ids."
        raise RequestError("invalid_value", message, "suffix")
    return fields


def to_request(fields: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel) -> Request:
    """Make the request with the model's defaults. Raise RequestError if a limit is exceeded."""
    echo, num_logprobs = fields.get("echo", False), fields.get("logprobs")
    request = requests.make_request(ROUTE, prompts, fields, model, num_logprobs)
    scores_prompt = echo and num_logprobs is not None
    sampling = msgspec.structs.replace(
        request.sampling,
        num_prompt_logprobs=num_logprobs if scores_prompt else None,
        stop_token_ids=request.sampling.stop_token_ids + ends_of_gap(prompts, model, "suffix"),
    )
    # Cached prompt tokens have no logits, so a scored prompt must not come from the cache.
    cache = request.cache_prompt and not scores_prompt
    return msgspec.structs.replace(request, sampling=sampling, echo=echo, cache_prompt=cache)


def to_prompts(fields: dict[str, Any]) -> tuple[Prompt, ...]:
    inputs: PromptList = fields["prompt"]
    if type(inputs.prompts[0]) is str:
        adds = fields.get("add_special_tokens", True)
        if suffix := fields.get("suffix"):
            return tuple(Infill(text, suffix, (), adds) for text in inputs.prompts)
        return tuple(Text(text, adds) for text in inputs.prompts)
    return tuple(Ids(ids) for ids in inputs.prompts)


def ends_of_gap(prompts: tuple[Prompt, ...], model: TextModel, field: str) -> tuple[int, ...]:
    """Return the tokens that end the text in a gap; an empty tuple if no prompt has a gap.

    Raise RequestError if a prompt has a gap, but the model has no infill marks.
    """
    if not any(isinstance(prompt, Infill) for prompt in prompts):
        return ()
    marks = model.tokenizer.infill_marks
    if marks is None:
        message = f"{field} needs a model that was trained to fill in the middle, and "
        message += f"{model.names[0]} has no tokens for this. Leave out {field}, or serve a model "
        message += "such as Qwen2.5-Coder."
        raise RequestError("unsupported_parameter", message, field)
    return marks.ends


def _one(value: Any, first: type[Any], path: str) -> Any:
    if type(value) is not first or first not in (str, list):
        raise wrong_type(value, path, "a string or an array of ids, like the first prompt")
    return value if first is str else _IDS.check(value, path)


class TextShape:
    whole_object = "text_completion"
    chunk_object = "text_completion"
    has_prompt_in_choice = True

    def __init__(self, record: Record) -> None:
        self._has_logprobs = record.request.sampling.num_logprobs is not None
        self._offsets = [_Offsets() for _ in range(record.request.num_choices)]

    def opening(self) -> list[Choice]:
        """Return no chunks: a text completion has no role to announce."""
        return []

    def idle(self, index: int) -> Choice:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def part(self, index: int, part: Part) -> Choice:
        offsets = self._offsets[index]
        logprobs = _logprobs([part], offsets) if self._has_logprobs else None
        return {"index": index, "text": part.text, "logprobs": logprobs, "finish_reason": None}

    def end(self, index: int, end: ChoiceEnd) -> Choice:
        idle = self.idle(index)
        return idle | {"finish_reason": end.finish_reason, "stop_reason": end.stop_reason}

    def whole(self, index: int, parts: Sequence[Part], end: ChoiceEnd) -> Choice:
        return self.end(index, end) | {
            "text": "".join([part.text for part in parts]),
            "logprobs": _logprobs(parts, _Offsets()) if self._has_logprobs else None,
        }


class _Offsets:
    """Computes where each token begins, in code points from the start of the text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The number of code points in the tokens so far.
        self._begun = 0
        # The number of code points in the text so far.
        self._delivered = 0

    def of(self, part: Part) -> Iterable[int]:
        """Yield each token's offset in the text.

        Offsets are counted from the tokens' bytes, but never exceed the length of the text.
        """
        self._begun = min(self._begun, self._delivered)
        self._delivered += len(part.text)
        for entry in part.logprobs:
            is_inside = bool(self._decoder.getstate()[0])
            first = self._decoder.decode(entry.bytes[:1])
            # If the previous token left a code point unfinished and this token does not continue
            # it, the text has U+FFFD before this token.
            yield self._begun + (is_inside and first.startswith("\ufffd"))
            self._begun += len(first) + len(self._decoder.decode(entry.bytes[1:]))


def _logprobs(parts: Sequence[Part], offsets: _Offsets) -> dict[str, Any]:
    entries = [entry for part in parts for entry in part.logprobs]
    return {
        "tokens": [_token(entry) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_top(entry) for entry in entries],
        "text_offset": [offset for part in parts for offset in offsets.of(part)],
    }


def _top(entry: TokenLogprob) -> dict[str, float | None] | None:
    """Map the texts of the likeliest tokens and the sampled token to log probabilities.

    If two tokens have the same text, the dict contains the likelier token.
    """
    if entry.logprob is None:
        return None
    top: dict[str, float | None] = {}
    for candidate in (*entry.top, entry):
        top.setdefault(_token(candidate), candidate.logprob)
    return top


def _token(entry: TokenLogprob) -> str:
    try:
        return entry.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.bytes)


def frames(record: Record) -> ChunkFrames:
    return ChunkFrames(record, TextShape(record))


def response_body(record: Record) -> ChunkBody:
    return ChunkBody(record, TextShape(record))
