"""The shape of chat completions: what a choice looks like in a chunk and in the whole answer."""

from collections.abc import Sequence
from typing import Any

from headrace.gateway.shape import Choice, Part
from headrace.streams.events import ChoiceEnd, TokenLogprob
from headrace.streams.record import Record


class ChatShape:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_prompt_in_choice = False

    def __init__(self, record: Record) -> None:
        self._num_choices = record.request.num_choices
        self._has_logprobs = record.request.sampling.num_logprobs is not None

    def opening(self) -> list[Choice]:
        """A role chunk per choice."""
        role = {"role": "assistant", "content": ""}
        return [
            {"index": i, "delta": role, "finish_reason": None} for i in range(self._num_choices)
        ]

    def idle(self, index: int) -> Choice:
        return {"index": index, "delta": {}, "finish_reason": None}

    def part(self, index: int, part: Part) -> Choice:
        shown: Choice = {"index": index, "delta": {"content": part.text} if part.text else {}}
        if self._has_logprobs:
            shown["logprobs"] = _logprobs(part.logprobs)
        return shown | {"finish_reason": None}

    def end(self, index: int, end: ChoiceEnd) -> Choice:
        idle = self.idle(index)
        return idle | {"finish_reason": end.finish_reason, "stop_reason": end.stop_reason}

    def whole(self, index: int, parts: Sequence[Part], end: ChoiceEnd) -> Choice:
        text = "".join(part.text for part in parts)
        entries = [entry for part in parts for entry in part.logprobs]
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": _logprobs(entries) if self._has_logprobs else None,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }


def _logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [_entry(e) | {"top_logprobs": [_entry(top) for top in e.top]} for e in entries]
    return {"content": content, "refusal": None}


def _entry(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.bytes)}
