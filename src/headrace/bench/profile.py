"""Profiles, which are named sets of sizes for a benchmark run."""

import itertools

import msgspec

from headrace.bench.record import CellPlan

# Lengths of prompts, as the time that a prompt takes on an idle server. The unit is the interval
# between two tokens of a stream.
RATIOS = (35.0, 85.0, 160.0)
# The fractions of the time that the prompts would take without streams.
LOADS = (0.1, 0.25, 0.5, 1.0)
# A stream may fill this fraction of the context.
_USED = 0.8


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a run. If `prompt_tokens` is 0, RATIOS and LOADS determine lengths and rates."""

    name: str
    num_streams: int = 4
    # The length of each stream's prompt.
    stream_tokens: int = 512
    prompt_tokens: int = 0
    num_warm_up: int = 5
    num_measured: int = 10
    # The time for which streams run without prompts, at the start and at the end of a round.
    lead_s: float = 3.0
    control_s: float = 20.0
    pause_s: float = 25.0
    # The time limit of a prompt is `patience` times its time on an idle server, plus `patience_s`
    # seconds.
    patience: float = 8.0
    patience_s: float = 5.0
    # The maximum ratio of the longest to the shortest time of the same prompt on an idle server.
    max_drift: float = 1.25


PROFILES = {
    "ratios": Profile(name="ratios"),
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


class Calibration(msgspec.Struct, frozen=True):
    """The machine's speed: the time per token of a stream, and the times of prompts by length.

    The prompts were measured on an idle server.
    """

    tpot_s: float
    prompt_s: dict[int, float]

    def length_for(self, seconds: float) -> int:
        """Return the prompt length that takes about `seconds` on an idle server.

        The result is within the range of measured lengths.
        """
        points = sorted(self.prompt_s.items())
        for (short, low), (long, high) in itertools.pairwise(points):
            if seconds <= high or (long, high) == points[-1]:
                share = (seconds - low) / max(high - low, 1e-9)
                return max(points[0][0], min(long, round(short + share * (long - short))))
        return points[0][0]

    def seconds_for(self, length: int) -> float:
        points = sorted(self.prompt_s.items())
        for (short, low), (long, high) in itertools.pairwise(points):
            if length <= long:
                return low + (high - low) * (length - short) / (long - short)
        return points[-1][1]


def plans(profile: Profile, calibration: Calibration, max_model_len: int) -> list[CellPlan]:
    """Return the cells of a run; cells with shorter prompts come first."""
    if profile.prompt_tokens:
        length = min(profile.prompt_tokens, max_model_len - 1)
        return [_plan(profile, profile.name, length, interval_s=0.0)]
    filled_s = _USED * (max_model_len - profile.stream_tokens) * calibration.tpot_s
    found = []
    for ratio in RATIOS:
        length = calibration.length_for(ratio * calibration.tpot_s)
        for load in LOADS:
            interval_s = calibration.seconds_for(length) / load
            plan = _plan(profile, f"{ratio:g}x{load:g}", length, interval_s)
            per_round = max(1, int((filled_s - 2 * profile.lead_s) / interval_s))
            may_overlap = load == LOADS[-1]
            found.append(
                msgspec.structs.replace(plan, per_round=per_round, may_overlap=may_overlap)
            )
    return found


def _plan(profile: Profile, name: str, length: int, interval_s: float) -> CellPlan:
    return CellPlan(
        name=name,
        prompt_tokens=length,
        interval_s=interval_s,
        num_warm_up=profile.num_warm_up,
        num_measured=profile.num_measured,
    )
