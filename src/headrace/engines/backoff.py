"""How long to wait before an engine that has died is started again."""

_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_CALM_S = 60.0  # after a life this long the next start is immediate


class Backoff:
    """Counts the deaths in a row."""

    def __init__(self) -> None:
        self._num_deaths = 0

    def after(self, lived_s: float) -> float:
        """Seconds to wait, now that an engine died which was up for so long."""
        self._num_deaths = 1 if lived_s > _CALM_S else self._num_deaths + 1
        return _PAUSES_S[min(self._num_deaths, len(_PAUSES_S)) - 1]
