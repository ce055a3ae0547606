"""Reads a model first in a separate process, which can be killed.

What a folder holds is parsed by libraries that can crash, hang while they hold the interpreter's
lock, or take any amount of memory: tokenizers, templates, configs, headers of weights. So a process
with limits reads it before the gateway does. If that process can read the files, so can the
gateway. The user's cache remembers the models that it could read, so that a restart need not wait
for the process again.

`python -m headrace.fleet.model_check` reads a packed ModelConfig from stdin and writes its answer.
"""

import contextlib
import hashlib
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from headrace.fleet.file_stamp import file_stamp
from headrace.fleet.kept_file import keep_file
from headrace.fleet.served_model import ServedModel
from headrace_common.checkpoints.find import MINI, find_model
from headrace_common.checkpoints.headers import count_parameters
from headrace_common.checkpoints.small_file import read_small
from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import ModelConfig
from headrace_common.config.sources import SECRETS
from headrace_common.errors import ModelError
from headrace_common.system.panics import STEERING
from headrace_common.version import __version__

MAX_CPU_S = 60
MAX_BYTES = 2 << 30
_MAX_WALL_S = 300  # a disk may be slow
_COMMAND = ("-m", "headrace.fleet.model_check")
_MAX_OUTPUT = 1 << 16
_MAX_MESSAGE, _MAX_DETAILS = 2_000, 8_000  # characters
_MAX_REMEMBERED = 256
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    # A library that panics without memory for its traceback deadlocks.
    "RUST_BACKTRACE": "0",
    "RUST_LIB_BACKTRACE": "0",
}
_places = threading.Semaphore(2)
"""Processes that may run at once: each takes a core and up to MAX_BYTES of memory."""


class Readable(msgspec.Struct, frozen=True, tag=True):
    """The model can be read; `folder` holds it, which for a GGUF file is one made of it."""

    folder: bytes
    num_parameters: int | None


class Unreadable(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be read. `details` are for the log."""

    code: str
    message: str
    details: str = ""


class Checked(NamedTuple):
    """A model that can be read: its folder, and how many weights its files state, if they do."""

    folder: Path
    num_parameters: int | None


class NotChecked(ModelError):
    """The process could not be started, which says nothing about the model."""


def read_checked(config: ModelConfig, path: str) -> ServedModel:
    """Read the model at `path` once the process with limits has read it; ModelError if it cannot.

    The model that comes with the package needs no check.
    """
    if path == MINI:
        folder = find_model(MINI)
        checked = Checked(folder, count_parameters(read_spec(folder)))
    else:
        checked = check_model(replace(config, model=path))
    model = ServedModel(config, folder=checked.folder, num_parameters=checked.num_parameters)
    model.read_adapters(config)
    return model


def check_model(config: ModelConfig) -> Checked:
    """Read a model that is on the disk; ModelError if it cannot be served.

    Takes about a second, and up to MAX_CPU_S of processor time, unless the same files were read
    before.
    """
    memory = _memory(config)
    answer = _remembered(memory)
    if answer is None:
        answer = _ask(config)
        _remember(memory, answer)
    return Checked(Path(os.fsdecode(answer.folder)), answer.num_parameters)


def _memory(config: ModelConfig) -> Path | None:
    """Return the cache file for a model with these settings and the present state of its files."""
    if (stamp := file_stamp(config)) is None:
        return None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    known = (__version__, msgspec.to_builtins(config), stamp)
    return Path(base) / "headrace" / "checked" / hashlib.sha256(repr(known).encode()).hexdigest()


def _remembered(memory: Path | None) -> Readable | None:
    if memory is None:
        return None
    try:
        answer = msgspec.json.decode(read_small(memory, _MAX_OUTPUT), type=Readable)
    except (OSError, msgspec.DecodeError):
        return None
    return answer if os.path.isdir(answer.folder) else None


def _remember(memory: Path | None, answer: Readable) -> None:
    """Write the answer to the cache; if that fails, the next start checks the model again."""
    if memory is None:
        return
    with contextlib.suppress(OSError):
        keep_file(memory, msgspec.json.encode(answer))
        files = sorted(memory.parent.iterdir(), key=lambda it: it.stat().st_mtime)
        for file in files[:-_MAX_REMEMBERED]:
            file.unlink()


def _ask(config: ModelConfig) -> Readable:
    """Have the process read the model; ModelError says why it cannot be served."""
    environment = {k: v for k, v in os.environ.items() if k not in SECRETS} | _ENVIRONMENT
    with _places:
        try:
            done = subprocess.run(
                [sys.executable, *_COMMAND],
                input=msgspec.msgpack.encode(config),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_MAX_WALL_S,
                check=False,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            raise _failure(f"took longer than {_MAX_WALL_S} s") from None
        except OSError as error:
            message = f"No process could be started to read it ({error.strerror}); try again."
            raise NotChecked(message, "load_failed") from None
    try:
        answer = msgspec.json.decode(done.stdout[:_MAX_OUTPUT], type=Readable | Unreadable)
    except msgspec.DecodeError:
        raise _failure(_reason(done.returncode)) from None
    if isinstance(answer, Readable):
        return answer
    refusal = ModelError(answer.message, answer.code)
    if answer.details:
        refusal.add_note(answer.details)
    raise refusal


def _failure(reason: str) -> ModelError:
    message = f"Reading the model's files {reason}; download the model again."
    return ModelError(message, "load_failed")


def _reason(code: int) -> str:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"took more than {MAX_CPU_S} s of processor time"
    if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):
        return f"crashed a library or took more than {MAX_BYTES >> 20} MiB of memory"
    return f"ended without a result (exit code {code})"


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Output that libraries print is not part of the answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.nice(19)  # running streams take precedence
    _limit(resource.RLIMIT_CPU, MAX_CPU_S)
    _limit(resource.RLIMIT_DATA, MAX_BYTES)
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ModelConfig)
    answers.write(msgspec.json.encode(_read(config)))
    answers.close()
    os._exit(0)  # skips the cleanup of libraries, which may be damaged


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most, hard))


def _read(config: ModelConfig) -> Readable | Unreadable:
    """Do all that the gateway will do with the model's files."""
    try:
        model = ServedModel(config)
        model.read_adapters(config)
        model.tokenizer.check_spelling()
        num_parameters = count_parameters(model.spec)
    except STEERING:
        raise
    except ModelError as error:
        return Unreadable(error.code, str(error)[:_MAX_MESSAGE])
    except MemoryError:
        message = f"Reading its files took more than {MAX_BYTES >> 20} MiB of memory."
        return Unreadable("load_failed", message)
    except BaseException as error:  # a library's panic is not an Exception
        details = "".join(traceback.format_exception(error))[-_MAX_DETAILS:]
        message = f"Its files cannot be read ({type(error).__name__}); download the model again."
        return Unreadable("load_failed", message, details)
    return Readable(os.fsencode(model.folder), num_parameters)


if __name__ == "__main__":
    main()
