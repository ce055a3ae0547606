"""Tests the default for progress events by key, User-Agent and model."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from headrace_common.config.settings import HttpConfig, ServerConfig, StreamConfig
from headrace_common.config.sources import load
from headrace_common.errors import ConfigError
from tests.gateway.builders import FakeGeneration, app_of, ended

BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
RULES = ("key:ann=off", "agent:opencode/*=reasoning", "agent:claude-cli/*=on")


def told(
    tmp_path: Path, key: str = "k1", agent: str = "curl/8", model: str = "off", **body: Any
) -> tuple[bool, bool]:
    """Return whether this client gets progress events, and whether they are in words."""
    keys = tmp_path / "keys"
    keys.write_text("ann:k1\nbob:k2\n")
    keys.chmod(0o600)
    config = ServerConfig(
        http=HttpConfig(api_key_file=str(keys)), streams=StreamConfig(return_progress_for=RULES)
    )
    generation = FakeGeneration(ended())
    host = generation.fleet.hosts.first
    host.config = msgspec.structs.replace(host.config, return_progress=model)
    app = app_of(generation, config)
    client = TestClient(app, base_url="http://localhost")
    headers = {"x-api-key": key, "user-agent": agent}
    with client.stream("POST", "/v1/chat/completions", json=BODY | body, headers=headers) as got:
        assert got.status_code == 200
    options = generation.requests[0].response_options
    return options.return_progress, options.progress_in_words


def test_the_first_matching_rule_applies_and_otherwise_the_models_setting(tmp_path: Path) -> None:
    assert told(tmp_path, "k2") == (False, False)
    assert told(tmp_path, "k2", model="on") == (True, False)
    assert told(tmp_path, "k2", "OpenCode/1.18 (linux)") == (True, True)
    assert told(tmp_path, "k2", "claude-cli/2.1 (external)") == (True, False)
    assert told(tmp_path, "k1", "opencode/1.18", model="on") == (False, False)


@pytest.mark.parametrize("wish, is_told", [(False, (False, False)), ("reasoning", (True, True))])
def test_the_request_takes_precedence_over_all_rules(
    tmp_path: Path, wish: Any, is_told: tuple[bool, bool]
) -> None:
    assert told(tmp_path, "k2", "claude-cli/2", "on", return_progress=wish) == is_told


def test_an_invalid_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--return-progress-for .* such as agent:"):
        load({"return_progress_for": ("opencode",)}, {}, None)
