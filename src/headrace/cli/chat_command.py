"""Sets up a chat: its server, its conversation, and how failures end it."""

import contextlib
import os
from typing import Any

from headrace.cli import exits
from headrace.cli.chat import ChatLoop, Conversation, converse, transcript
from headrace.cli.chat_keyboard import keyboard
from headrace.cli.chat_screen import Screen
from headrace.cli.private_server import ServerEnded, end_on_hangup, private_server
from headrace.client.client import Client
from headrace.client.errors import Refused
from headrace.client.http import URL
from headrace.core.errors import ConfigError, HeadraceError


def run_chat(
    model: str | None,
    fields: dict[str, Any],
    url: str | None,
    api_key: str | None,
    **conversation: Any,
) -> int:
    """Returns the exit code; that of a private server that cannot serve."""
    if model and url:
        raise ConfigError("MODEL starts a server and --url names another; give only one of them.")
    begun = _conversation(**conversation)
    key = api_key or os.environ.get("HEADRACE_API_KEYS", "").split(",")[0]
    end_on_hangup()
    server = private_server(model) if model else contextlib.nullcontext(url or URL)
    try:
        with keyboard() as keys, server as address, Client(address, key or None) as client:
            chat, screen = _set_up(client, begun, fields)
            if keys is not None:
                _greet(client, screen, fields)
            if conversation["goes_on"]:
                chat.resume()
            converse(chat, screen, keys)
    except ServerEnded as ended:
        return ended.code
    except Refused as error:
        if error.code != "invalid_api_key":
            raise
        raise HeadraceError(
            "The server does not accept this API key; give the right one as "
            "HEADRACE_API_KEY or --api-key."
        ) from error
    return exits.DONE


def _conversation(system: str | None, goes_on: bool) -> Conversation:
    if not goes_on:
        return Conversation([{"role": "system", "content": system}] if system else [])
    if system:
        raise ConfigError("--system begins a conversation; --continue goes on with one.")
    return transcript().read()


def _set_up(
    client: Client, conversation: Conversation, fields: dict[str, Any]
) -> tuple[ChatLoop, Screen]:
    screen = Screen()
    client.on_trouble = screen.trouble
    return ChatLoop(client, screen, transcript(), conversation, fields), screen


def _greet(client: Client, screen: Screen, fields: dict[str, Any]) -> None:
    """Says which server this is; Unreachable before anything is typed."""
    try:
        name = fields.get("model") or client.models()[0]
    finally:
        screen.end_answer()
    screen.tell(
        f"{name} at {client.url}. Alt-Enter begins a new line, Ctrl-C stops an answer, "
        "Ctrl-D leaves, /help shows the rest."
    )
