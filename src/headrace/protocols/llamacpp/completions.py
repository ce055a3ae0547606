"""POST /completion and /infill, llama.cpp's routes: reads bodies, renders chunks and answers."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headrace.protocols import requests
from headrace.protocols.dialect import Dialect, ErrorFormat, data, encode
from headrace.protocols.fields import samplers
from headrace.protocols.fields.common import COMMON, read_common
from headrace.protocols.fields.kinds import Array, Integer, Kind, Object, String
from headrace.protocols.framing import SSE, Framing
from headrace.protocols.openai import chunks as openai
from headrace.protocols.openai import completions as openai_completions
from headrace.protocols.openai.completions import Prompts, ends_of_gap
from headrace.streams.events import (
    Accepted,
    AnyEvent,
    ChoiceEnd,
    Error,
    Finish,
    Heartbeat,
    Progress,
    Queued,
    TokenLogprob,
    Tokens,
)
from headrace.streams.record import Record
from headrace.streams.usage import UsageCounter
from headrace.text.text_model import TextModel
from headrace_common.request import Infill, Prompt, Request, Route
from headrace_common.sampling import PLAIN_ORDER, Sampling

_FIELDS: Mapping[str, Kind] = {
    **COMMON,
    "n": Integer(1, 1),
    "n_predict": Integer(low=0, also=(-1,)),
    "n_probs": Integer(0, 20),
}
_MAX_FILES = 1024
_SIDES: Mapping[str, Kind] = {
    "input_prefix": String(),
    "input_suffix": String(),
    "prompt": String(),
    "input_extra": Array(Object({"filename": String(), "text": String()}), _MAX_FILES),
}


def settings_of(sampling: Sampling) -> dict[str, Any]:
    """Return the settings of a request under llama.cpp's names; leave out unsupported settings.

    Settings of mirostat and DRY are included only if they differ from the defaults.
    """
    longest = -1 if sampling.max_tokens is None else sampling.max_tokens
    settings: dict[str, Any] = {
        "n_predict": longest,
        "max_tokens": longest,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": sampling.repeat_last_n,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "typical_p": sampling.typical_p,
        "top_n_sigma": sampling.top_n_sigma,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "dynatemp_range": sampling.dynatemp_range,
        "dynatemp_exponent": sampling.dynatemp_exponent,
        "min_keep": sampling.min_keep,
        "ignore_eos": sampling.ignore_eos,
        "n_probs": sampling.num_logprobs or 0,
        "samplers": sampling.samplers or PLAIN_ORDER,
    }
    for name in samplers.SETTINGS:
        value = getattr(sampling, name)
        if name not in settings and value != getattr(_DEFAULTS, name):
            settings[name] = value
    return settings


_DEFAULTS = Sampling()


class _Answer:
    """Counts the tokens of one choice, and renders the choice's chunks."""

    def __init__(self, record: Record, index: int) -> None:
        self._record = record
        self._index = index
        self._num_predicted = 0
        self._num_cached = 0
        self._has_new_line = False

    def feed(self, event: Tokens | Progress) -> None:
        if isinstance(event, Progress):
            self._num_cached = event.cache
            return
        self._num_predicted += len(event.ids)
        self._has_new_line = self._has_new_line or "\n" in event.text

    def chunk(self, text: str = "", ids: tuple[int, ...] = (), **more: Any) -> bytes:
        head = {"index": self._index, "content": text, "tokens": ids, "stop": False}
        return data(encode(head | self._counts() | more))

    def ended(self, end: ChoiceEnd, text: str, ids: Any) -> dict[str, Any]:
        """Return the last chunk of the choice; the caller adds the timings of the request."""
        request = self._record.request
        settings = {"stop": request.stop, "stream": request.response_options.stream}
        return {
            "index": self._index,
            "content": text,
            "tokens": ids,
            "stop": True,
            "model": request.shown_model,
            **self._counts(),
            "tokens_cached": self._num_cached,
            "generation_settings": settings_of(request.sampling) | settings,
            "has_new_line": self._has_new_line,
            "truncated": False,
            "stop_type": _stop_type(end),
            "stopping_word": end.stop_reason if isinstance(end.stop_reason, str) else "",
        }

    def _counts(self) -> dict[str, int]:
        prompt = self._record.prompts[self._index] if self._record.prompts else b""
        return {"tokens_predicted": self._num_predicted, "tokens_evaluated": len(prompt) // 4}


def _answers(record: Record) -> list[_Answer]:
    return [_Answer(record, index) for index in range(record.request.num_choices)]


class LlamaFrames:
    """Renders chunks of text. The last chunk of each choice has `stop` and the timings."""

    def __init__(self, record: Record) -> None:
        self._options = record.request.response_options
        self._answers = _answers(record)
        self._tally = UsageCounter()

    def render(self, event: AnyEvent) -> list[bytes]:
        self._tally.feed(event)
        match event:
            case Tokens():
                return self._tokens(event)
            case Error():
                return [openai.ERRORS.frame(event)]
            case Accepted():
                return [self.idle()] if self._options.heartbeat else []
            case Heartbeat():
                fields = openai.wait_of(event) if self._options.return_progress else {}
                return [self._answers[0].chunk(**fields)] if self._options.heartbeat else []
            case Queued() if self._options.return_progress:
                return [self._answers[0].chunk(queue=openai.queue_of(event))]
            case Progress():
                return self._progress(event)
        return []

    def idle(self) -> bytes:
        """Return a heartbeat: a valid frame that adds nothing to the answer."""
        return self._answers[0].chunk()

    def _progress(self, event: Progress) -> list[bytes]:
        answer = self._answers[event.choice]
        answer.feed(event)
        shown = openai.progress_of(event)
        return [answer.chunk(prompt_progress=shown)] if self._options.return_progress else []

    def _tokens(self, event: Tokens) -> list[bytes]:
        answer = self._answers[event.choice]
        answer.feed(event)
        frames = []
        if event.text or event.ids:
            more: dict[str, Any] = {}
            if self._options.timings_per_token:
                more["timings"] = openai.timings_of(self._tally.timings)
            if event.logprobs:
                more["completion_probabilities"] = probabilities_of(event.logprobs)
            frames.append(answer.chunk(event.text, event.ids, **more))
        if event.end:
            last = answer.ended(event.end, "", ())
            timings = {"timings": openai.timings_of(self._tally.timings)}
            frames.append(data(encode(last | timings)))
        return frames


class LlamaBody:
    """Collects the whole answer: an object, or an array if several prompts were sent."""

    def __init__(self, record: Record) -> None:
        self._answers = _answers(record)
        self._texts: list[list[str]] = [[] for _ in self._answers]
        self._ids: list[list[int]] = [[] for _ in self._answers]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in self._answers]
        self._finish: Finish | None = None

    def feed(self, event: AnyEvent) -> None:
        match event:
            case Tokens():
                self._answers[event.choice].feed(event)
                self._texts[event.choice].append(event.text)
                self._ids[event.choice] += event.ids
                self._logprobs[event.choice] += event.logprobs
            case Progress():
                self._answers[event.choice].feed(event)
            case Finish():
                self._finish = event

    def whole(self) -> Any:
        assert self._finish, "a whole answer is read before its stream has ended"
        timings = {"timings": openai.timings_of(self._finish.timings)}
        all_of_them = [
            self._ended(index, end) | timings for index, end in enumerate(self._finish.ends)
        ]
        return all_of_them[0] if len(self._answers) == 1 else all_of_them

    def _ended(self, index: int, end: ChoiceEnd) -> dict[str, Any]:
        text, ids = "".join(self._texts[index]), self._ids[index]
        shown = self._answers[index].ended(end, text, ids)
        if logprobs := self._logprobs[index]:
            shown["completion_probabilities"] = probabilities_of(logprobs)
        return shown


