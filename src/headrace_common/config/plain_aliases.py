"""Handles `--alias NAME` without `=`. Such an alias names the model, as in llama.cpp."""

from collections.abc import Mapping
from typing import Any


def with_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with aliases without `=` added to the names of the model."""
    aliases = given.get("alias", ())
    if not (isinstance(aliases, list | tuple) and all(isinstance(it, str) for it in aliases)):
        return dict(given)
    names = [it for it in aliases if "=" not in it]
    pairs = [it for it in aliases if "=" in it]
    rest = {name: value for name, value in given.items() if name != "alias"}
    if names:
        rest["served_model_name"] = [*given.get("served_model_name", ()), *names]
    return rest | ({"alias": pairs} if pairs else {})
