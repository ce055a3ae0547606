"""Clients of /v1/conversations: they add, remove and list items, and let responses add theirs.

An answer can be lost after its change was stored, so a repeated change may be stored twice. Apart
from that, the list of items is exactly what the client has sent.
"""

import asyncio
import json
from typing import Any

from detangle import choice, flip, randint, uniform

from stress.simulated_server.clients.common import Backoff, ask, is_later, post_until_accepted
from stress.simulated_server.clients.dialects import RESPONSES, Parsed, check
from stress.simulated_server.clients.responses import ENDED, text_of
from stress.simulated_server.clients.scores import answer_of
from stress.simulated_server.http import API_KEY, CLIENT_KEYS, Broken, connect
from stress.simulated_server.requests import Request
from stress.simulated_server.world import World

ROUTE = "/v1/conversations"
Json = dict[str, Any]


class Conversation:
    """One conversation, and what it must contain."""

    def __init__(self, world: World, id: str) -> None:
        self._world = world
        self.target = f"{ROUTE}/{id}"
        self.id = id
        # Maps each text that was sent to the lowest and the highest possible number of its copies.
        # The texts are in the order in which they were sent.
        self._copies: dict[str, list[int]] = {}
        # The texts that were sent only once, so their order is known.
        self._once: set[str] = set()
        # Maps a text to the answer that must follow it.
        self._answers: dict[str, str] = {}
        self._names = [""]

    async def adds(self) -> None:
        """Add two items in one request: both are stored, or neither."""
        texts = [self._world.new_request().key for _ in range(2)]
        num_tries = await self._change(
            f"{self.target}/items", {"items": [_said(it) for it in texts]}
        )
        self._copies |= {text: [1, num_tries] for text in texts}
        self._once.update(texts if num_tries == 1 else ())

    async def renames(self) -> None:
        name = self._world.new_request().key
        self._names.append(name)
        await self._change(self.target, {"metadata": {"name": name}})
        self._names = [name]

    async def removes(self) -> None:
        """Remove an item; it does not come back."""
        items = await self.items()
        if items:
            item = choice(items)
            target = f"{self.target}/items/{item['id']}"
            _, found = await ask(self._world, "GET", target)
            assert json.loads(found) == item, f"{found!r} instead of {item}"
            await ask(self._world, "DELETE", target, (200, 404))
            await ask(self._world, "GET", target, (404,))
            text = text_of(item)
            if text in self._copies:
                low, high = self._copies[text]
                self._copies[text] = [max(0, low - 1), high - 1]
                self._answers.pop(text, None)
            # Nothing needs to follow a question whose answer was removed.
            self._answers = {asked: it for asked, it in self._answers.items() if it != text}

    async def responds(self) -> None:
        """Let the model answer: the question and the answer belong to the conversation."""
        world, request = self._world, self._world.new_request()
        request = request._replace(content=request.key, max_tokens=choice((3, 20, 60)))
        body = RESPONSES.body(request, False) | {"conversation": self.id, "truncation": "auto"}
        body |= {"store": False} if flip(0.5) else {}
        parsed, num_tries = Parsed(), 0
        backoff = Backoff()
        while not (parsed.is_done or parsed.code):
            num_tries += 1
            headers = {"idempotency-key": request.key}
            try:
                connection = connect(world.server, "POST", ROUTE_OF_RESPONSES, headers, body)
                parsed.take(json.loads(await connection.read()), RESPONSES)
                if is_later(world, parsed.code):
                    parsed = Parsed()
            except Broken:
                pass
            await backoff.pause()
        check(world, request, RESPONSES, parsed)
        if parsed.is_done:
            self._copies[request.content] = [1, num_tries]
            self._once.update([request.content] if num_tries == 1 else ())
            if text := request.answer(world.model.tokenizer).text:
                self._answers[request.content] = text
            world.counts["responses in conversations"] += 1
        elif num_tries > 1:
            self._copies[request.content] = [0, num_tries]

    async def items(self) -> list[Json]:
        """Return all items in their order, page by page."""
        items: list[Json] = []
        limit, has_more = choice((2, 100)), True
        while has_more:
            after = f"&after={items[-1]['id']}" if items else ""
            target = f"{self.target}/items?order=asc&limit={limit}{after}"
            page = json.loads((await ask(self._world, "GET", target))[1])
            items += page["data"]
            has_more = page["has_more"]
        return items

    async def join(self, *others: "Conversation") -> None:
        """Expect the texts that others have added meanwhile, in the order of the stored items."""
        texts = [text_of(it) for it in await self.items()]
        copies = {text: it for other in others for text, it in other._copies.items()}
        for text in sorted(copies, key=lambda it: texts.index(it) if it in texts else -1):
            self._copies[text] = copies[text]
        for other in others:
            self._answers |= other._answers
            self._once |= other._once

    async def check(self) -> None:
        """Compare the items and the name with what was sent."""
        texts = [text_of(it) for it in await self.items()]
        for text, (low, high) in self._copies.items():
            assert low <= texts.count(text) <= high, f"{text}: {texts.count(text)} in {texts}"
        mine = [it for it in texts if it in self._once]
        sent = [it for it in self._copies if it in mine]
        assert mine == sent, f"{mine} instead of {sent}"
        for asked, answer in self._answers.items():
            following = texts[texts.index(asked) + 1 :][:1]
            assert following == [answer], f"{following} instead of {answer!r} after {asked}"
        shown = json.loads((await ask(self._world, "GET", self.target))[1])
        name = shown["metadata"].get("name", "")
        assert name in self._names, f"{self.id} is called {name}, not {self._names}"
        self._world.counts["conversations compared"] += 1

    async def _change(self, target: str, body: Json) -> int:
        """Repeat a change until it is accepted; return how often it was sent."""
        backoff, num_tries = Backoff(), 0
        while True:
            num_tries += 1
            try:
                connection = connect(self._world.server, "POST", target, {}, body)
                answer = await connection.read()
                if connection.status == 200:
                    return num_tries
                code = json.loads(answer)["error"]["code"]
                assert is_later(self._world, code) or self._world.may_fail(code), (
                    f"{target}: {answer!r}"
                )
            except Broken:
                pass
            await backoff.pause()


