"""Defines the stages of loading a model.

Reports the stages to a listener, and describes stages for people.
"""

from collections.abc import Callable
from contextvars import ContextVar

import msgspec

from headrace_common.messages import WEIGHTS, Loading

STARTING = "starting"
LOOKING = "looking for the model on this machine and on the hub"
DOWNLOADING = "downloading the model"
READING = "reading the model's files"
ENGINE = "starting the engine"
CHECKING = "checking kernels"
COMPILING = "compiling kernels"
WARMING = "warming up"
_MIB = 1 << 20
# An estimate of the remaining time needs this many seconds and this share of the work.
_MIN_S, _MIN_SHARE = 3.0, 0.02


class LoadProgress(msgspec.Struct, frozen=True):
    """The current stage of a load. `seconds` is the duration of this stage so far.

    `share` is the finished fraction of the stage, from 0 to 1, or None if unknown. `model` is the
    model's name if there are several. `str()` describes all fields for people, and `words` all
    fields but the seconds.
    """

    stage: str
    share: float | None = None
    detail: str = ""
    seconds: float = 0.0
    model: str = ""

    @property
    def words(self) -> str:
        name = f"{self.model}: " if self.model else ""
        share = "" if self.share is None else f"{100 * self.share:.0f} %"
        figures = " ".join(filter(None, (share, self.detail)))
        return ", ".join(filter(None, (name + self.stage, figures)))

    def __str__(self) -> str:
        return f"{self.words} ({duration(self.seconds)})"


def _ignore(loading: Loading) -> None:
    pass


ON_LOADING: ContextVar[Callable[[Loading], None]] = ContextVar("on_loading", default=_ignore)
"""Called with each stage of the load in this thread, and with the progress within a stage."""


def tell(stage: str, share: float = 0.0, detail: str = "") -> None:
    """Report a stage of this thread's load, or progress within the stage."""
    ON_LOADING.get()(Loading(share, stage, detail))


def tell_weights(share: float) -> None:
    """Report which fraction of the weights is loaded, from 0 to 1."""
    tell(WEIGHTS, share)


def download_words(done: int, total: int, seconds: float, kept: int = 0) -> str:
    """Describe the size, speed and remaining time of a download that has run for `seconds`.

    `kept` of the `done` bytes were stored before the download began.
    """
    size = f"of {total / _MIB:.0f} MiB"
    if seconds < _MIN_S:
        return size
    rate = (done - kept) / seconds / _MIB
    return f"{size}, {rate:.1f} MiB/s{time_left(done - kept, total - kept, seconds)}"


def time_left(done: float, total: float, seconds: float) -> str:
    """Return ", 3 min 20 s left"; "" if too little is done after `seconds` for an estimate."""
    if seconds < _MIN_S or done < _MIN_SHARE * total or done >= total:
        return ""
    return f", {duration((total - done) * seconds / done)} left"


def duration(seconds: float) -> str:
    """Return a duration as people say it: 45 s, 3 min 20 s or 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
