"""The conversations of `headrace chat`: a file each, for their user alone, under small numbers."""

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
    """Messages so far; `stream_id`: of an answer not read to its end. Number 0: not kept yet."""

    messages: list[Message] = []
    stream_id: str = ""
    number: int = 0


class Listed(NamedTuple):
    """A conversation in a list, by what was asked first."""

    number: int
    changed_at: float
    num_asked: int
    title: str


class Transcripts:
    """A folder of conversations, each replaced whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        last_of_old = folder.with_name("chat.json")  # as versions before 0.2 kept one
        if last_of_old.exists() and not folder.exists():
            self._claim(1)
            last_of_old.replace(self._path(1))

    def read(self, number: int | None = None) -> Conversation:
        """A conversation by its number, or the one that was written last."""
        if number is None:
            newest = max(self._paths(), key=lambda path: path.stat().st_mtime_ns, default=None)
            if newest is None:
                raise ConfigError("There is no conversation to go on with.")
        elif not (newest := self._path(number)).exists():
            raise ConfigError(f"There is no conversation {number}; /list or --list shows them.")
        return _read(newest)

    def listed(self) -> list[Listed]:
        """The latest ones, the newest last; one that is damaged is named so."""
        found = []
        for path in self._paths():
            title, num_asked = "damaged", 0
            with contextlib.suppress(ConfigError):
                asked = [m for m in _read(path).messages if m["role"] == "user"]
                num_asked = len(asked)
                title = " ".join(words_of(asked[0]).split()) if asked else ""
            found.append(Listed(int(path.stem), path.stat().st_mtime, num_asked, title))
        return sorted(found, key=lambda it: it.changed_at)[-_MOST_LISTED:]

    def write(self, conversation: Conversation) -> None:
        """Gives it a number, if it has none yet."""
        while not conversation.number:
            number = 1 + max((int(path.stem) for path in self._paths()), default=0)
            with contextlib.suppress(FileExistsError):  # another chat took it
                self._claim(number)
                conversation.number = number
        path = self._path(conversation.number)
        new = path.with_suffix(".new")
        new.touch(mode=0o600)  # for its user alone
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
    """A message's text; attachments by their names."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "[image]") for part in content)


def table(listed: list[Listed]) -> list[str]:
    """A line for each conversation."""
    now = time.time()
    rows = []
    for one in listed:
        day = "%H:%M" if now - one.changed_at < 20 * 3600 else "%Y-%m-%d"
        when = time.strftime(day, time.localtime(one.changed_at))
        title = one.title if len(one.title) <= 60 else f"{one.title[:59]}…"
        rows.append(f"{one.number:5}  {when:>10}  {one.num_asked:3} asked  {title}")
    return rows


def _read(path: Path) -> Conversation:
    damaged = f"{path} is damaged; remove it."
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
