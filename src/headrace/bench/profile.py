"""Profiles, which are named sets of sizes for a benchmark run."""

import msgspec

from headrace.bench.record import CellPlan


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a run."""

    name: str
    num_streams: int = 4
    # The length of each stream's prompt.
    stream_tokens: int
    prompt_tokens: int
    num_warm_up: int
    num_measured: int
    # The time for which streams run without prompts, at the start and at the end of a round.
    lead_s: float
    control_s: float
    pause_s: float
    # The time limit of a prompt is `patience` times its time on an idle server, plus `patience_s`
    # seconds.
    patience: float = 8.0
    patience_s: float = 5.0
    # The maximum ratio of the longest to the shortest time of the same prompt on an idle server.
    max_drift: float = 1.25


PROFILES = {
    "wall": Profile(
        name="wall",
        stream_tokens=128,
        prompt_tokens=2048,
        num_warm_up=2,
        num_measured=6,
        lead_s=1.0,
        control_s=8.0,
        pause_s=2.0,
    ),
    "quick": Profile(
        name="quick",
        stream_tokens=16,
        prompt_tokens=1000,
        num_warm_up=1,
        num_measured=2,
        lead_s=0.2,
        control_s=0.5,
        pause_s=0.0,
        patience_s=1.0,
        max_drift=100.0,
    ),
}


def plan_of(profile: Profile, max_model_len: int) -> CellPlan:
    """Return the cell of a run, with prompts that fit the model."""
    return CellPlan(
        name=profile.name,
        prompt_tokens=min(profile.prompt_tokens, max_model_len - 1),
        interval_s=0.0,
        num_warm_up=profile.num_warm_up,
        num_measured=profile.num_measured,
    )
