"""The entry point for requests: turns a body into a stream, and does not depend on HTTP."""

import logging
import secrets
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from headrace.fleet.model_host import ModelHost
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.intake.conversations import Conversations
from headrace.intake.earlier_responses import EarlierResponses
from headrace.intake.long_responses import LongResponses
from headrace.intake.vectors import VectorAnswers
from headrace.protocols.dialect import Dialect, dialect_of
from headrace.protocols.inserted_texts import AGENTS, client_of
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.requests import to_request
from headrace.streams.record import CONVERSATION as CONVERSATIONS
from headrace.streams.record import Names
from headrace.text.tool_formats.generic import GENERIC
from headrace.workers.input_memory import HeldInput
from headrace.workers.job_queue import LARGE, Body
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.log_context import KEY_NAME
from headrace_common.request import Request, ResponseOptions, Route
from headrace_common.worker_jobs import (
    CheckedBody,
    Job,
    KnownModel,
    ModelsNamedIn,
    NameModels,
    R,
    ReadBody,
    ReadJob,
)

logger = logging.getLogger(__name__)

CONVERSATION, KEY = "X-Conversation-Id", "Idempotency-Key"
_MAX_CONVERSATION, _MAX_KEY = 512, 255


class Opened(NamedTuple):
    """The stream of a request.

    `is_attached` is true if an equal earlier request opened the stream. `ignored` has the fields
    without effect. `tool_format` is the format in which the model sees the tools; empty without
    tools.
    """

    stream: Found
    is_attached: bool
    ignored: tuple[str, ...]
    tool_format: str


