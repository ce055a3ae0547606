"""Routes of llama.cpp's server and vLLM for their own clients: a model's settings, and slots."""

import itertools
import logging
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.gateway.auth import Auth
from headrace.gateway.delivery import unless_left
from headrace.gateway.http_responses import answer
from headrace.gateway.state_routes import Snapshot, stall_target_ms
from headrace.generation.event_builder import Standing
from headrace.generation.generation import Generation
from headrace.protocols.dialect import encode
from headrace.protocols.llamacpp.answers import settings_of
from headrace_common.errors import ModelError, RequestError
from headrace_common.sampling import Sampling
from headrace_common.version import __version__

logger = logging.getLogger(__name__)


class LlamaRoutes:
    def __init__(self, generation: Generation, auth: Auth) -> None:
        self._generation = generation
        self._auth = auth

    async def props(self, request: Request) -> ASGIApp:
        host = await self._known(request)
        is_pinned = self._generation.fleet.pinned is not None
        is_sleeping = not is_pinned and host.ready is None
        role = "model" if is_pinned else "router"
        shown = {"role": role, "state": self._generation.state}
        return answer(_props(host.model, is_sleeping) | shown)

    async def tokenizer_info(self, request: Request) -> ASGIApp:
        """Describes the tokenizer as vLLM does: lm-eval asks before it tokenizes by /tokenize."""
        return answer(_tokenizer_info((await self._known(request)).model))

    async def _known(self, request: Request) -> ModelHost:
        """The model that the query names, whose text side has been read."""
        host = self._generation.fleet.hosts.get(request.query_params.get("model"))
        if host.known is None:
            await unless_left(request.receive, read_known(host))
        return host

    async def slots(self, request: Request) -> ASGIApp:
        """Lists slots of all models, or of the one named. To a key, others' slots look idle."""
        hosts = self._generation.fleet.hosts
        name = request.query_params.get("model")
        sees_all = self._auth.sees_all(request.headers)
        owner = None if sees_all else self._auth.owner(request.headers)
        shown = slots_of(
            self._generation, hosts.all() if name is None else (hosts.get(name),), owner
        )
        is_full = all(slot["is_processing"] for slot in shown)
        if is_full and request.query_params.get("fail_on_no_slot"):
            raise RequestError("no_idle_slot", "Every slot is busy; try again later.")
        return Response(encode(shown), media_type="application/json")


async def read_known(host: ModelHost) -> None:
    """Reads the parts of a model that need no weights."""
    try:
        await host.read()
    except ModelError as error:
        message = f"The model {host.name!r} could not be read ({error.code})"
        message += "; the server's log says why."
        logger.error("%s could not be read. %s", host.name, error)
        raise RequestError("load_failed", message, "model") from error


def _props(model: ServedModel, is_sleeping: bool) -> dict[str, Any]:
    ready = model.ready
    settings = {"params": _defaults(model), "n_ctx": model.max_model_len}
    return {
        "default_generation_settings": settings,
        "total_slots": ready.max_num_seqs if ready else None,
        "model_alias": model.names[0],
        "model_path": model.root,
        "chat_template": model.template.source if model.template else None,
        "bos_token": model.tokenizer.bos_token,
        "eos_token": model.tokenizer.eos_token,
        "modalities": {"vision": model.has_vision, "audio": False},
        "build_info": f"headrace {__version__}",
        "is_sleeping": is_sleeping,
        "lane": ready.lane if ready else None,
        "device": ready.device if ready else None,
        "dtype": ready.dtype if ready else None,
        "max_stall_ms": stall_target_ms(ready),
    }


def _tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """The special tokens under their names in tokenizer_config.json, `bos_token` and its like."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # transformers' for any tokenizer.json
        **model.tokenizer.special_tokens,
        "model_max_length": model.max_model_len,
        "chat_template": model.template.source if model.template else None,
    }


def _defaults(model: ServedModel) -> dict[str, Any]:
    """The settings of a request that sets none, by llama.cpp's names and by ours."""
    plain = Sampling(seed=-1)
    given = {
        name: value
        for name in plain.__struct_fields__
        if (value := getattr(model.defaults, name, None)) is not None
    }
    sampling = msgspec.structs.replace(plain, **given)
    ours = {"repetition_penalty": sampling.repetition_penalty, "n": 1, "stop": ()}
    return settings_of(sampling) | ours


def slots_of(
    generation: Generation, hosts: Iterable[ModelHost], owner: str | None
) -> list[Snapshot]:
    """The slots as llama.cpp's server shows them: one for each sequence that can run at once.

    One that has lost its memory to others for a while still counts as running. Those of one owner,
    or of all where it is None.
    """
    shown: list[Snapshot] = []
    for host in hosts:
        every = generation.streams_of(host)
        streams = (it for it in every if owner in (None, it.record.names.owner))
        running = (each for stream in streams for each in stream.standings().items())
        is_there = host.ready is not None and host.engine.state != "unloaded"
        num_places = host.ready.max_num_seqs if host.ready and is_there else 0
        last = len(shown) + num_places
        for number, standing in itertools.islice(running, num_places):
            shown.append(_slot(len(shown), number, standing, host))
        shown += [{"id": id, "is_processing": False} for id in range(len(shown), last)]
    return shown


def _slot(id: int, number: int, standing: Standing, host: ModelHost) -> Snapshot:
    left = -1 if standing.num_left is None else standing.num_left
    return {
        "id": id,
        "is_processing": True,
        "id_task": number,
        "model": host.name,
        "n_ctx": host.model.max_model_len,
        "n_prompt_tokens": standing.num_prompt,
        "n_prompt_tokens_processed": standing.num_processed,
        "n_prompt_tokens_cache": standing.num_cached,
        "next_token": [{"n_decoded": standing.num_decoded, "n_remain": left}],
    }
