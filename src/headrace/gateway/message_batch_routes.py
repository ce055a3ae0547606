"""/v1/messages/batches: Anthropic's API for batches. All requests of a batch are in one body."""

import contextlib
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.batches.batches import Batches, NewBatch
from headrace.batches.records import CANCELED, ERRORED, EXPIRED, SUCCEEDED, BatchRecord
from headrace.batches.store import BatchStore
from headrace.gateway.auth import Auth
from headrace.gateway.delivery import unless_left
from headrace.gateway.file_routes import content_of
from headrace.gateway.http_responses import answer
from headrace.gateway.listing import ANTHROPIC_PAGING, page
from headrace.gateway.model_entries import utc
from headrace.gateway.request_bodies import Bodies
from headrace.intake.intake import Intake
from headrace.protocols.anthropic.messages import ROUTE
from headrace_common.errors import RequestError
from headrace_common.worker_jobs import SplitRequests

_WINDOW_S = 24 * 3600
_KINDS = (SUCCEEDED, ERRORED, CANCELED, EXPIRED)


class MessageBatchRoutes:
    def __init__(
        self,
        batches: Batches,
        batch_store: BatchStore,
        intake: Intake,
        auth: Auth,
        bodies: Bodies,
        prefix: str,
    ) -> None:
        """Set up the routes. All routes of the server are below the path `prefix`."""
        self._batches = batches
        self._blobs = batch_store.blobs
        self._intake = intake
        self._auth = auth
        self._bodies = bodies
        self._prefix = prefix

    async def create(self, request: Request) -> ASGIApp:
        owner = self._owner(request)
        async with self._bodies.read(request) as body:
            job = SplitRequests(self._batches.max_lines, ROUTE)
            splitting = self._intake.do(job, body, "requests")
            lines = await unless_left(request.receive, splitting)
        async with await self._batches.files.begin(owner) as upload:
            await upload.write(lines)
            file = await upload.finish("requests.jsonl", "messages")
        order = NewBatch(owner, "anthropic", ROUTE, file.id, _WINDOW_S)
        try:
            batch = await self._batches.create(order)
        except RequestError:
            # Remove the file. If the batch was stored despite the error, the batch needs the
            # file, and the removal fails.
            with contextlib.suppress(RequestError):
                await self._batches.remove_file(owner, file.id)
            raise
        return answer(self._described(request, batch))

    async def list(self, request: Request) -> ASGIApp:
        batches = await self._batches.of(self._owner(request), "anthropic")
        found = page(request, batches, lambda it: self._described(request, it), ANTHROPIC_PAGING)
        del found["object"]
        return answer(found)

    async def read(self, request: Request) -> ASGIApp:
        return answer(self._described(request, await self._find(request)))

    async def cancel(self, request: Request) -> ASGIApp:
        batch = await self._batches.cancel(await self._find(request))
        return answer(self._described(request, batch))

    async def delete(self, request: Request) -> ASGIApp:
        batch = await self._find(request)
        await self._batches.remove(batch)
        return answer({"id": batch.id, "type": "message_batch_deleted"})

    async def results(self, request: Request) -> ASGIApp:
        batch = await self._find(request)
        if not batch.has_ended or batch.output_id is None:
            message = (
                f"The batch has not ended: {batch.num_ended} of {batch.num_lines} requests are "
            )
            message += "done. Ask again once its processing_status is ended."
            raise RequestError("batch_not_ended", message, "id")
        file = await self._batches.files.get(batch.owner, batch.output_id)
        return content_of(self._blobs, file, "application/x-jsonl")

    async def _find(self, request: Request) -> BatchRecord:
        id = request.path_params["id"]
        return await self._batches.get(self._owner(request), id, "anthropic")

    def _owner(self, request: Request) -> str:
        return self._auth.owner(request.headers)

    def _described(self, request: Request, batch: BatchRecord) -> dict[str, Any]:
        """Return the batch in the format of Anthropic's API."""
        status = "ended" if batch.has_ended else "in_progress"
        if batch.status == "cancelling":
            status = "canceling"
        counts = {kind: batch.counts.get(kind, 0) for kind in _KINDS}
        path = f"{self._prefix}{ROUTE}/batches/{batch.id}/results"
        url = str(request.url.replace(path=path, query=""))
        return {
            "id": batch.id,
            "type": "message_batch",
            "processing_status": status,
            "request_counts": {"processing": max(0, batch.num_lines - batch.num_ended), **counts},
            "created_at": utc(batch.created_at),
            "expires_at": utc(batch.expires_at),
            "ended_at": _utc_or_none(batch.ended_at),
            "cancel_initiated_at": _utc_or_none(batch.at.get("cancelling")),
            "archived_at": None,
            "results_url": url if batch.has_ended else None,
        }


def _utc_or_none(seconds: int | None) -> str | None:
    return None if seconds is None else utc(seconds)
