"""How much load, and for how long: the sizes of a benchmark run, each with its name."""

import itertools

import msgspec

from headrace.bench.record import CellPlan

RATIOS = (35.0, 85.0, 160.0)  # time of the prompt alone, in times between two tokens
LOADS = (0.1, 0.25, 0.5, 1.0)  # share of the time that prompts alone would take
_USED = 0.8  # of the context that a stream may fill


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt_tokens` 0: lengths and rates are chosen by RATIOS and LOADS."""

    name: str
    num_streams: int = 4
    stream_tokens: int = 512  # of each stream's prompt
    prompt_tokens: int = 0
    num_warm_up: int = 5
    num_measured: int = 10
    lead_s: float = 3.0  # streams alone, before the first prompt of a round and after the last
    control_s: float = 20.0
    pause_s: float = 25.0
    patience: float = 8.0  # a prompt may take that many times as long as alone,
    patience_s: float = 5.0  # and this
    max_drift: float = 1.25  # between the longest and the shortest time of a prompt alone


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
    """The machine's speed: time between two tokens, and of prompts alone by their length."""

    tpot_s: float
    prompt_s: dict[int, float]

    def length_for(self, seconds: float) -> int:
        """The prompt that takes about so long alone; within what was measured."""
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
    """The cells of a run, those with the shortest prompts first."""
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
