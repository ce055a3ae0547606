"""`headrace doctor`: what it looks at, and how it tells; it changes nothing."""

from collections.abc import Iterable

import msgspec

from headrace.cli import exits
from headrace.cli.finding import Finding
from headrace.core.config import ServerConfig

_WIDTH = 12


def doctor(config: ServerConfig, model: str | None, as_json: bool) -> int:
    """Prints each finding as it is made; the exit code says whether one is a fault."""
    found = []
    for finding in _examine(config, model):
        found.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print(msgspec.json.encode(found).decode())
    has_fault = any(finding.verdict == "fail" for finding in found)
    return exits.FAILED if has_fault else exits.DONE


def _examine(config: ServerConfig, model: str | None) -> Iterable[Finding]:
    from headrace.cli import doctor_machine, doctor_server

    yield from doctor_machine.findings(config)
    yield from doctor_server.findings(config)
    if model is not None:
        from headrace.cli import doctor_model

        yield from doctor_model.findings(config.models[0])


def _print(finding: Finding) -> None:
    print(f"{finding.verdict:<4}  {finding.subject:<{_WIDTH}}  {finding.detail}", flush=True)
    if finding.remedy:
        print(f"{'':<{_WIDTH + 8}}{finding.remedy}", flush=True)
