"""The matrix benchmark: measures every load of a grid in every chunking mode."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from headrace.bench import validity
from headrace.bench.figures import STALL, between_tokens, figures, spread
from headrace.bench.grid import Grid, MixedLoad
from headrace.bench.load import Background, Injector, PromptSource, run_round, since
from headrace.bench.record import Cell, CellPlan
from headrace.bench.report import busy_share
from headrace.bench.results import MatrixResults, MatrixRow, save
from headrace.bench.target import ServerSaid, Target
from headrace.bench.trace import State, Trace

_STREAM_TOKENS = 128
_LEAD_S = 0.5
_PATIENCE_S = 300.0
# Positions per block. A cached prefix consists of whole blocks.
_BLOCK = 32
_NUM_WARM_UP = 2

Say = Callable[[str], None]


class MeasuredServer:
    """A server with one chunking mode."""

    def __init__(self, chunking: str, target: Target, trace: Trace, seed: int) -> None:
        self.chunking = chunking
        self.target = target
        self._trace = trace
        self._seed = seed

    def described(self) -> State:
        return self._trace.described()

    async def warm_up(self, load: MixedLoad) -> None:
        """Let the server calibrate its predictions of step times, with other prompts."""
        await self.measure(load, _NUM_WARM_UP, f"warm-up {self._seed}")

    async def measure(self, load: MixedLoad, num_prompts: int, seed: str = "") -> MatrixRow:
        """Measure one cell. All servers get the same prompts at the same times."""
        prompts = PromptSource(f"{seed or self._seed} {load}", self.target.num_vocab)
        await self._trace.idle()
        busy = await busy_share()
        try:
            cell, ingestion = await self._cell(load, num_prompts, prompts)
        except ServerSaid as error:
            return MatrixRow(chunking=self.chunking, load=load, reasons=(str(error),))
        seen = figures(cell)
        return MatrixRow(
            chunking=self.chunking,
            load=load,
            reasons=validity.reasons(cell),
            itl_ms=spread(between_tokens(cell)),
            ttft_ms=seen["ttft_ms"],
            stall_ms=seen["gaps_ms"].get(STALL, {}),
            ingestion=ingestion,
            evidence=cell.evidence,
            busy_before=busy,
        )

    async def _cell(
        self, load: MixedLoad, num: int, prompts: PromptSource
    ) -> tuple[Cell, State | None]:
        """Return the cell, and the ingestion report of a prompt sent before the streams."""
        target, length = self.target, load.prompt_tokens
        if num_cached := int(load.cached_share * length) // _BLOCK * _BLOCK:
            # One more token, because a prompt's last token is always processed.
            await target.first_token(prompts.begin_with(num_cached) + prompts.fresh(1))
        plan = CellPlan(
            name=str(load),
            prompt_tokens=length,
            interval_s=1 / load.rate,
            is_random=True,
            num_warm_up=0,
            num_measured=num,
        )
        ingestion = await target.ingestion(prompts.next(length))
        streams = [prompts.fresh(_STREAM_TOKENS) for _ in range(load.num_streams)]
        send = partial(Injector(target, prompts, plan, _PATIENCE_S).send, 0, num)
        await self._trace.begin()
        began = time.perf_counter()
        round = since(began, await run_round(Background(target, streams), send, _LEAD_S))
        await self._trace.idle()
        cell = Cell(plan=plan, num_streams=load.num_streams, rounds=(round,))
        cell.evidence = self._trace.evidence(load.num_streams)
        return cell, ingestion


async def measure(
    urls: dict[str, str],
    grid: Grid,
    results: MatrixResults,
    file: Path | None,
    api_key: str,
    say: Say,
) -> None:
    """Measure the missing cells on these servers. Save each cell as soon as it is finished.

    The servers take turns, so that changes of the machine's speed affect all of them.
    """
    seed, loads = results.conditions.seed, grid.loads()
    missing = {chunking: results.missing(chunking, loads) for chunking in urls}
    number, total = 0, sum(map(len, missing.values()))
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(_opened(*named, api_key, seed))
            for named in urls.items()
        ]
        for server in servers:
            _check_length(server.target, max(grid.lengths))
            results.servers[server.chunking] = server.described()
            say(f"{server.chunking}: warming up")
            await server.warm_up(loads[0])
        for load in loads:
            for server in servers:
                if load not in missing[server.chunking]:
                    continue
                number += 1
                say(f"cell {number} of {total}: {server.chunking}, {load}")
                row = await server.measure(load, grid.num_prompts)
                results.rows.append(row)
                await asyncio.to_thread(save, results, file)


@contextlib.asynccontextmanager
async def _opened(
    chunking: str, url: str, api_key: str, seed: int
) -> AsyncIterator[MeasuredServer]:
    target = Target(url, api_key, secrets.token_hex(8))
    trace = Trace(target)
    async with target.http:
        await target.learn_model()
        await trace.open()
        try:
            yield MeasuredServer(chunking, target, trace, seed)
        finally:
            await trace.close()


def _check_length(target: Target, longest: int) -> None:
    if target.max_model_len <= longest:
        raise ServerSaid(
            f"{target.model} takes {target.max_model_len:,} tokens, and the grid has prompts of "
            f"{longest:,}. Give shorter prompts with --lengths."
        )
