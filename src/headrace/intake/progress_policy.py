"""Which clients get a prompt's progress without asking: by key, by kind of client, by model."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

import msgspec

from headrace_common.jobs import CheckedBody
from headrace_common.log_context import KEY_NAME

_FIELD = "return_progress"
WISHES: Mapping[str, bool | str] = MappingProxyType(
    {"off": False, "on": True, "reasoning": "reasoning"}
)
"""What a setting asks for, as a request would."""


class ProgressPolicy:
    """Rules such as `key:ann=on` and `agent:opencode/*=reasoning`; the first that fits counts."""

    def __init__(self, rules: tuple[str, ...]) -> None:
        self._rules = [_parsed(rule) for rule in rules]

    def apply(self, agent: str, checked: CheckedBody) -> CheckedBody:
        """Return the body of a client with this User-Agent; its key is that of the current task."""
        names = {"key": KEY_NAME.get(), "agent": agent.lower()}
        for kind, pattern, wish in self._rules:
            if fnmatchcase(names[kind], pattern):
                return with_progress(checked, wish)
        return checked


def with_progress(checked: CheckedBody, wish: str) -> CheckedBody:
    """The body as if it asked for this, if it says nothing of it."""
    if _FIELD in checked.fields:
        return checked
    return msgspec.structs.replace(checked, fields={**checked.fields, _FIELD: WISHES[wish]})


def _parsed(rule: str) -> tuple[str, str, str]:
    kind, _, rest = rule.partition(":")
    pattern, _, wish = rest.rpartition("=")
    return kind, pattern.lower() if kind == "agent" else pattern, wish
