"""Connects a chat to a server and a conversation, and turns failures into exit codes."""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from headrace.cli import exit_codes
from headrace.cli.chat import ChatLoop, converse
from headrace.cli.chat_commands import Commands
from headrace.cli.chat_keyboard import keyboard
from headrace.cli.chat_screen import Screen
from headrace.cli.chat_store import Conversation, table, transcripts
from headrace.cli.private_server import ServerEnded, end_on_hangup, private_server
from headrace.cli.server_options import WRONG_KEY, key_or_first
from headrace.cli.stdio import read_stdin, tame
from headrace.client.client import Client
from headrace.client.errors import Refused
from headrace.client.http import URL
from headrace_common.errors import ConfigError, HeadraceError


def run_chat(
    model: str | None,
    fields: dict[str, Any],
    url: str | None,
    api_key: str | None,
    prompt: str = "",
    **conversation: Any,
) -> int:
    """Run a chat. If there is a `prompt` or a piped message, only send it and show the answer.

    Returns the chat's exit code, or the exit code of the chat's own server if that server failed.
    """
    if model and url:
        raise ConfigError(
            "MODEL starts a server, and --url or --port names a running server; use only one of "
            "the two."
        )
    begun = _conversation(**conversation)
    prompt = prompt or _piped(begun)
    key = key_or_first(api_key)
    end_on_hangup()
    server = private_server(model) if model else contextlib.nullcontext(url or URL)
    screen = Screen()

    def connect(address: str) -> Client:
        return Client(address, key or None, on_trouble=screen.trouble)

    try:
        with keyboard() as keys, server as address, connect(address) as client:
            chat = ChatLoop(client, screen, transcripts(), begun, fields)
            commands = Commands(chat, screen, transcripts(), lambda: _sees(client, fields))
            if keys is not None and not prompt:
                _greet(client, screen, fields)
            with contextlib.closing(screen):
                if begun.number:
                    chat.show_end()
                if prompt:
                    chat.ask(prompt)
                elif keys is not None:
                    converse(chat, screen, keys, commands.do)
    except ServerEnded as ended:
        return ended.code
    except Refused as error:
        if error.code != "invalid_api_key":
            raise
        raise HeadraceError(WRONG_KEY) from error
    return exit_codes.DONE


def list_conversations() -> None:
    """Print the stored conversations."""
    print("\n".join(table(transcripts().listed())) or "No conversation is stored yet.")


def delete_conversations(names: Sequence[str]) -> None:
    """Delete the conversations with these numbers; `all` deletes every conversation."""
    kept = transcripts()
    for name in names:
        if name != "all" and not name.isdecimal():
            raise ConfigError(
                f"--delete {name}: give the number of a conversation, or all; --list shows them."
            )
    numbers = kept.numbers() if "all" in names else sorted(set(map(int, names)))
    for number in numbers:
        kept.delete(number)
        print(f"Deleted conversation {number}.")
    if not numbers:
        print("No conversation is stored.")


def _piped(begun: Conversation) -> str:
    """Return the message in stdin, or "" if stdin is a terminal.

    If stdin is empty, a stored conversation is shown without a new message. For a new conversation,
    raises ConfigError.
    """
    if sys.stdin.isatty():
        return ""
    text = read_stdin().strip()
    if not text and not begun.number:
        raise ConfigError(
            "There is no message, because stdin is empty. Run the chat in a terminal, pipe a "
            "message (echo Hello | headrace chat), or add a message to the command "
            "(headrace run MODEL Hello)."
        )
    return text


def _conversation(system: str | None, goes_on: bool, number: int | None) -> Conversation:
    if not goes_on and number is None:
        return Conversation([{"role": "system", "content": system}] if system else [])
    if system:
        raise ConfigError(
            "--system starts a new conversation, so it excludes --continue and --resume."
        )
    return transcripts().read(number)


def _sees(client: Client, fields: dict[str, Any]) -> bool:
    """Return whether the model accepts images. Called when a file is attached."""
    name = fields.get("model") or client.models()[0]
    return "image" in client.model(name).get("architecture", {}).get("input_modalities", ())


def _context_of(client: Client, name: str) -> int | None:
    """Return the model's context in tokens; None if the server does not report it."""
    try:
        longest = client.model(name).get("max_model_len")
    except Refused as error:
        if error.code == "invalid_api_key":
            raise
        return None
    return longest if isinstance(longest, int) else None


def _greet(client: Client, screen: Screen, fields: dict[str, Any]) -> None:
    """Show the model of the chat and its context. Raises Unreachable if there is no answer."""
    try:
        name = fields.get("model") or client.models()[0]
        longest = _context_of(client, name)
    finally:
        screen.end_answer()
    context = f", context {longest:,} tokens" if longest else ""
    screen.tell(f"{tame(name)}{context}. Type /help for help.")
