"""Checks the deployment files without starting a server."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from headrace.metrics.metrics import Metrics
from headrace_common.config.sources import settings
from tools.make_grafana_dashboard import OUT, dashboard
from tools.run_dockerfile import START, read_steps

DEPLOY = Path(__file__).parent.parent / "deploy"


def test_the_dashboard_is_up_to_date_and_queries_existing_metrics() -> None:
    assert json.loads(OUT.read_text()) == dashboard(), "run python -m tools.make_grafana_dashboard"
    shown = Metrics().text("ok", ()).decode()
    families = set(re.findall(r"# TYPE (\w+) ", shown))
    asked = set(re.findall(r"headrace_\w+", OUT.read_text()))
    assert asked and {re.sub("_bucket$", "", name) for name in asked} <= families


def test_compose_and_dockerfile_set_settings_that_exist() -> None:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    known = {setting.variable for setting in settings()}
    named = set(re.findall(r"HEADRACE_[A-Z_]+", dockerfile + str(compose)))
    assert named and named <= known
    assert "HEALTHCHECK" in dockerfile and "/health" in dockerfile
    assert set(compose["services"]) == {"headrace", "prometheus", "grafana"}
    for file in DEPLOY.rglob("*.y*ml"):
        assert yaml.safe_load(file.read_text())


def test_the_example_for_kuberay_uses_flags_that_exist() -> None:
    manifest = (DEPLOY / "kuberay.yaml").read_text()
    head = yaml.safe_load(manifest)["spec"]["headGroupSpec"]["template"]["spec"]
    (command,) = next(it["args"] for it in head["containers"] if it["name"] == "gateway")
    flags = {flag for setting in settings() for flag in setting.flags}
    given = set(re.findall(r"--[a-z-]+", command.partition("headrace serve")[2]))
    assert "--cluster" in given and given <= flags


def test_the_systemd_unit_uses_flags_that_exist() -> None:
    unit = (DEPLOY / "headrace.service").read_text()
    flags = {flag for setting in settings() for flag in setting.flags}
    (command,) = re.findall("^ExecStart=(.*)$", unit, re.M)
    assert set(re.findall(r"--[a-z-]+", command)) <= flags
    assert "Restart=on-failure" in unit
    assert "CacheDirectory=headrace\n" in unit
    assert "Environment=XDG_CACHE_HOME=/var/cache/headrace\n" in unit  # /home is hidden


def test_the_dockerfile_has_only_steps_that_the_image_test_runs() -> None:
    """Allows only the instructions that `make test-image`, which needs root, can run."""
    steps = list(read_steps((DEPLOY / "Dockerfile").read_text()))
    done = {"FROM", "RUN", "COPY", "ENV", "ARG", "USER", "WORKDIR", *START}
    assert {step.name for step in steps} <= done
    assert not [step for step in steps if not step.words or step.words.endswith("\\")]
