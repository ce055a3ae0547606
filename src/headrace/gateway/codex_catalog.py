"""Lists the served models and their context sizes in the format of Codex's catalog."""

from collections.abc import Iterable
from typing import Any

from headrace.gateway.introductions import introduction
from headrace.gateway.model_view import ModelView
from headrace.text.output_splitter import HARMONY

# Codex drops the whole catalog if one entry has no instructions. An entry's instructions replace
# Codex's own instructions, which are too long for a small context.
_INSTRUCTIONS = """\
You are a coding agent in a terminal on the user's computer. You work in the current folder with \
the tools that you are given.

- Look before you act: read the files that matter, and find them with `rg` or `grep`.
- Do all of what the user asks and nothing else. Mend causes rather than symptoms, and keep to the \
style of the code around your change.
- Leave changes alone that are not yours. Commit only if the user asks for it.
- AGENTS.md in a folder has rules for the files below that folder. The user's words take precedence.
- Run the tests or the program after a change. Say what you ran, and what you could not check.
- Go on until the task is done. Ask only about what you cannot find out yourself.
- Answer briefly, and name places in the code as path:line.

To change files, run `apply_patch` in the shell with a patch like this one:

apply_patch <<'EOF'
*** Begin Patch
*** Update File: src/wheel.py
@@ def turn():
-    return 1
+    return 2
*** Add File: src/mill.py
+import wheel
*** Delete File: src/old.py
*** End Patch
EOF
"""
# Codex shows the model at most this many tokens of a command's output.
_MAX_OUTPUT = 10_000


def catalog(served: Iterable[ModelView]) -> list[dict[str, Any]]:
    """Return the models that generate text, with all fields that any version of Codex requires."""
    return [
        _entry(view, position)
        for position, view in enumerate(served)
        if view.ready is None or "generate" in view.ready.tasks
    ]


def _entry(view: ModelView, position: int) -> dict[str, Any]:
    text = view.text
    entry: dict[str, Any] = {
        "slug": view.id,
        "display_name": view.shown,
        "description": introduction(text).get("description") if text else None,
        "base_instructions": _INSTRUCTIONS,
        "visibility": "list",
        "supported_in_api": True,
        "priority": position,
        "availability_nux": None,
        "upgrade": None,
        "supported_reasoning_levels": [],
        "supports_reasoning_summaries": False,
        "supports_reasoning_summary_parameter": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "shell_type": "shell_command",
        "apply_patch_tool_type": None,
        "experimental_supported_tools": [],
        # An answer in the harmony format ends with its first tool call, so parallel calls are
        # impossible.
        "supports_parallel_tool_calls": bool(
            text and text.tool_format and text.reasoning_format != HARMONY
        ),
        "truncation_policy": {"mode": "tokens", "limit": _MAX_OUTPUT},
    }
    if view.modalities:
        entry["input_modalities"] = view.modalities
    if view.context:
        entry |= {"context_window": view.context, "max_context_window": view.context}
        entry["truncation_policy"]["limit"] = min(_MAX_OUTPUT, max(1, view.context // 4))
    return entry
