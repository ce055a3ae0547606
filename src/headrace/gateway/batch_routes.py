"""/v1/batches: OpenAI's API for batches. A batch answers the lines of a file in the background."""

import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.batches.answers import ROUTES
from headrace.batches.batches import Batches, NewBatch
from headrace.batches.records import SUCCEEDED, BatchRecord
from headrace.gateway.auth import Auth
from headrace.gateway.delivery import unless_left
from headrace.gateway.http_responses import answer
from headrace.gateway.listing import Paging, page
from headrace.gateway.request_bodies import Bodies
from headrace.workers.pool import JobRunner
from headrace_common.errors import RequestError
from headrace_common.worker_jobs import LineFault, ReadBatch

_WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
_MAX_HOURS = 720
_PAGING = Paging()
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class BatchRoutes:
    def __init__(self, batches: Batches, work: JobRunner, auth: Auth, bodies: Bodies) -> None:
        self._batches = batches
        self._work = work
        self._auth = auth
        self._bodies = bodies

    async def create(self, request: Request) -> ASGIApp:
        async with self._bodies.read(request) as body:
            fields = await unless_left(request.receive, self._work.do(ReadBatch(), body))
        if fields.endpoint not in ROUTES:
            message = f"endpoint must be one of {', '.join(ROUTES)}."
            raise RequestError("invalid_value", message, "endpoint")
        hours = _WINDOW.fullmatch(fields.completion_window)
        if hours is None or int(hours[1]) > _MAX_HOURS:
            message = (
                f"completion_window must be a number of hours up to {_MAX_HOURS}, such as 24h."
            )
            raise RequestError("invalid_value", message, "completion_window")
        owner, window_s = self._owner(request), int(hours[1]) * 3600
        order = NewBatch(
            owner, "openai", fields.endpoint, fields.input_file_id, window_s, fields.metadata
        )
        return answer(described(await self._batches.create(order)))

    async def list(self, request: Request) -> ASGIApp:
        batches = await self._batches.of(self._owner(request), "openai")
        return answer(page(request, batches, described, _PAGING))

    async def read(self, request: Request) -> ASGIApp:
        return answer(described(await self._find(request)))

    async def cancel(self, request: Request) -> ASGIApp:
        return answer(described(await self._batches.cancel(await self._find(request))))

    async def _find(self, request: Request) -> BatchRecord:
        return await self._batches.get(self._owner(request), request.path_params["id"], "openai")

    def _owner(self, request: Request) -> str:
        return self._auth.owner(request.headers)


def described(batch: BatchRecord) -> dict[str, Any]:
    """Return the batch in the format of OpenAI's API."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.route,
        "errors": _errors(batch.faults) if batch.faults else None,
        "input_file_id": batch.input_id,
        "completion_window": f"{batch.window_s // 3600}h",
        "status": batch.status,
        "output_file_id": batch.output_id if batch.counts.get(SUCCEEDED) else None,
        "error_file_id": batch.error_id if _num_failed(batch.counts) else None,
        "created_at": batch.created_at,
        **{f"{name}_at": batch.at.get(name) for name in _TIMES},
        "expires_at": batch.expires_at,
        "request_counts": {
            "total": batch.num_lines,
            "completed": batch.counts.get(SUCCEEDED, 0),
            "failed": _num_failed(batch.counts),
        },
        "metadata": dict(batch.metadata) or None,
    }


def _num_failed(counts: Mapping[str, int]) -> int:
    return sum(num for kind, num in counts.items() if kind != SUCCEEDED)


def _errors(faults: tuple[LineFault, ...]) -> dict[str, Any]:
    data = [
        {"code": it.code, "line": it.line, "message": it.message, "param": it.param}
        for it in faults
    ]
    return {"object": "list", "data": data}
