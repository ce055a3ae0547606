"""Shows on stderr what loads do: the first line before anything heavy is imported."""

from headrace.cli.logs import clear, say
from headrace.fleet.load_watch import LoadTeller, LoadWatch
from headrace_common.loading import ON_LOADING, LoadProgress


class LoadLines(LoadTeller):
    """A context that shows the load in it, until `read_progress` reads others."""

    def __init__(self, stage: str) -> None:
        self.watch = LoadWatch()
        self.watch.begin(stage)
        super().__init__(lambda: (self.watch.progress,), show)

    def __enter__(self) -> "LoadLines":
        self._before = ON_LOADING.set(self.watch.tell)
        super().__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        ON_LOADING.reset(self._before)
        clear()


def show(now: LoadProgress) -> None:
    """Shows a line; on a terminal the next one takes its place."""
    say(f"headrace: {now}", moves=True)
