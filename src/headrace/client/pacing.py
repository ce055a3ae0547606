"""When to try again, and when to stop trying; knows no clock and no socket."""

from collections.abc import Mapping

import msgspec

from headrace.client.errors import Refused, Unreachable

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.25, 5.0
MEND_THEMSELVES = (408, 425, 429, 502, 503, 504)
"""Statuses of a server that is busy or starts, and of a balancer whose server went."""
_MAX_BLIND_TRIES = 4  # for something that listens but has never answered


class Pacing:
    """The pauses of one undertaking: 0.25 s doubling to 5 s while nothing comes."""

    def __init__(self, patience_s: float, has_contact: bool = False) -> None:
        self.pause_s = 0.0
        self.reason = ""
        self._patience_s = patience_s
        self._has_contact = has_contact  # whether the server ever answered
        self._num_failures = 0
        self._waited_s = 0.0

    def arrived(self) -> None:
        """Something new came."""
        self._has_contact = True
        self._num_failures = 0
        self._waited_s = self.pause_s = 0.0

    def broke(self, was_connected: bool, reason: str) -> None:
        """The connection could not be made, broke, or ended too early."""
        if not self._has_contact:
            if not was_connected:
                raise Unreachable(
                    f"No server answers ({reason}); start one with `headrace serve`, "
                    "or check the address."
                )
            if self._num_failures == _MAX_BLIND_TRIES:
                raise Unreachable(f"The server at that address is not Headrace ({reason}).")
        self._wait(0.0, f"connection lost ({reason})")

    def refused(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Waits for what mends itself; Refused for everything else."""
        self._has_contact = True
        error = refusal(status, body)
        if status not in MEND_THEMSELVES:
            raise error
        self._wait(_retry_after_s(headers), f"the server says: {error.message}")

    def _wait(self, at_least_s: float, reason: str) -> None:
        self.reason = reason
        self._num_failures += 1
        pause_s = min(_FIRST_PAUSE_S * 2 ** (self._num_failures - 1), _LAST_PAUSE_S)
        self.pause_s = max(pause_s, at_least_s)
        self._waited_s += self.pause_s
        if self._waited_s > self._patience_s:
            raise Unreachable(f"The server has not answered for {self._patience_s:g} s: {reason}")


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return float(headers.get("retry-after-ms", "0")) / 1000
    except ValueError:
        return 0.0


def refusal(status: int, body: bytes) -> Refused:
    """The refusal that the body of an error states."""
    try:
        error = msgspec.json.decode(body)["error"]
        return Refused(status, error["message"], error["code"], error.get("param"))
    except (msgspec.DecodeError, KeyError, TypeError):
        return Refused(status, f"The server answered with status {status}.", "unknown")
