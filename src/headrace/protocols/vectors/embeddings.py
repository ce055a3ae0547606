"""POST /v1/embeddings: turns a body into inputs, and vectors into parts of the answer."""

import base64
import math
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.protocols.dialect import encode
from headrace.protocols.fields.common import TokenIds, read_known
from headrace.protocols.fields.kinds import (
    Array,
    Flag,
    Integer,
    Kind,
    String,
    check_count,
    wrong_type,
    wrong_value,
)
from headrace.protocols.openai.completions import PromptList
from headrace.protocols.requests import check_ids
from headrace.text.text_model import TextModel
from headrace_common.checkpoints.sentence_transformers import SentenceSpec
from headrace_common.errors import RequestError
from headrace_common.messages import Ready
from headrace_common.request import Ids, Prompt, Route, Text
from headrace_common.vector_request import VectorRequest
from headrace_common.worker_jobs import CheckedBody, WriteVectors

ROUTE: Route = "/v1/embeddings"
KEYS = ("object", "data", "model", "usage")
REQUIRED: tuple[str, ...] = ("input",)
IN_PROMPTS = frozenset({"input", "prompt_name", "add_special_tokens"})
MAX_INPUTS = 2048
_TEXT, _IDS = String(least=1), TokenIds(least=1)


class Inputs(msgspec.Struct, frozen=True):
    """Reads one input or an array of inputs. An input is a string or an array of token ids.

    No input may be empty. With `least` 0, the schema still allows empty inputs, for a route that
    handles empty inputs before it calls `check`.
    """

    least: int = 1

    def check(self, value: Any, path: str) -> PromptList:
        if type(value) is str:
            return PromptList((_TEXT.check(value, path),), False)
        if type(value) is not list:
            raise wrong_type(value, path, "a string or an array")
        if value and type(value[0]) in (int, float):
            return PromptList((_IDS.check(value, path),), False)
        check_count(len(value), path, 1, MAX_INPUTS)
        kind: Kind = _TEXT if type(value[0]) is str else _IDS
        return PromptList(tuple(kind.check(it, f"{path}[{i}]") for i, it in enumerate(value)), True)

    def schema(self) -> dict[str, Any]:
        of_lists = [Array(kind, MAX_INPUTS, self.least).schema() for kind in (_TEXT, _IDS)]
        return {"anyOf": [String(least=self.least).schema(), _IDS.schema(), *of_lists]}


class NumberFormat(msgspec.Struct, frozen=True):
    """Reads the format in which the numbers of a vector are written."""

    def check(self, value: Any, path: str) -> str:
        if type(value) is not str:
            raise wrong_type(value, path, "a string")
        if value not in ("float", "base64"):
            raise wrong_value(value, path, '"float" or "base64"')
        return value

    def schema(self) -> dict[str, Any]:
        return {"enum": ["float", "base64"]}


TABLE: Mapping[str, Kind] = {
    "input": Inputs(),
    "model": String(least=1),
    "encoding_format": NumberFormat(),
    "dimensions": Integer(low=1, high=1 << 20),
    "prompt_name": String(least=1),
    "add_special_tokens": Flag(),
}


def read(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a body sets, after every check that needs no model."""
    return read_known(TABLE, REQUIRED, body)


def add_prompt(fields: dict[str, Any], sentences: SentenceSpec) -> None:
    """Put the named prompt, or the model's default prompt, before each text.

    Token ids stay unchanged. Raise RequestError if the model lacks the prompt or cannot use it.
    """
    named = fields.get("prompt_name")
    if named is not None and named not in sentences.prompts:
        there = ", ".join(sorted(sentences.prompts)) or "none"
        raise wrong_value(named, "prompt_name", f"one of the model's prompts ({there})")
    inputs: PromptList = fields["input"]
    are_texts = type(inputs.prompts[0]) is str
    if named is not None and not are_texts:
        message = "prompt_name needs texts as input; a prompt cannot be put before token ids."
        raise RequestError("invalid_value", message, "prompt_name")
    name = sentences.default_prompt if named is None else named
    prompt = "" if name is None else sentences.prompts[name]
    if not prompt or not are_texts:
        return
    if not sentences.covers_prompt:
        message = "The model's pooling leaves the prompt out, which is not supported; "
        message += "leave prompt_name out, or write the prompt into the input."
        raise RequestError("unsupported_operation", message, "prompt_name")
    fields["input"] = PromptList(tuple(prompt + text for text in inputs.prompts), inputs.is_list)


def to_prompts(fields: dict[str, Any]) -> tuple[Prompt, ...]:
    inputs: PromptList = fields["input"]
    if type(inputs.prompts[0]) is str:
        adds = fields.get("add_special_tokens", True)
        return tuple(Text(text, adds) for text in inputs.prompts)
    return tuple(Ids(ids) for ids in inputs.prompts)


def check(checked: CheckedBody, model: TextModel, ready: Ready | None) -> None:
    """Raise RequestError if the request exceeds what the model and its engine support."""
    check_ids(checked, model)
    size = ready.vector_size if ready is not None else 0
    _check_dimensions(checked.fields.get("dimensions"), size, model)


def to_request(checked: CheckedBody, owner: str, priority: int = 0) -> VectorRequest:
    """Make the request to embed; the inputs stay packed."""
    return VectorRequest(
        route=ROUTE,
        task="embed",
        packed=checked.packed,
        field="input",
        is_list=checked.fields["is_list"],
        model=checked.fields.get("model"),
        owner=owner,
        ahead=checked.ahead,
        priority=priority,
        digest=checked.digest,
    )


def _check_dimensions(wanted: int | None, size: int, model: TextModel) -> None:
    """Raise RequestError unless vectors of `size` may be shortened to `wanted`."""
    if wanted is None or not size or wanted == size:
        return
    allowed = None if model.cuts_any else model.sentences.dimensions
    if wanted > size:
        raise wrong_value(wanted, "dimensions", f"from 1 to {size}")
    if allowed is not None and wanted not in allowed:
        sizes = " or ".join(map(str, sorted({*allowed, size})))
        words = f"{sizes} (from the model's config.json), unless the server runs with "
        words += "--embedding-dimensions any"
        raise wrong_value(wanted, "dimensions", words)


def cut(vector: bytes, dimensions: int | None, is_unit: bool) -> "array[float]":
    """Return the first `dimensions` numbers of a packed vector.

    A vector that had unit length is scaled to unit length again.
    """
    values = array("f", vector)
    if dimensions is None or dimensions == len(values):
        return values
    head = values[:dimensions]
    if not is_unit:
        return head
    length = math.hypot(*head) or 1.0
    return array("f", [value / length for value in head])


def entries(packed: bytes, job: WriteVectors) -> bytes:
    """Return packed vectors as JSON, separated by commas, for the array in the answer."""
    parts = []
    for number, start in enumerate(range(0, len(packed), job.size), job.first):
        values = cut(packed[start : start + job.size], job.dimensions, job.are_units)
        if job.form == "bare":
            parts.append(encode(values.tolist()))
            continue
        shown: Any = values.tolist()
        if job.form == "base64":
            shown = base64.b64encode(values.tobytes()).decode()
        parts.append(encode({"object": "embedding", "index": number, "embedding": shown}))
    return b",".join(parts)
