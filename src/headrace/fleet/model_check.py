"""Reads a model first in a separate process, which can be killed.

What a folder holds is parsed by libraries that can crash, hang while they hold the interpreter's
lock, or take any amount of memory: tokenizers, templates, configs, headers of weights. So a process
with limits reads it before the gateway does. Files that it can read, the gateway can read too.

`python -m headrace.fleet.model_check` reads a packed ModelConfig from stdin and writes its answer.
"""

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

from headrace.checkpoints.headers import count_parameters
from headrace.config.settings import ModelConfig
from headrace.config.sources import SECRETS
from headrace.core.errors import ModelError
from headrace.fleet.served_model import ServedModel
from headrace.panics import STEERING

MAX_CPU_S = 60
MAX_BYTES = 2 << 30
_MAX_WALL_S = 300  # a disk may be slow
_COMMAND = ("-m", "headrace.fleet.model_check")
_MAX_OUTPUT = 1 << 16
_MAX_MESSAGE, _MAX_DETAILS = 2_000, 8_000  # characters
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


class CheckFailed(ModelError):
    """The process crashed or exceeded a limit. It would do so again, so nothing tries again."""


def check_model(config: ModelConfig) -> Checked:
    """Read a model that is on the disk; ModelError if it cannot be served.

    Takes about a second, and up to MAX_CPU_S of processor time.
    """
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
            raise ModelError(message, "load_failed") from None
    try:
        answer = msgspec.json.decode(done.stdout[:_MAX_OUTPUT], type=Readable | Unreadable)
    except msgspec.DecodeError:
        raise _failure(_reason(done.returncode)) from None
    if isinstance(answer, Readable):
        return Checked(Path(os.fsdecode(answer.folder)), answer.num_parameters)
    refusal = ModelError(answer.message, answer.code)
    if answer.details:
        refusal.add_note(answer.details)
    raise refusal


def _failure(reason: str) -> CheckFailed:
    message = f"Reading its files {reason}; download the model again."
    return CheckFailed(message, "load_failed")


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