class Intake:
    """Reads request bodies and opens a stream for each request. A server has one Intake.

    The requests of HTTP, the WebSocket, batches and the class LLM all pass through the Intake.
    """

    def __init__(self, generation: Generation, config: ServerConfig) -> None:
        self.vectors = VectorAnswers(generation)
        most = config.http.max_body_bytes
        self.conversations = Conversations(generation, most)
        self.earlier: Mapping[Route, EarlierResponses] = {
            "/v1/responses": EarlierResponses(generation, self.conversations, most)
        }
        self.long_responses = LongResponses(generation)
        self._generation = generation
        self._keeps_inserted = config.streams.inserted_texts == "keep"
        self._progress = _ProgressPolicy(config.streams.return_progress_for)
        # Names of models and of inserted texts for which a line was already logged.
        self._warned: set[str] = set()

    # The methods below read bodies.

    async def read_models(self, body: Body, place: ModelsNamedIn = "body") -> None:
        """Read each model in the body, unless it was read or must be downloaded first.

        The first reading of a model's files has limits on time and memory. Workers read the files
        without these limits, so a worker must not be the first reader. Raise RequestError if a
        model cannot be read.
        """
        fleet = self._generation.fleet
        for host in fleet.hosts.all():
            if host.known is None:
                break
        else:
            return
        for name in await self._generation.work.do(NameModels(place), body):
            host = fleet.hosts.get(name)
            if host.known is None and host.is_here:
                await fleet.read(host)

    async def do(self, job: Job[R], body: Body, place: ModelsNamedIn = "body") -> R:
        """Read the models that the body names. Then have a worker do a job for the body."""
        await self.read_models(body, place)
        return await self._generation.work.do(job, body)

    async def read(self, job: ReadJob, body: Body) -> CheckedBody:
        """Have a worker check a body. Also tokenize a small body if its model is loaded.

        Only here, an alias in the body is replaced by the name of its model. The alias is kept for
        the answer.
        """
        await self.read_models(body)
        known: dict[str, KnownModel] = {}
        for host in self._generation.fleet.hosts.all() if sum(map(len, body)) < LARGE else ():
            model = host.known
            if model is not None and model.ready and job.task in model.ready.tasks:
                known[host.name] = KnownModel(model.number, model.ready.max_model_len)
        try:
            job_with_tokens = msgspec.structs.replace(job, known=known)
            checked = await self._generation.work.do(job_with_tokens, body)
        except RequestError as error:
            if error.code != "template_failed":
                raise
            # Check the body without tokenizing it. When the stream is opened, the template is
            # rendered again and the error is reported.
            checked = await self._generation.work.do(job, body)
        return await self.resolve(checked) if "model" in checked.fields else checked

    async def resolve(self, checked: CheckedBody) -> CheckedBody:
        """Return the body with an alias replaced by the name of its model."""
        if (asked := checked.fields.get("model")) is None:
            return checked
        name: str = await self._generation.fleet.resolve(asked)
        if name == asked:
            return checked
        fields = {**checked.fields, "model": name, "alias": asked}
        return msgspec.structs.replace(checked, fields=fields)

    async def read_from(self, agent: str, route: Route, body: Body) -> CheckedBody:
        """Read the body of a generation route, and apply the rules for the client's User-Agent."""
        client = self.client_of(agent) if agent.startswith(AGENTS) else ""
        checked = await self.read(ReadBody(route, client=client), body)
        for name, text in checked.inserted.items():
            if (seen := f"{client}: {name}") not in self._warned:
                self._warned.add(seen)
                logger.info("%s: removed %s from its prompt: %r. %s", client, name, text, _WHY)
        return self._progress.apply(agent, checked)

    def client_of(self, agent: str) -> str:
        """Return the client's name if its inserted texts are to be removed; otherwise empty."""
        return "" if self._keeps_inserted else client_of(agent)

    # The methods below open streams.

    async def open(
        self,
        route: Route,
        checked: CheckedBody,
        names: Names,
        id: StreamId | None = None,
        options: ResponseOptions | None = None,
    ) -> Opened:
        """Open the stream of a request, or return the stream of an equal earlier request.

        `options` replace the body's response options.
        """
        offers_tools = openai_chat.offers_tools(checked.fields)
        # A repeated request needs no memory for its input.
        stream = await self._generation.streams.find_equal(names)
        is_attached = stream is not None
        if stream is None:
            earlier = self.earlier.get(route)
            with self._generation.queues.inputs.hold(names.owner, checked.num_bytes) as held:
                checked, host = await self._prepare(checked, names, earlier, held)
            if earlier is not None:
                names = msgspec.structs.replace(names, follows=checked.fields.get("follows"))
            dialect = dialect_of(route)
            request = to_request(dialect, checked, host.model)
            if options is not None:
                request = msgspec.structs.replace(request, response_options=options)
            if offers_tools:
                self._warn_of_tools(host.name, _tool_format(request))
            # `open` counts the input from here on.
            stream = await self._generation.open(request, names, checked, id or new_id(dialect))
            # Another request can have used the same idempotency key in the meantime.
            is_attached = stream.record.request.response_options is not request.response_options
        ignored, tool_format = checked.ignored, ""
        if offers_tools:
            tool_format = _tool_format(stream.record.request)
            ignored += () if tool_format else ("tools",)
        return Opened(stream, is_attached, ignored, tool_format)

    async def _prepare(
        self,
        checked: CheckedBody,
        names: Names,
        earlier: EarlierResponses | None,
        held: HeldInput,
    ) -> tuple[CheckedBody, ModelHost]:
        """Return a request in its final form, and the host of its model.

        The host's tokenizer is loaded. `held` counts the input.
        """
        if earlier is not None:
            checked = await earlier.restore(checked, names.owner)
            held.resize(checked.num_bytes)
        can_wait = names.conversation is None or names.is_in_conversation
        host = await self._generation.host_for(checked.fields.get("model"), waits=can_wait)
        if earlier is not None:
            checked = await earlier.before(checked, names.owner)
            held.resize(checked.num_bytes)
            checked = await self.long_responses.shorten(checked, host, held)
        if host.config.return_progress != "off":
            checked = _with_progress(checked, host.config.return_progress)
        return checked, host

    def _warn_of_tools(self, model: str, tool_format: str) -> None:
        """Warn once for each model that was not made for tools."""
        if tool_format in _TOOLS_APART and model not in self._warned:
            self._warned.add(model)
            logger.warning("%s %s", model, _TOOLS_APART[tool_format])


