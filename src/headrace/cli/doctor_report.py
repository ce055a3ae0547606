"""Prints the report of `headrace doctor`: the verdict, and then the findings by group."""

import shutil
import sys
import textwrap
from itertools import groupby

from headrace.cli.doctor_machine import Finding
from headrace.cli.logs import printable

MACHINE, SERVER = "machine", "server"
_INDENT = " " * 20


def print_report(found: list[Finding]) -> None:
    """Print the verdict and the findings. On a terminal, lines are wrapped between words."""
    _print(verdict(found), "")
    for group, findings in groupby(found, key=lambda finding: finding.group):
        print(f"\n{printable(group).capitalize() if group in (MACHINE, SERVER) else group}")
        for finding in findings:
            subject = finding.subject.removeprefix(f"{group}: ")
            _print(f"{finding.verdict:<4}  {subject:<12}  {finding.detail}", _INDENT)
            if finding.remedy:
                _print(f"{_INDENT}{finding.remedy}", _INDENT)


def verdict(found: list[Finding]) -> str:
    """Return a sentence that says whether the machine can serve the models."""
    if faults := [finding for finding in found if finding.verdict == "fail"]:
        first = faults[0]
        others = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        fault = f"Something is broken: {first.subject}: {first.detail.rstrip('.')}{others}."
        return f"{fault} {first.remedy}".rstrip()
    missing = [it for it in found if it.subject.endswith("model") and it.verdict == "warn"]
    names = {it.group: None for it in found if it.group not in (MACHINE, SERVER)}
    for finding in missing:
        del names[finding.group]
    subjects = {(it.group, it.subject.removeprefix(f"{it.group}: ")): it.detail for it in found}
    told = [_about(name, subjects) for name in names]
    text = f"This machine can serve {'; '.join(told)}." if told else "This machine can serve."
    text += "".join(f" {it.detail}." for it in missing)
    num = sum(it.verdict == "warn" for it in found) - len(missing)
    return text + f" There {'is 1 warning' if num == 1 else f'are {num} warnings'}." * (num > 0)


def _about(name: str, subjects: dict[tuple[str, str], str]) -> str:
    weights = subjects.get((name, "weights"))
    size = "" if weights is None else f", with {weights.partition(',')[0]} of weights in memory"
    return name + size


def _print(line: str, indent: str) -> None:
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    print(line, flush=True)
