"""Named rules for values that differ between two recordings of the same revision."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """A pattern to replace. With `is_numbered`, equal matches in an answer get the same number.

    By these numbers, references within an answer are compared, too.
    """

    name: str
    pattern: re.Pattern[str]
    why: str
    is_numbered: bool = False


RULES = (
    Rule(
        "id",
        re.compile(
            r"(?<![0-9a-zA-Z])()([0-9a-f]{24}(?:[0-9a-f]{8})?|(?<=req_)[0-9a-f]{16})(?![0-9a-f])"
        ),
        "Ids of streams, requests, items, calls and files are random.",
        is_numbered=True,
    ),
    Rule(
        "time",
        re.compile(
            r'(":|")(1[0-9]{9}(?:\.[0-9]+)?(?=[,}])|20\d\d-\d\d-\d\dT[0-9:.]+(?:Z|\+00:00))'
        ),
        "Points in time, in seconds or as ISO 8601.",
    ),
    Rule(
        "duration",
        re.compile(
            r"""(["'](?!max_stall|stall_target)\w+(?:_ms|_duration|_second|_age_s)["']: ?)"""
            r"([0-9][0-9.e+-]*)"
        ),
        "Durations and rates depend on the machine and its load.",
    ),
    Rule(
        "size",
        re.compile(r'("total_bytes":|beyond the )([0-9]+)(?=[,}]| bytes)'),
        "A stream has as many bytes as its durations have digits.",
    ),
    Rule(
        "size",
        re.compile(r'("bytes":)([0-9]+)(?=[^{}]*"filename":"batch_)'),
        "A results file has as many bytes as its durations have digits.",
    ),
    Rule("seed", re.compile(r'("seed":)([0-9]{9,})'), "A seed is random if the request has none."),
    Rule("port", re.compile(r"(127\.0\.0\.1:)([0-9]{2,5})"), "Servers listen on a free port."),
    Rule(
        "folder",
        re.compile(r"()(/tmp/[\w./-]+)"),
        "State and checkouts are stored in a different folder each time.",
    ),
)
"""Each pattern has a group that is kept and a group that is replaced."""
HEADER_RULES = {
    "date": "A point in time.",
    "stream-cursor": "Counts intervals of time.",
    "retry-after": "Depends on the load.",
    "retry-after-ms": "Depends on the load.",
}
"""Headers whose values are replaced, each with the reason."""
_PROGRESS = re.compile(r"prompt_progress|\"kind\":\"progress\"|response\.headrace\.progress")


def normalise(text: str) -> str:
    for rule in RULES:
        known: dict[str, str] = {}

        def name(found: re.Match[str], rule: Rule = rule, known: dict[str, str] = known) -> str:
            number = f"-{len(known) + 1}" if rule.is_numbered else ""
            return found[1] + known.setdefault(found[2], f"<{rule.name}{number}>")

        text = rule.pattern.sub(name, text)
    return text


def frames(text: str, media: str) -> list[str]:
    """Split a body as its media type says, and remove what depends on the machine's speed."""
    separator = {"text/event-stream": "\n\n", "application/x-ndjson": "\n"}.get(media)
    if separator is None:
        return [text]
    parts = [part + separator for part in text.split(separator)]
    parts[-1] = parts[-1].removesuffix(separator)
    return [
        part
        for before, part, after in zip(["", *parts], parts, [*parts[1:], ""], strict=False)
        # The number of progress frames between the first and the last one depends on the speed.
        if not all(_PROGRESS.search(it) for it in (before, part, after))
    ]


def shape(text: str) -> str:
    """Return JSON without its values, for routes that return current figures."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: of(it) for key, it in value.items()}
        if isinstance(value, list):
            return [of(value[0])] if value else []
        return "number or null" if value is None or isinstance(value, int | float) else "text"

    return json.dumps(of(json.loads(text)))


def metric_names(text: str) -> str:
    """Return metric names with their help; labels and values depend on the earlier requests."""
    return "".join(f"{line}\n" for line in text.splitlines() if line.startswith("#"))


def entries(text: str) -> str:
    """Return a list of files in a fixed order; within a second, their order is random."""
    given = json.loads(text)
    given["data"].sort(key=lambda entry: entry.get("filename", "")[-12:])
    return json.dumps(
        given | {"first_id": "", "last_id": ""}, ensure_ascii=False, separators=(",", ":")
    )


def sorted_lines(text: str) -> str:
    """Return a batch's results in a fixed order, not in the order in which its requests ended."""
    return "".join(
        sorted(text.splitlines(keepends=True), key=lambda line: line[line.find("custom_id") :])
    )


VIEWS: dict[str, Callable[[str], str]] = {
    "whole": str,
    "shape": shape,
    "names": metric_names,
    "lines": sorted_lines,
    "entries": entries,
}
