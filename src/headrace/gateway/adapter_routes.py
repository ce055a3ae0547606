"""Routes that load and unload LoRA adapters of served models. Paths and fields are vLLM's."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from headrace.gateway.request_bodies import Bodies
from headrace.generation.generation import Generation
from headrace.protocols.fields.common import check_required
from headrace.protocols.fields.kinds import Kind, String, read_fields
from headrace.protocols.requests import decode

UNLOAD_FIELDS: Mapping[str, Kind] = {"lora_name": String(least=1)}
LOAD_FIELDS: Mapping[str, Kind] = {
    **UNLOAD_FIELDS,
    "lora_path": String(least=1),
    "base_model_name": String(least=1),
}
_MAX_BODY = 1 << 16


class AdapterRoutes:
    def __init__(self, generation: Generation, bodies: Bodies) -> None:
        self._generation = generation
        self._bodies = bodies

    async def load(self, request: Request) -> ASGIApp:
        """Load an adapter, and answer when requests can name the adapter."""
        given = await self._read(request, LOAD_FIELDS, ("lora_name", "lora_path"))
        name = given["lora_name"]
        await self._generation.adapters.load(name, given["lora_path"], given.get("base_model_name"))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> ASGIApp:
        """Unload an adapter, and answer when the adapter's last stream has ended."""
        name = (await self._read(request, UNLOAD_FIELDS, ("lora_name",)))["lora_name"]
        await self._generation.adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _read(
        self, request: Request, table: Mapping[str, Kind], required: tuple[str, ...]
    ) -> dict[str, Any]:
        given = decode(await self._bodies.read_small(request, _MAX_BODY))
        check_required(required, given)
        return read_fields(table, given)
