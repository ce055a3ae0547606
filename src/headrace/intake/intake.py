"""The entry point for requests: turns a body into a stream, and does not depend on HTTP."""

import logging
import secrets
from typing import NamedTuple

import msgspec

from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.intake.earlier_responses import EarlierResponses
from headrace.intake.progress_policy import ProgressPolicy, with_progress
from headrace.intake.vectors import VectorAnswers
from headrace.protocols.dialect import Dialect, dialect_of
from headrace.protocols.inserted_texts import client_of
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.requests import to_request
from headrace.streams.record import Names
from headrace.text.tool_formats.generic import GENERIC
from headrace.workers.job_line import LARGE, Body
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.jobs import (
    CheckedBody,
    Job,
    KnownModel,
    ModelsNamedIn,
    NameModels,
    R,
    ReadBody,
    ReadJob,
)
from headrace_common.request import Request, ResponseOptions, Route

logger = logging.getLogger(__name__)

CONVERSATION, KEY = "X-Conversation-Id", "Idempotency-Key"
_MAX_CONVERSATION, _MAX_KEY = 512, 255


class Opened(NamedTuple):
    """The stream of a request.

    `is_attached`: an equal earlier request has opened it. `ignored` fields have no effect.
    `tool_format`: the format in which the model sees the tools; empty if it sees none.
    """

    stream: Found
    is_attached: bool
    ignored: tuple[str, ...]
    tool_format: str


class Intake:
    """Reads bodies and opens their streams; one per server.

    HTTP, the WebSocket, batches and LLM all send their requests through it.
    """

    def __init__(self, generation: Generation, config: ServerConfig) -> None:
        self.vectors = VectorAnswers(generation)
        self.earlier = EarlierResponses(generation, config.http.max_body_bytes)
        self._generation = generation
        self._keeps_inserted = config.streams.inserted_texts == "keep"
        self._progress = ProgressPolicy(config.streams.return_progress_for)
        self._warned: set[str] = set()  # models and inserted texts that were logged

    # bodies

    async def read_models(self, body: Body, place: ModelsNamedIn = "body") -> None:
        """Read each model that the body names, unless it was read or must be downloaded first.

        Workers read a model without the limits on time and memory that apply to the first reading,
        so they must not be the first to meet its files. RequestError if one cannot be read.
        """
        fleet = self._generation.fleet
        if all(host.known is not None for host in fleet.hosts.all()):
            return
        for name in await self._generation.work.do(NameModels(place), body):
            host = fleet.hosts.get(name)
            if host.known is None and host.is_here:
                await fleet.read(host)

    async def do(self, job: Job[R], body: Body, place: ModelsNamedIn = "body") -> R:
        """Have a worker do a job for a body, once the models that the body names were read."""
        await self.read_models(body, place)
        return await self._generation.work.do(job, body)

    async def read(self, job: ReadJob, body: Body) -> CheckedBody:
        """Have a worker check a body, and tokenize it if it is small and its model is loaded.

        An alias in the body is replaced by the name of its model, here and nowhere else. The
        alias is kept for the answer.
        """
        return await self.resolve(await self._checked(job, body))

    async def resolve(self, checked: CheckedBody) -> CheckedBody:
        """Return the body with the name of a model in place of an alias."""
        if (asked := checked.fields.get("model")) is None:
            return checked
        name: str = await self._generation.fleet.resolve(asked)
        if name == asked:
            return checked
        fields = {**checked.fields, "model": name, "alias": asked}
        return msgspec.structs.replace(checked, fields=fields)

    async def _checked(self, job: ReadJob, body: Body) -> CheckedBody:
        await self.read_models(body)
        known = {
            host.name: KnownModel(host.model.number, host.model.max_model_len)
            for host in self._generation.fleet.hosts.all()
            if host.ready and job.task in host.ready.tasks and sum(map(len, body)) < LARGE
        }
        try:
            job_with_tokens = msgspec.structs.replace(job, known=known)
            return await self._generation.work.do(job_with_tokens, body)
        except RequestError as error:
            if error.code != "template_failed":
                raise
        # Check the body alone. Its template fails again when the stream is opened.
        return await self._generation.work.do(job, body)

    async def read_from(self, agent: str, route: Route, body: Body) -> CheckedBody:
        """Return the body of a generation route, by the rules for clients with this User-Agent."""
        client = self.client_of(agent)
        checked = await self.read(ReadBody(route, client=client), body)
        for name, text in checked.inserted.items():
            if (told := f"{client}: {name}") not in self._warned:
                self._warned.add(told)
                logger.info(
                    "%s: its prompt has %s, %r: left out of it. %s", client, name, text, _WHY
                )
        return self._progress.apply(agent, checked)

    def client_of(self, agent: str) -> str:
        """Return the client's name, if it is one whose inserted texts are to be left out."""
        return "" if self._keeps_inserted else client_of(agent)

    # streams

    async def open(
        self,
        route: Route,
        checked: CheckedBody,
        names: Names,
        id: StreamId | None = None,
        options: ResponseOptions | None = None,
    ) -> Opened:
        """Open the stream of a request, or find the stream of an equal one by its names.

        `options` replace those that the body asks for.
        """
        checked = await self.earlier.restore(checked, names.owner)
        offers_tools = openai_chat.offers_tools(checked.fields)
        stream = await self._generation.streams.find_equal(names)
        is_attached = stream is not None
        if stream is None:
            name = checked.fields.get("model")
            host = await self._generation.host_for(name, waits=names.conversation is None)
            whole = await self.earlier.before(checked, names.owner)
            whole = with_progress(whole, host.config.return_progress)
            dialect = dialect_of(route)
            request = to_request(dialect, whole, host.model)
            if options is not None:
                request = msgspec.structs.replace(request, response_options=options)
            if offers_tools:
                self._warn_of_tools(host.name, _tool_format(request))
            stream = await self._generation.open(request, names, whole, id or new_id(dialect))
            # Another request may have taken the idempotency key in the meantime.
            is_attached = stream.record.request.response_options is not request.response_options
        ignored, tool_format = checked.ignored, ""
        if offers_tools:
            tool_format = _tool_format(stream.record.request)
            ignored += () if tool_format else ("tools",)
        return Opened(stream, is_attached, ignored, tool_format)

    def _warn_of_tools(self, model: str, tool_format: str) -> None:
        """Warn once for each model that was not made for tools."""
        if tool_format in _TOOLS_APART and model not in self._warned:
            self._warned.add(model)
            logger.warning("%s %s", model, _TOOLS_APART[tool_format])


