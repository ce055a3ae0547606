"""Decides when a client tries again and when it gives up. Uses neither a clock nor a socket."""

from collections.abc import Mapping

import msgspec

from headrace.client.errors import Refused, Unreachable

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.25, 5.0
MEND_THEMSELVES = (408, 425, 429, 502, 503, 504)
"""Statuses of a busy or starting server, and of a load balancer whose server is down."""
# The maximum number of attempts on a port that accepts connections but has never answered.
_MAX_BLIND_TRIES = 4


class Pacing:
    """The pauses of one operation: first 0.25 s, then doubled up to 5 s until progress is made."""

    def __init__(self, patience_s: float, has_contact: bool = False) -> None:
        self.pause_s = 0.0
        self.reason = ""
        self._patience_s = patience_s
        # True if the server has ever answered.
        self._has_contact = has_contact
        self._num_failures = 0
        self._waited_s = 0.0

    def arrived(self) -> None:
        """Reset the pauses, because new data arrived."""
        self._has_contact = True
        self._num_failures = 0
        self._waited_s = self.pause_s = 0.0

    def broke(self, was_connected: bool, reason: str) -> None:
        """Plan a pause after a connection that could not be made, was lost, or ended too early."""
        if not self._has_contact:
            if not was_connected:
                raise Unreachable(
                    f"No server answers ({reason}); start one with `headrace serve`, or set "
                    "its address (on the command line with --port or --url)."
                )
            if self._num_failures == _MAX_BLIND_TRIES:
                raise Unreachable(f"The server at that address is not Headrace ({reason}).")
        self._wait(0.0, f"connection lost ({reason})")

    def refused(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Plan a pause if the status can be temporary; otherwise raise Refused."""
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
    """Return the error in an answer's body."""
    try:
        error = msgspec.json.decode(body)["error"]
        return Refused(status, error["message"], error["code"], error.get("param"))
    except (msgspec.DecodeError, KeyError, TypeError):
        message = f"The server answered with status {status}."
        # A proxy in front of Headrace answers with the other statuses while Headrace is down.
        if status not in MEND_THEMSELVES:
            message = f"The answer, with status {status}, is not from Headrace; check the address."
        return Refused(status, message, "unknown")
