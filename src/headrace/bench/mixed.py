"""The mixed benchmark: calibrates a server, measures controls and a cell, and judges the cell."""

import asyncio
import secrets
import time
from collections.abc import Callable
from statistics import median

import msgspec
from msgspec.structs import replace

from headrace.bench import figures, validity
from headrace.bench.load import Background, Injector, PromptSource, run_round, since
from headrace.bench.profile import Profile, plan_of
from headrace.bench.record import Cell, CellPlan, Injection, Round, ServerRun
from headrace.bench.target import Target
from headrace.bench.trace import State, Trace

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

    async def measure(self, given: CellPlan | None) -> tuple[ServerRun, CellPlan]:
        """Measure everything on this server: the given cell, or a cell that fits this server.

        The cell of the first server is given to the next servers, so that all get the same load.
        """
        self._tell(f"measuring {self._target.url} with the profile {self._profile.name}")
        async with self._target.http:
            await self._target.learn_model()
            await self._trace.open()
            try:
                self._run = replace(self._run, server=self._trace.described())
                self._prompts = PromptSource(
                    self._options.seed, self._target.num_vocab, self._options.warm_share
                )
                plan = given or plan_of(self._profile, self._target.max_model_len)
                alone_s = await self._calibrate(plan.prompt_tokens)
                await self._control()
                await self._cell(plan, alone_s)
                await self._control()
                drift = validity.drifted(self._run.cells, self._profile.max_drift)
                for cell in self._run.cells:
                    cell.doubt(*((drift,) if drift else ()))
            finally:
                await self._trace.close()
        return self._run, plan

    async def _calibrate(self, length: int) -> float:
        """Return the time to first token of a prompt on the idle server, in seconds.

        First warm up the server with one prompt, and measure a control run.
        """
        self._tell(f"{self._target.model}: warming up with a prompt of {length:,} tokens")
        await self._alone(length)
        prompt = self._prompts.fresh(length)
        ingestion = await self._target.ingestion(prompt)
        self._run = replace(self._run, ingestion=ingestion)
        control = await self._control()
        # The mean over all streams, because the median gap can be 0: with speculative decoding, a
        # server sends several tokens together.
        rate = control.figures["stream_tokens_per_s"]
        tpot_s = self._profile.num_streams / rate if rate else 0.0
        await self._trace.begin()
        self._tell(f"timing a prompt of {length:,} tokens on the idle server (2 runs)")
        prompt_s = median([await self._alone(length), await self._alone(length)])
        ratio = figures.ratio(prompt_s, tpot_s)
        await self._trace.idle()
        calibration = {
            "tpot_s": tpot_s,
            "prompt_tokens": length,
            "prompt_s": prompt_s,
            "ratio": ratio and round(ratio, 1),
            "exclusive": _exclusive(self._trace.steps("prompt"), tpot_s),
        } | ({} if tpot_s else {"reason": _NO_TOKEN_TIME})
        self._run = replace(self._run, calibration=calibration)
        self._tell(_speed(tpot_s, prompt_s, ratio))
        return prompt_s

    async def _alone(self, length: int) -> float:
        await self._trace.idle()
        prompt = self._prompts.fresh(length)
        began = time.perf_counter()
        return await self._target.first_token(prompt) - began

    async def _control(self) -> Cell:
        streams, seconds = self._profile.num_streams, self._profile.control_s
        self._tell(f"control: {streams} streams, no prompts, {seconds:g} s")
        round = await self._round(None)
        rounds = (since(round.settled, round),)
        cell = Cell(plan=None, num_streams=self._profile.num_streams, rounds=rounds)
        cell.figures, cell.reasons = figures.figures(cell), validity.reasons(cell)
        self._run.controls.append(cell)
        return cell

    async def _cell(self, plan: CellPlan, alone_s: float) -> None:
        """Measure rounds with one prompt each. A control is measured in the middle."""
        num, num_streams = plan.num_warm_up + plan.num_measured, self._profile.num_streams
        self._tell(
            f"{plan.name}: {num} prompts of {plan.prompt_tokens:,} tokens, sent while "
            f"{num_streams} streams run"
        )
        prompt_s = [await self._alone(plan.prompt_tokens)]
        patience_s = self._profile.patience * alone_s + self._profile.patience_s
        injector = Injector(self._target, self._prompts, plan, patience_s)
        await self._trace.begin()
        began, rounds = time.perf_counter(), []
        for number in range(num):
            if number == plan.num_warm_up + plan.num_measured // 2:
                await self._control()
            rounds.append(await self._round(injector, number))
        cell = Cell(
            plan=plan,
            num_streams=num_streams,
            rounds=tuple(since(began, round) for round in rounds),
        )
        cell.evidence = self._trace.evidence(cell.num_streams)
        cell.figures, cell.reasons = figures.figures(cell), validity.reasons(cell)
        prompt_s.append(await self._alone(plan.prompt_tokens))
        cell.prompt_s = tuple(prompt_s)
        self._run.cells.append(cell)
        self._tell(f"{plan.name}: {_line(cell)}")
        await asyncio.sleep(self._profile.pause_s)

    async def _round(self, injector: Injector | None, number: int = 0) -> Round:
        """Run the streams, and send prompt `number` meanwhile, unless this is a control."""
        profile = self._profile

        async def send() -> list[Injection]:
            return await injector.send(number, 1) if injector else []

        streams = [self._prompts.fresh(profile.stream_tokens) for _ in range(profile.num_streams)]
        lead_s = profile.lead_s if injector else profile.control_s / 2
        round = await run_round(Background(self._target, streams), send, lead_s)
        await self._trace.idle()
        return round

    def _tell(self, line: str) -> None:
        self._say(f"{self._run.label}: {line}")


async def measure(urls: list[tuple[str, str]], options: Options, say: Say) -> list[ServerRun]:
    """Measure each (url, label) in turn, with the cell that fits the first server."""
    runs: list[ServerRun] = []
    plan: CellPlan | None = None
    for url, label in urls:
        run, plan = await Mixed(url, label, options, say).measure(plan)
        runs.append(run)
    return runs


def _exclusive(prompt_steps: list[State], tpot_s: float) -> dict[str, float] | None:
    """Return the longest gap if prompts and streams took turns, estimated from the prompt steps."""
    if not prompt_steps:
        return None
    longest = max(step["actual_ms"] for step in prompt_steps)
    return {"worst_gap_ms": longest + 1000 * tpot_s}


def _speed(tpot_s: float, prompt_s: float, ratio: float | None) -> str:
    shown = f"{1000 * tpot_s:.1f} ms per token" if tpot_s else f"– per token ({_NO_TOKEN_TIME})"
    as_long = "" if ratio is None else f" (as long as {ratio:.0f} decoded tokens)"
    return f"{shown}; prompt on the idle server: {prompt_s:.2f} s{as_long}"


def _line(cell: Cell) -> str:
    if cell.reasons:
        return f"valid: false ({'; '.join(cell.reasons)})"
    stall, ttft = cell.figures["gaps_ms"].get(figures.STALL, {}), cell.figures["ttft_ms"]
    return f"worst gap {stall.get('max', 0):.0f} ms, first token after {ttft.get('p50', 0):.0f} ms"