_TOOLS_APART = {
    "": "has no tool format (--tool-format none); tools that clients send have no effect on it, "
    "and X-Headrace-Ignored names them.",
    GENERIC: "has a chat template that knows no tools; a text before the conversation describes "
    "them, in a form that it was not trained on, and X-Headrace-Tools says so.",
}
_WHY = (
    "It may be another in each request, and every prompt would then be read anew; "
    "--inserted-texts keep leaves it where it is."
)


def _tool_format(request: Request) -> str:
    return request.channels.tools if request.channels else ""


def new_id(dialect: Dialect) -> StreamId:
    return StreamId(dialect.ID_PREFIX + secrets.token_hex(16))


def names_of(
    owner: str, checked: CheckedBody, conversation: str | None = None, key: str | None = None
) -> Names:
    """Return the names of a request; RequestError `invalid_value` for one that is not valid."""
    fields = checked.fields
    _check_name(conversation, CONVERSATION, _MAX_CONVERSATION)
    _check_name(key, KEY, _MAX_KEY)
    return Names(
        owner=owner,
        conversation=conversation,
        key=key,
        digest=checked.digest,
        is_stored=bool(fields.get("store") or fields.get("background")),
        is_kept=bool(checked.kept) and "store" not in fields,
        can_attach=fields.get("attach") is not False,
    )


def _check_name(value: str | None, header: str, longest: int) -> None:
    if value is None or (0 < len(value) <= longest and value.isascii() and value.isprintable()):
        return
    raise RequestError(
        "invalid_value", f"{header} takes 1 to {longest} printable ASCII characters.", header
    )
