"""Describes the coding agents that `headrace launch` starts, and how each finds the server.

Nothing is written into an agent's own configuration. The settings are flags, environment variables
or a file in a separate folder, so an agent keeps its sessions and logins. Each agent except Codex
asks for the prompt's progress in its own requests, so the server needs no rule for the agent.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

KEY = "KEY_FOR_HEADRACE"
"""The environment variable with the API key. A flag would show the key to other users.

If its name were HEADRACE_API_KEY, a server that the agent starts would require the key.
"""

_PROGRESS = {"return_progress": "reasoning"}
# An answer may take a quarter of the context, and at most _MAX_ANSWER tokens.
_ANSWER_SHARE = 4
_MAX_ANSWER = 32_000


class Model(NamedTuple):
    """A model of a server.

    The server serves `context` tokens of the `longest_context` that the model can have. `catalog`
    is the server's list of models for Codex.
    """

    url: str
    name: str
    context: int | None = None
    modalities: tuple[str, ...] = ("text",)
    catalog: tuple[Any, ...] = ()
    longest_context: int | None = None

    @property
    def can_grow(self) -> bool:
        """Return whether --max-model-len can give the model a longer context."""
        return not self.context or not self.longest_context or self.context < self.longest_context

    @property
    def max_answer(self) -> int | None:
        """The maximum tokens of an answer; None if the server does not report the context."""
        return self.context and max(1, min(_MAX_ANSWER, self.context // _ANSWER_SHARE))


class Setup(NamedTuple):
    """The first flags of an agent, its environment, and files with their contents."""

    flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = MappingProxyType({})
    files: Mapping[Path, str] = MappingProxyType({})


class LaunchClient(NamedTuple):
    """A coding agent.

    It sends `num_tokens` tokens before its user's first word, and leaves `num_free_tokens` free.
    """

    title: str
    package: str
    num_tokens: int
    setup: Callable[[Model, Path], Setup]
    num_free_tokens: int = 0

    @property
    def install_command(self) -> str:
        return f"npm install -g {self.package}"


def _claude(model: Model, folder: Path) -> Setup:
    """Return the setup of Claude Code, which applies --settings after the user's own settings.

    The user's own settings may name another server.
    """
    variables = {
        "ANTHROPIC_BASE_URL": model.url,
        # Credentials for other servers must not be sent to this one.
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_AUTH_TOKEN": "",
        "ANTHROPIC_MODEL": model.name,
        **{f"ANTHROPIC_DEFAULT_{kind}_MODEL": model.name for kind in ("OPUS", "SONNET", "HAIKU")},
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_EXTRA_BODY": json.dumps(_PROGRESS),
    }
    if model.context:
        # Without this variable, Claude Code assumes a million tokens.
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(model.context)
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(model.max_answer)
    settings = {"env": variables, "apiKeyHelper": f"printenv {KEY}"}
    return Setup(("--settings", json.dumps(settings)))


def _codex(model: Model, folder: Path) -> Setup:
    """Return the setup of Codex, with a catalog of models in a private file.

    The catalog has the context length and short instructions. If Codex read the catalog from the
    server, it would store the catalog among the user's own files.
    """
    file = folder / "codex-models.json"
    provider = {
        "name": "Headrace",
        "base_url": f"{model.url}/v1",
        "env_key": KEY,
        "wire_api": "responses",
        # A server that restarts needs longer than the default of 5 attempts.
        "stream_max_retries": 9,
    }
    # A JSON string or number is also valid TOML.
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    pairs = (
        f"model_providers.headrace={{{table}}}",
        'model_provider="headrace"',
        f"model={json.dumps(model.name)}",
        f"model_catalog_json={json.dumps(str(file), ensure_ascii=False)}",
    )
    flags = (part for pair in pairs for part in ("-c", pair))
    return Setup((*flags,), files={file: json.dumps({"models": model.catalog}, indent=1)})


def _opencode(model: Model, folder: Path) -> Setup:
    about: dict[str, Any] = {
        "name": model.name,
        "tool_call": True,
        "reasoning": True,
        "attachment": "image" in model.modalities,
        "modalities": {"input": model.modalities, "output": ["text"]},
        "options": _PROGRESS,
    }
    if model.context:
        about["limit"] = {"context": model.context, "output": model.max_answer}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Headrace",
        "options": {"baseURL": f"{model.url}/v1", "apiKey": f"{{env:{KEY}}}"},
        "models": {model.name: about},
    }
    name = f"headrace/{model.name}"
    config = {"model": name, "small_model": name, "provider": {"headrace": provider}}
    return Setup(variables={"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _pi(model: Model, folder: Path) -> Setup:
    """Return the setup of pi. An extension adds the server, because pi reads only one models.json.

    That file belongs to the user.
    """
    about: dict[str, Any] = {
        "id": model.name,
        "name": model.name,
        "reasoning": False,
        "input": model.modalities,
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        "samplingParams": _PROGRESS,
    }
    if model.context:
        about |= {"contextWindow": model.context, "maxTokens": model.max_answer}
    provider = {
        "name": "Headrace",
        "baseUrl": f"{model.url}/v1",
        "apiKey": f"${KEY}",
        "api": "openai-completions",
        "models": [about],
    }
    file = folder / "pi-headrace.js"
    call = f'pi.registerProvider("headrace", {json.dumps(provider, indent=1)})'
    flags = ("--extension", str(file), "--provider", "headrace", "--model", model.name)
    return Setup(flags, files={file: f"export default (pi) => {call};\n"})


# docs/guides/agents.md has these numbers, too.
CLIENTS: Mapping[str, LaunchClient] = MappingProxyType(
    {
        "claude": LaunchClient("Claude Code", "@anthropic-ai/claude-code", 12_200, _claude),
        "codex": LaunchClient("Codex", "@openai/codex", 7_200, _codex),
        "opencode": LaunchClient("opencode", "opencode-ai", 7_600, _opencode),
        "pi": LaunchClient("pi", "@earendil-works/pi-coding-agent", 1_300, _pi, 4_096),
    }
)
"""Agents by the names of their programs."""
