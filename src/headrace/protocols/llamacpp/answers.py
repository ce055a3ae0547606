"""Common parts of llama.cpp's own generation routes: fields, chunks and whole answers."""

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.protocols.dialect import data, encode
from headrace.protocols.fields.common import COMMON, read_common
from headrace.protocols.fields.kinds import Integer, Kind
from headrace.protocols.openai import chunks as openai
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
from headrace.streams.tally import Tally
from headrace_common.sampling import PLAIN_ORDER, Sampling

FIELDS: Mapping[str, Kind] = {
    **COMMON,
    "n": Integer(1, 1),
    "n_predict": Integer(low=0, also=(-1,)),
    "n_probs": Integer(0, 20),
}


def read(
    table: Mapping[str, Kind], required: Iterable[str], body: dict[str, Any]
) -> dict[str, Any]:
    """The given fields, checked as far as they need no model."""
    fields = read_common(table, required, body)
    limits = (fields.pop("n_predict", -1), fields.get("max_tokens", -1))
    fields["max_tokens"] = min((limit for limit in limits if limit != -1), default=-1)
    return fields


def settings_of(sampling: Sampling) -> dict[str, Any]:
    """Settings of a request, or the defaults, by llama.cpp's names; those we lack are left out."""
    longest = -1 if sampling.max_tokens is None else sampling.max_tokens
    return {
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


class _Answer:
    """One choice of an answer so far."""

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
        """The last word on it; figures that are the whole request's are missing."""
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
    """Chunks of text, then for each prompt one with `stop` and the figures."""

    def __init__(self, record: Record) -> None:
        self._options = record.request.response_options
        self._answers = _answers(record)
        self._tally = Tally()

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
                told = openai.wait_of(event) if self._options.return_progress else {}
                return [self._answers[0].chunk(**told)] if self._options.heartbeat else []
            case Queued() if self._options.return_progress:
                return [self._answers[0].chunk(queue=openai.queue_of(event))]
            case Progress():
                return self._progress(event)
        return []

    def idle(self) -> bytes:
        """A heartbeat: parses as data, adds nothing."""
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
    """The whole answer: an object, or an array of them where several prompts were sent."""

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
        assert self._finish, "an answer is asked for before its end"
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
    """Each token with the likeliest in its place."""
    return [_entry(one) | {"top_logprobs": [_entry(top) for top in one.top]} for one in entries]


def _entry(one: TokenLogprob) -> dict[str, Any]:
    shown = {"id": one.token_id, "token": one.token, "bytes": list(one.bytes)}
    return shown | {"logprob": one.logprob}


def _stop_type(end: ChoiceEnd) -> str:
    if end.finish_reason == "length":
        return "limit"
    return "word" if isinstance(end.stop_reason, str) else "eos"
