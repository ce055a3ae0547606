"""Progress of a load: its stages, who hears of them, and how people read them."""

from collections.abc import Callable
from contextvars import ContextVar

import msgspec

from headrace_common.messages import WEIGHTS, Loading

STARTING = "starting"
DOWNLOADING = "downloading the model"
READING = "reading the model's files"
ENGINE = "starting the engine"
CHECKING = "checking kernels"
COMPILING = "compiling kernels"
WARMING = "warming up"
_MIB = 1 << 20


class LoadProgress(msgspec.Struct, frozen=True):
    """The stage of a load, and for how many `seconds` so far. Its `str()` is a line for people.

    `share` of the stage is done, from 0 to 1; None where nobody knows. `model` is its name where
    there are several.
    """

    stage: str
    share: float | None = None
    detail: str = ""
    seconds: float = 0.0
    model: str = ""

    def __str__(self) -> str:
        name = f"{self.model}: " if self.model else ""
        share = "" if self.share is None else f"{100 * self.share:.0f} %"
        figures = " ".join(filter(None, (share, self.detail)))
        return ", ".join(filter(None, (name + self.stage, figures))) + f" ({self.seconds:.0f} s)"


def _ignore(loading: Loading) -> None:
    pass


ON_LOADING: ContextVar[Callable[[Loading], None]] = ContextVar("on_loading", default=_ignore)
"""Hears of each stage of the load that this thread does, and of the progress within it."""


def tell(stage: str, share: float = 0.0, detail: str = "") -> None:
    """Reports the stage that this thread's load begins."""
    ON_LOADING.get()(Loading(share, stage, detail))


def tell_weights(share: float) -> None:
    """How much of the weights is there."""
    tell(WEIGHTS, share)


def download_words(done: int, total: int, seconds: float) -> str:
    """How large a download is that began so long ago, and how fast it comes."""
    rate = done / max(1e-3, seconds)
    left = f", {(total - done) / rate:.0f} s left" if 0 < done < total else ""
    return f"of {total / _MIB:.0f} MiB, {rate / _MIB:.1f} MiB/s{left}"