def probabilities_of(entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Return each token with the likeliest tokens at its position."""
    return [_entry(one) | {"top_logprobs": [_entry(top) for top in one.top]} for one in entries]


def _entry(one: TokenLogprob) -> dict[str, Any]:
    shown = {"id": one.token_id, "token": one.token, "bytes": list(one.bytes)}
    return shown | {"logprob": one.logprob}


def _stop_type(end: ChoiceEnd) -> str:
    if end.finish_reason == "length":
        return "limit"
    return "word" if isinstance(end.stop_reason, str) else "eos"


class _LlamaDialect:
    """The common parts of /completion and /infill."""

    REQUIRED: tuple[str, ...]
    TABLE: Mapping[str, Kind]
    ERRORS: ErrorFormat = openai.ERRORS
    FRAMING: Framing = SSE

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that a body sets, after every check that needs no model."""
        fields = read_common(self.TABLE, self.REQUIRED, body)
        limits = (fields.pop("n_predict", -1), fields.get("max_tokens", -1))
        fields["max_tokens"] = min((limit for limit in limits if limit != -1), default=-1)
        return fields

    def frames(self, record: Record) -> LlamaFrames:
        return LlamaFrames(record)

    def response_body(self, record: Record) -> LlamaBody:
        return LlamaBody(record)


class LlamaCompletion(_LlamaDialect):
    """POST /completion: continues prompts. A prompt is a text or a list of token ids."""

    ROUTE: Route = "/completion"
    SUMMARY = "Continue a text, as llama.cpp's server does"
    ID_PREFIX = "llcmpl-"
    REQUIRED: tuple[str, ...] = ("prompt",)
    TABLE: Mapping[str, Kind] = {"prompt": Prompts(), **_FIELDS}
    IN_PROMPTS = frozenset({"prompt"})
    # Empty because the answer to several prompts is an array.
    KEYS: tuple[str, ...] = ()

    def to_prompts(self, fields: dict[str, Any]) -> tuple[Prompt, ...]:
        return openai_completions.to_prompts(fields)

    def to_request(
        self, fields: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel
    ) -> Request:
        """Make the request with the model's defaults. Raise RequestError if a limit is exceeded."""
        num_logprobs = fields.get("n_probs") or None
        return requests.make_request(self.ROUTE, prompts, fields, model, num_logprobs)


class LlamaInfill(_LlamaDialect):
    """POST /infill: fills the gap between two texts."""

    ROUTE: Route = "/infill"
    SUMMARY = "Fill in a text's middle"
    ID_PREFIX = "infill-"
    REQUIRED: tuple[str, ...] = ("input_prefix", "input_suffix")
    TABLE: Mapping[str, Kind] = {**_SIDES, **_FIELDS}
    IN_PROMPTS = frozenset(_SIDES)
    KEYS: tuple[str, ...] = (
        "index",
        "content",
        "tokens",
        "stop",
        "model",
        "stop_type",
        "timings",
    )

    def to_prompts(self, fields: dict[str, Any]) -> tuple[Prompt, ...]:
        """Return the gap as a prompt, in which the text before the gap ends with `prompt`."""
        files = tuple(
            (file.get("filename", ""), file.get("text", ""))
            for file in fields.get("input_extra", ())
        )
        before = fields["input_prefix"] + fields.get("prompt", "")
        return (Infill(before, fields["input_suffix"], files),)

    def to_request(
        self, fields: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel
    ) -> Request:
        """Make the request with the model's defaults. Raise RequestError if a limit is exceeded."""
        num_logprobs = fields.get("n_probs") or None
        request = requests.make_request(self.ROUTE, prompts, fields, model, num_logprobs)
        stops = request.sampling.stop_token_ids + ends_of_gap(prompts, model, "input_suffix")
        sampling = msgspec.structs.replace(request.sampling, stop_token_ids=stops)
        return msgspec.structs.replace(request, sampling=sampling)


COMPLETION: Dialect = LlamaCompletion()
INFILL: Dialect = LlamaInfill()