class _ProgressPolicy:
    """Decides which clients get a prompt's progress without asking for it.

    The rules, such as `key:ann=on` and `agent:opencode/*=reasoning`, are tried in order.
    """

    def __init__(self, rules: tuple[str, ...]) -> None:
        self._rules = [_parsed(rule) for rule in rules]

    def apply(self, agent: str, checked: CheckedBody) -> CheckedBody:
        """Apply the first rule that matches the User-Agent or the current API key's name."""
        names = {"key": KEY_NAME.get(), "agent": agent.lower()}
        for kind, pattern, value in self._rules:
            if fnmatchcase(names[kind], pattern):
                return _with_progress(checked, value)
        return checked


_PROGRESS_VALUES: Mapping[str, bool | str] = MappingProxyType(
    {"off": False, "on": True, "reasoning": "reasoning"}
)
"""Maps the words in the settings to the values of `return_progress` in a body."""


def _with_progress(checked: CheckedBody, value: str) -> CheckedBody:
    """Return the body with this value of `return_progress`, unless the client has set a value."""
    if "return_progress" in checked.fields:
        return checked
    return msgspec.structs.replace(
        checked, fields={**checked.fields, "return_progress": _PROGRESS_VALUES[value]}
    )


def _parsed(rule: str) -> tuple[str, str, str]:
    kind, _, rest = rule.partition(":")
    pattern, _, value = rest.rpartition("=")
    return kind, pattern.lower() if kind == "agent" else pattern, value


_TOOLS_APART = {
    "": "has no tool format (--tool-format none). Tools that clients send have no effect, and "
    "the header X-Headrace-Ignored lists them.",
    GENERIC: "has a chat template that does not support tools. A text in the system message "
    "describes them, in a format that the model was not trained on; the header X-Headrace-Tools "
    "says so.",
}
_WHY = (
    "The text can differ in each request, so the prefix cache could not reuse the prompt. "
    "To keep the text, start the server with --inserted-texts keep."
)


def _tool_format(request: Request) -> str:
    return request.channels.tools if request.channels else ""


def new_id(dialect: Dialect) -> StreamId:
    return StreamId(dialect.ID_PREFIX + secrets.token_hex(16))


def names_of(
    owner: str, checked: CheckedBody, conversation: str | None = None, key: str | None = None
) -> Names:
    """Return the names of a request. Raise RequestError `invalid_value` for an invalid name.

    As in llama.cpp, an empty conversation id counts as no id.
    """
    fields = checked.fields
    conversation = conversation or None
    _check_name(conversation, CONVERSATION, _MAX_CONVERSATION)
    _check_name(key, KEY, _MAX_KEY)
    if (id := fields.get("conversation")) is not None:
        if conversation is not None:
            message = f"Send the field conversation or the header {CONVERSATION}, not both."
            raise RequestError("invalid_value", message, "conversation")
        conversation = CONVERSATIONS + id
    return Names(
        owner=owner,
        conversation=conversation,
        key=key,
        digest=checked.digest,
        is_stored=bool(fields.get("store") or fields.get("background")),
        is_kept=bool(checked.kept) and "store" not in fields,
        can_attach=fields.get("attach") is not False,
        items=tuple(fields.get("item_ids", ())),
    )


def _check_name(value: str | None, header: str, longest: int) -> None:
    if value is None or (0 < len(value) <= longest and value.isascii() and value.isprintable()):
        return
    raise RequestError(
        "invalid_value", f"{header} takes 1 to {longest} printable ASCII characters.", header
    )
