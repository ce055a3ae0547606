"""What the doctor finds: one subject, a verdict, and what to do about it."""

from typing import Literal

import msgspec

Verdict = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """`remedy` is empty where nothing needs one."""

    subject: str
    verdict: Verdict
    detail: str
    remedy: str = ""
