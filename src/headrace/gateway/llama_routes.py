"""Routes of llama.cpp's server and of vLLM that show a model's settings, tokenizer and slots."""

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
from headrace.gateway.state_routes import Snapshot, stall_target
from headrace.generation.event_builder import ChoiceProgress
from headrace.generation.generation import Generation
from headrace.protocols.dialect import encode
from headrace.protocols.llamacpp.completions import settings_of
from headrace_common.errors import ModelError, RequestError
from headrace_common.sampling import Sampling
from headrace_common.version import __version__

logger = logging.getLogger(__name__)


class LlamaRoutes:
    def __init__(self, generation: Generation, auth: Auth) -> None:
        self._generation = generation
        self._auth = auth

    async def props(self, request: Request) -> ASGIApp:
        host = await self._read_host(request)
        is_pinned = self._generation.fleet.pinned is not None
        is_sleeping = not is_pinned and host.ready is None
        role = "model" if is_pinned else "router"
        shown = {"role": role, "state": self._generation.state}
        target = stall_target(host)
        shown |= {"max_stall_ms": target["stall_target_ms"], **target}
        return answer(_props(host.model, is_sleeping) | shown | {"draft": _draft(host)})

    async def tokenizer_info(self, request: Request) -> ASGIApp:
        """Describe the tokenizer as vLLM does.

        lm-eval calls this route before /tokenize.
        """
        return answer(_tokenizer_info((await self._read_host(request)).model))

    async def _read_host(self, request: Request) -> ModelHost:
        """Return the host of the model in the query.

        The host has already read the model's tokenizer and template.
        """
        host = self._generation.fleet.hosts.get(request.query_params.get("model"))
        if host.known is None:
            await unless_left(request.receive, read_known(host))
        return host

    async def slots(self, request: Request) -> ASGIApp:
        """List the slots of all models, or of the model in the query.

        For a client's key, slots that other keys use look idle.
        """
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
    """Read the parts of a model that need no weights; raise RequestError on failure."""
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
        "kv_cache_dtype": ready.kv_cache_dtype if ready else None,
    }


def _draft(host: ModelHost) -> dict[str, Any] | None:
    """Describe the draft model, and how many of its tokens were right; None without one."""
    facts, status = host.ready and host.ready.draft, host.engine.status
    if not facts:
        return None
    return {
        "model": facts.name,
        "num_parameters": facts.num_parameters,
        "weight_bytes": facts.weight_bytes,
        "tokens": status.num_drafted if status else 0,
        "tokens_right": status.num_drafted_right if status else 0,
    }


def _tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """Return the tokenizer's class and special tokens, as in tokenizer_config.json."""
    return {
        # transformers uses this class for any tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **model.tokenizer.special_tokens,
        "model_max_length": model.max_model_len,
        "chat_template": model.template.source if model.template else None,
    }


def _defaults(model: ServedModel) -> dict[str, Any]:
    """Return the default settings of a request, under the names of llama.cpp and of Headrace."""
    plain = Sampling(seed=-1)
    given = {
        name: value
        for name in plain.__struct_fields__
        if (value := getattr(model.defaults, name, None)) is not None
    }
    sampling = msgspec.structs.replace(plain, **given)
    own = {"repetition_penalty": sampling.repetition_penalty, "n": 1, "stop": ()}
    return settings_of(sampling) | own


def slots_of(
    generation: Generation, hosts: Iterable[ModelHost], owner: str | None
) -> list[Snapshot]:
    """Return the slots in llama.cpp's format, one for each sequence that can run at the same time.

    A preempted sequence still counts as running. Only sequences of `owner` are shown; if `owner`
    is None, all sequences are shown.
    """
    shown: list[Snapshot] = []
    for host in hosts:
        every = generation.streams_of(host)
        streams = (it for it in every if owner in (None, it.record.names.owner))
        running = (each for stream in streams for each in stream.choice_progress().items())
        is_loaded = host.ready is not None and host.engine.state != "unloaded"
        num_slots = host.ready.max_num_seqs if host.ready and is_loaded else 0
        last = len(shown) + num_slots
        for number, standing in itertools.islice(running, num_slots):
            shown.append(_slot(len(shown), number, standing, host))
        shown += [{"id": id, "is_processing": False} for id in range(len(shown), last)]
    return shown


def _slot(id: int, number: int, standing: ChoiceProgress, host: ModelHost) -> Snapshot:
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
