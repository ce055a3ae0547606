"""The mixed benchmark: calibrates a server, measures controls and cells, and judges the cells."""

import asyncio
import secrets
import time
from collections.abc import Callable
from statistics import median

import msgspec
from msgspec.structs import replace

from headrace.bench import figures, validity
from headrace.bench.load import Background, Injector, PromptSource, since
from headrace.bench.profile import Calibration, Profile, plans
from headrace.bench.record import Cell, CellPlan, Round, ServerRun
from headrace.bench.target import ServerSaid, Target
from headrace.bench.trace import State, Trace

_LENGTHS = (256, 1024, 4096)
_NO_TOKEN_TIME = "No time passed between the tokens of the streams"

Say = Callable[[str], None]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options that are the same for every server."""

    profile: Profile
    seed: int = 0
    warm_share: float = 0.0
    api_key: str = ""


class Mixed:
    """Measures one server."""

    def __init__(self, url: str, label: str, options: Options, say: Say) -> None:
        self._profile = options.profile
        self._say = say
        self._options = options
        self._target = Target(url, options.api_key, secrets.token_hex(8))
        self._trace = Trace(self._target)
        self._run = ServerRun(url=url, label=label, server={})

    async def measure(self, given: list[CellPlan] | None) -> tuple[ServerRun, list[CellPlan]]:
        """Measure everything on this server: the given cells, or cells chosen for this server.

        Cells chosen on the first server are given to the next servers, so that all get the same
        load.
        """
        self._tell(f"measuring {self._target.url} with the profile {self._profile.name}")
        async with self._target.http:
            await self._target.learn_model()
            await self._trace.open()
            try:
                self._run = replace(self._run, server=self._described())
                self._prompts = PromptSource(
                    self._options.seed, self._target.num_vocab, self._options.warm_share
                )
                calibration = await self._calibrate()
                cells = given or plans(self._profile, calibration, self._target.max_model_len)
                await self._all(cells, calibration)
            finally:
                await self._trace.close()
        return self._run, cells

    async def _all(self, cells: list[CellPlan], calibration: Calibration) -> None:
        """Measure the cells, with a control before each cell and after the last."""
        for number, plan in enumerate(cells, 1):
            await self._control()
            num, streams = plan.num_warm_up + plan.num_measured, self._profile.num_streams
            self._tell(
                f"cell {number} of {len(cells)}, {plan.name}: {num} prompts of "
                f"{plan.prompt_tokens:,} tokens, sent while {streams} streams run"
            )
            # A single cell also gets a control in its middle, between two rounds.
            if len(cells) == 1:
                half = plan.num_warm_up + plan.num_measured // 2
                await self._cell(plan, calibration, half)
            else:
                await self._cell(plan, calibration)
        await self._control()
        drift = validity.drifted(self._run.cells, self._profile.max_drift)
        for cell in self._run.cells:
            cell.doubt(*((drift,) if drift else ()))

    async def _calibrate(self) -> Calibration:
        """Measure a control, then prompts alone. First warm up the server with one prompt."""
        fixed, longest = self._profile.prompt_tokens, self._target.max_model_len - 1
        lengths = sorted({min(length, longest) for length in ((fixed,) if fixed else _LENGTHS)})
        self._tell(f"{self._target.model}: warming up with a prompt of {lengths[0]:,} tokens")
        await self._alone(lengths[0])
        prompt = self._prompts.fresh(lengths[0])
        ingestion = await self._target.ingestion(prompt)
        self._run = replace(self._run, ingestion=ingestion)
        control = await self._control()
        tpot_s = self._seconds_per_token(control)
        await self._trace.begin()
        self._tell(
            f"prompts of {', '.join(f'{n:,}' for n in lengths)} tokens without streams, twice each"
        )
        prompt_s = {n: median([await self._alone(n), await self._alone(n)]) for n in lengths}
        calibration = Calibration(tpot_s, prompt_s)
        built = msgspec.to_builtins(calibration, str_keys=True)
        self._run = replace(self._run, calibration=built)
        ratios = {length: figures.ratio(seconds, tpot_s) for length, seconds in prompt_s.items()}
        self._run.calibration["ratios"] = {
            str(length): ratio and round(ratio, 1) for length, ratio in ratios.items()
        }
        if not tpot_s:
            self._run.calibration["reason"] = _NO_TOKEN_TIME
        await self._trace.idle()
        self._run.calibration["exclusive"] = _exclusive(self._trace.steps("prompt"), tpot_s)
        self._tell(_speed(calibration, ratios))
        return calibration

    def _seconds_per_token(self, control: Cell) -> float:
        """Return the mean over all streams, or 0 if no time passed between any tokens.

        The mean is used because the median gap can be 0: with speculative decoding, a server sends
        several tokens together.
        """
        rate = control.figures["stream_tokens_per_s"]
        if not rate and not self._profile.prompt_tokens:
            raise ServerSaid(
                f"{_NO_TOKEN_TIME}, and the profile {self._profile.name} derives its load from "
                "that time. Use --profile wall."
            )
        return self._profile.num_streams / rate if rate else 0.0

    async def _alone(self, length: int) -> float:
        await self._trace.idle()
        prompt = self._prompts.fresh(length)
        began = time.perf_counter()
        return await self._target.first_token(prompt) - began

    async def _control(self) -> Cell:
        streams, seconds = self._profile.num_streams, self._profile.control_s
        self._tell(f"control: {streams} streams without other load for {seconds:g} s")
        round = await self._round(None, 0)
        rounds = (since(round.settled, round),)
        cell = Cell(plan=None, num_streams=self._profile.num_streams, rounds=rounds)
        cell.figures, cell.reasons = figures.figures(cell), validity.reasons(cell)
        self._run.controls.append(cell)
        return cell

    async def _cell(
        self, plan: CellPlan, calibration: Calibration, control_after: int | None = None
    ) -> None:
        prompt_s = [await self._alone(plan.prompt_tokens)]
        alone_s = calibration.seconds_for(plan.prompt_tokens)
        patience_s = self._profile.patience * alone_s + self._profile.patience_s
        injector = Injector(self._target, self._prompts, plan, patience_s)
        await self._trace.begin()
        began, rounds = time.perf_counter(), []
        num = plan.num_warm_up + plan.num_measured
        for first in range(0, num, plan.per_round):
            if first == control_after:
                await self._control()
            rounds.append(await self._round(injector, first, min(plan.per_round, num - first)))
        cell = Cell(
            plan=plan,
            num_streams=self._profile.num_streams,
            rounds=tuple(since(began, round) for round in rounds),
        )
        cell.evidence = self._trace.evidence(cell.num_streams)
        cell.figures, cell.reasons = figures.figures(cell), validity.reasons(cell)
        prompt_s.append(await self._alone(plan.prompt_tokens))
        cell.prompt_s = tuple(prompt_s)
        self._run.cells.append(cell)
        self._tell(f"{plan.name}: {_line(cell)}")
        await asyncio.sleep(self._profile.pause_s)

    async def _round(self, injector: Injector | None, first: int, num: int = 0) -> Round:
        """Run the streams from start to end. Send prompts meanwhile, unless this is a control."""
        profile = self._profile
        streams = [self._prompts.fresh(profile.stream_tokens) for _ in range(profile.num_streams)]
        background = Background(self._target, streams)
        try:
            await background.open()
            settled = time.perf_counter()
            await asyncio.sleep(profile.lead_s if injector else profile.control_s)
            injections = await injector.send(first, num) if injector else []
            await asyncio.sleep(profile.lead_s if injector else 0)
            ended, lost_at = time.perf_counter(), background.lost_at
        finally:
            await background.close()
        await self._trace.idle()
        times = tuple(tuple(times) for times in background.arrivals)
        return Round(settled, ended, times, tuple(injections), lost_at)

    def _tell(self, line: str) -> None:
        self._say(f"{self._run.label}: {line}")

    def _described(self) -> State:
        state = {k: v for k, v in (self._trace.state or {}).items() if k != "steps"}
        model = {"model": self._target.model, "max_model_len": self._target.max_model_len}
        return model | state


async def measure(urls: list[tuple[str, str]], options: Options, say: Say) -> list[ServerRun]:
    """Measure each (url, label) in turn, with the cells that were chosen on the first server."""
    runs: list[ServerRun] = []
    cells: list[CellPlan] | None = None
    for url, label in urls:
        run, cells = await Mixed(url, label, options, say).measure(cells)
        runs.append(run)
    return runs


def _exclusive(prompt_steps: list[State], tpot_s: float) -> dict[str, float] | None:
    """Return the longest gap if prompts and streams took turns, estimated from the prompt steps."""
    if not prompt_steps:
        return None
    longest = max(step["actual_ms"] for step in prompt_steps)
    return {"worst_gap_ms": longest + 1000 * tpot_s}


def _speed(calibration: Calibration, ratios: dict[int, float | None]) -> str:
    prompts = ", ".join(
        f"{length:,} tokens {seconds:.2f} s ({_in_tokens(ratios[length])})"
        for length, seconds in calibration.prompt_s.items()
    )
    tpot_s = calibration.tpot_s
    shown = f"{1000 * tpot_s:.1f} ms per token" if tpot_s else f"– per token ({_NO_TOKEN_TIME})"
    return f"{shown}; prompts without streams: {prompts}"


def _in_tokens(ratio: float | None) -> str:
    return "as long as – tokens" if ratio is None else f"as long as {ratio:.0f} tokens"


def _line(cell: Cell) -> str:
    if cell.reasons:
        return f"valid: false ({'; '.join(cell.reasons)})"
    stall, ttft = cell.figures["gaps_ms"].get(figures.STALL, {}), cell.figures["ttft_ms"]
    return f"worst gap {stall.get('max', 0):.0f} ms, first token after {ttft.get('p50', 0):.0f} ms"
