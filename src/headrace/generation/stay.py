"""The things that a request holds from its admission on, and gives up together."""

from collections.abc import Callable

from headrace.awake import Countdown
from headrace.generation.admission import Place
from headrace.workers.image_file import Admitted


class Stay:
    """The stay of a stream: a place in the queue, its images, and limits of its time."""

    def __init__(self, place: Place, admitted: Admitted) -> None:
        self.place = place
        self.admitted = admitted
        self._timers: list[Countdown] = []

    def limit(self, seconds: float, on_over: Callable[[], None]) -> None:
        """Calls `on_over` then, unless the stay has ended."""
        self._timers.append(Countdown(max(0.0, seconds), on_over))

    def end(self) -> None:
        """Gives all up, before anybody sees the stream's end. Idempotent."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.admitted.close()
        self.place.close()
