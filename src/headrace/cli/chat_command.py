"""Sets up a chat: its server, its conversation, and how failures end it."""

import contextlib
import os
from typing import Any

from headrace.cli import exits
from headrace.cli.chat import ChatLoop, converse
from headrace.cli.chat_commands import Commands
from headrace.cli.chat_keyboard import keyboard
from headrace.cli.chat_screen import Screen
from headrace.cli.chat_store import Conversation, table, transcripts
from headrace.cli.private_server import ServerEnded, end_on_hangup, private_server
from headrace.client.client import Client
from headrace.client.errors import Refused
from headrace.client.http import URL
from headrace_common.errors import ConfigError, HeadraceError


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
    if conversation.pop("lists"):
        print("\n".join(table(transcripts().listed())) or "No conversation is kept yet.")
        return exits.DONE
    begun = _conversation(**conversation)
    key = api_key or os.environ.get("HEADRACE_API_KEYS", "").split(",")[0]
    end_on_hangup()
    server = private_server(model) if model else contextlib.nullcontext(url or URL)
    try:
        with keyboard() as keys, server as address, Client(address, key or None) as client:
            screen = Screen()
            client.on_trouble = screen.trouble
            chat = ChatLoop(client, screen, transcripts(), begun, fields)
            commands = Commands(chat, screen, transcripts(), lambda: _sees(client, fields))
            if keys is not None:
                _greet(client, screen, fields)
            with contextlib.closing(screen):
                if begun.number:
                    chat.show_end()
                converse(chat, screen, keys, commands.do)
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


def _conversation(system: str | None, goes_on: bool, number: int | None) -> Conversation:
    if not goes_on and number is None:
        return Conversation([{"role": "system", "content": system}] if system else [])
    if system:
        raise ConfigError("--system begins a conversation; --continue and --resume go on with one.")
    return transcripts().read(number)


def _sees(client: Client, fields: dict[str, Any]) -> bool:
    """Whether the model takes images; asked for once a file is to go along."""
    name = fields.get("model") or client.models()[0]
    return "image" in client.model(name).get("architecture", {}).get("input_modalities", ())


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
