"""Decides how long to wait before restarting a dead engine."""

_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# An engine that ran longer than this time is restarted immediately.
_CALM_S = 60.0


class Backoff:
    """Counts consecutive deaths of an engine. Each death lengthens the pause before a restart."""

    def __init__(self) -> None:
        self._num_deaths = 0

    def after(self, lived_s: float) -> float:
        """Record a death after `lived_s` seconds of life; return the seconds to wait."""
        self._num_deaths = 1 if lived_s > _CALM_S else self._num_deaths + 1
        return _PAUSES_S[min(self._num_deaths, len(_PAUSES_S)) - 1]
