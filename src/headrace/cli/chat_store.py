"""Stores the conversations of `headrace chat` as one file each, which only the user can read."""

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.cli.state import state_home
from headrace_common.errors import ConfigError

Message = dict[str, Any]

_NUMBER = re.compile(r"(\d+)\.json")
_MOST_LISTED = 40


class Conversation(msgspec.Struct):
    """A conversation. An unfinished answer has a `stream_id`; an unstored chat has number 0."""

    messages: list[Message] = []
    stream_id: str = ""
    number: int = 0

    def become(self, messages: list[Message]) -> None:
        """Replace all messages."""
        self.messages = messages

    def read(self, stream_id: str) -> None:
        """Record the stream whose answer is being read, or "" if no answer is unfinished."""
        self.stream_id = stream_id


class Listed(NamedTuple):
    """A conversation in a list, described by its first question."""

    number: int
    changed_at: float
    num_asked: int
    title: str


class Transcripts:
    """A folder of conversations. Each write replaces a whole file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Versions before 0.2 stored a single conversation in this file.
        last_of_old = folder.with_name("chat.json")
        if last_of_old.exists() and not folder.exists():
            self._claim(1)
            last_of_old.replace(self._path(1))

    def read(self, number: int | None = None) -> Conversation:
        """Return the conversation with this number. Without a number, return the latest."""
        if number is None:
            newest = max(self._paths(), key=lambda path: path.stat().st_mtime_ns, default=None)
            if newest is None:
                raise ConfigError("There is no conversation to continue.")
        elif not (newest := self._path(number)).exists():
            raise _missing(number)
        return _read(newest)

    def listed(self) -> list[Listed]:
        """Return the latest conversations, newest last. A damaged file has the title `damaged`."""
        found = []
        for path in self._paths():
            title, num_asked = "damaged", 0
            with contextlib.suppress(ConfigError):
                asked = [m for m in _read(path).messages if m["role"] == "user"]
                num_asked = len(asked)
                title = " ".join(words_of(asked[0]).split()) if asked else ""
            found.append(Listed(int(path.stem), path.stat().st_mtime, num_asked, title))
        return sorted(found, key=lambda it: it.changed_at)[-_MOST_LISTED:]

    def numbers(self) -> list[int]:
        """Return the numbers of all conversations, in ascending order."""
        return sorted(int(path.stem) for path in self._paths())

    def delete(self, number: int) -> None:
        """Delete a conversation. Raises ConfigError if it does not exist or cannot be deleted."""
        path = self._path(number)
        try:
            path.unlink()
        except FileNotFoundError:
            raise _missing(number) from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be deleted: {error.strerror}.") from None

    def write(self, conversation: Conversation) -> None:
        """Write a conversation. A new conversation first gets a number."""
        while not conversation.number:
            number = 1 + max(self.numbers(), default=0)
            # If another chat has taken this number, try the next number.
            with contextlib.suppress(FileExistsError):
                self._claim(number)
                conversation.number = number
        path = self._path(conversation.number)
        new = path.with_suffix(".new")
        # Only the user can read the file.
        new.touch(mode=0o600)
        new.write_bytes(msgspec.json.encode(conversation))
        new.replace(path)

    def _claim(self, number: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path(number).touch(mode=0o600, exist_ok=False)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.json"

    def _paths(self) -> Iterator[Path]:
        if self._folder.is_dir():
            yield from (it for it in self._folder.iterdir() if _NUMBER.fullmatch(it.name))


def transcripts() -> Transcripts:
    return Transcripts(state_home() / "chats")


def words_of(message: Message) -> str:
    """Return a message's text, including the texts of its attachments."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "[image]") for part in content)


def table(listed: list[Listed]) -> list[str]:
    """Return one line per conversation."""
    now = time.time()
    rows = []
    for one in listed:
        day = "%H:%M" if now - one.changed_at < 20 * 3600 else "%Y-%m-%d"
        when = time.strftime(day, time.localtime(one.changed_at))
        title = one.title if len(one.title) <= 60 else f"{one.title[:59]}…"
        rows.append(f"{one.number:5}  {when:>10}  {one.num_asked:3} asked  {title}")
    return rows


def _missing(number: int) -> ConfigError:
    return ConfigError(f"There is no conversation {number}; /list or --list shows them.")


def _read(path: Path) -> Conversation:
    damaged = f"{path} is damaged; delete it with `headrace chat --delete {path.stem}`."
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Conversation)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except msgspec.DecodeError:
        raise ConfigError(damaged) from None
    if not all(isinstance(m.get("role"), str) and _is_content(m) for m in kept.messages):
        raise ConfigError(damaged)
    kept.number = int(path.stem)
    return kept


def _is_content(message: Message) -> bool:
    content = message.get("content")
    is_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    return isinstance(content, str) or is_parts