ROUTE_OF_RESPONSES = RESPONSES.route


def _said(text: str) -> Json:
    return {"type": "message", "role": "user", "content": text}


async def keeps_a_conversation(world: World, request: Request) -> None:
    """Change a conversation in many ways, also in two ways at once, and delete it."""
    if world.expires:
        return
    conversation = Conversation(world, await _create(world, request))
    kinds = (conversation.adds, conversation.renames, conversation.removes, conversation.responds)
    for _ in range(randint(1, 4)):
        if flip(0.3):
            # The order of two changes is open, but none is lost.
            one, other = Conversation(world, conversation.id), Conversation(world, conversation.id)
            await asyncio.gather(one.responds(), other.adds())
            await conversation.join(one, other)
        else:
            await choice(kinds)()
        await conversation.check()
        await asyncio.sleep(uniform(0.0, 2.0))
    if world.machine.config.http.api_key:
        await _is_hidden(world, conversation)
    await _delete(world, conversation)
    for target in (conversation.target, f"{conversation.target}/items"):
        await ask(world, "GET", target, (404,))
    world.counts["conversations deleted"] += 1


async def _create(world: World, request: Request) -> str:
    """Create a conversation with one item, and return its id."""
    body = {"items": [_said(request.content)], "metadata": {"topic": request.key}}
    backoff = Backoff()
    while True:
        try:
            connection = connect(world.server, "POST", ROUTE, {}, body)
            answer = json.loads(await connection.read())
            if connection.status == 200:
                id: str = answer["id"]
                return id
            code = answer["error"]["code"]
            assert is_later(world, code) or world.may_fail(code), f"{ROUTE}: {answer!r}"
        except Broken:
            pass
        await backoff.pause()


async def _is_hidden(world: World, conversation: Conversation) -> None:
    """Check that another key can neither read the conversation nor change it."""
    items = await conversation.items()
    own = API_KEY.set(next(key for key in CLIENT_KEYS if key != API_KEY.get()))
    try:
        for below in ("", "/items", *(f"/items/{it['id']}" for it in items[:1])):
            await ask(world, "GET", conversation.target + below, (404,))
            if below != "/items":
                await ask(world, "DELETE", conversation.target + below, (404,))
        for target, body in (
            (conversation.target, {"metadata": {}}),
            (f"{conversation.target}/items", {"items": [_said("mine")]}),
            (ROUTE_OF_RESPONSES, {"input": "mine", "conversation": conversation.id}),
        ):
            await answer_of(world, target, body, (404,))
    finally:
        API_KEY.reset(own)
    assert await conversation.items() == items, "another key has changed the conversation"


async def _delete(world: World, conversation: Conversation) -> None:
    """Delete the conversation, often while a response runs, which then ends."""
    running = ""
    if flip(0.5):
        request = world.new_request().longer()
        body = RESPONSES.body(request, False) | {"conversation": conversation.id}
        body |= {"background": True, "truncation": "auto"}
        running = await post_until_accepted(world, request, ROUTE_OF_RESPONSES, body)
    await ask(world, "DELETE", conversation.target, (200, 404))
    if running:
        _, shown = await ask(world, "GET", f"{ROUTE_OF_RESPONSES}/{running}")
        status = json.loads(shown)["status"]
        assert status in ENDED, f"{running} is {status}, but its conversation is deleted"
        world.counts[f"responses {status} with their conversation"] += 1
