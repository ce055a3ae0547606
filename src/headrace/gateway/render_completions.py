"""The shape of text completions: what a choice looks like in a chunk and in the whole answer."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.gateway.shape import Choice, Part
from headrace.streams.events import ChoiceEnd, TokenLogprob
from headrace.streams.record import Record


class TextShape:
    whole_object = "text_completion"
    chunk_object = "text_completion"
    has_prompt_in_choice = True

    def __init__(self, record: Record) -> None:
        self._has_logprobs = record.request.sampling.num_logprobs is not None
        self._offsets = [_Offsets() for _ in range(record.request.num_choices)]

    def opening(self) -> list[Choice]:
        """Nothing that a heartbeat would not say."""
        return []

    def idle(self, index: int) -> Choice:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def part(self, index: int, part: Part) -> Choice:
        offsets = self._offsets[index]
        logprobs = _logprobs([part], offsets) if self._has_logprobs else None
        return self.idle(index) | {"text": part.text, "logprobs": logprobs}

    def end(self, index: int, end: ChoiceEnd) -> Choice:
        idle = self.idle(index)
        return idle | {"finish_reason": end.finish_reason, "stop_reason": end.stop_reason}

    def whole(self, index: int, parts: Sequence[Part], end: ChoiceEnd) -> Choice:
        return self.end(index, end) | {
            "text": "".join(part.text for part in parts),
            "logprobs": _logprobs(parts, _Offsets()) if self._has_logprobs else None,
        }


class _Offsets:
    """Where each token begins, in code points from the start of the text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = 0  # code points of the tokens so far
        self._delivered = 0  # code points of the text so far

    def of(self, part: Part) -> Iterable[int]:
        """Offsets of the part's entries. Text decides where bytes and text disagree."""
        self._begun = min(self._begun, self._delivered)
        self._delivered += len(part.text)
        for entry in part.logprobs:
            is_inside = bool(self._decoder.getstate()[0])
            first = self._decoder.decode(entry.bytes[:1])
            # what does not continue an unfinished code point leaves U+FFFD in its place
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
    """The likeliest and the sampled one; where two tokens read alike, the likelier."""
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
