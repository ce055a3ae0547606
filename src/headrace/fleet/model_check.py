"""Reads each model in a separate process, before the gateway reads the model.

Libraries parse a model's tokenizer, template, config and weight headers. A library can crash,
hang while it holds the interpreter's lock, or use any amount of memory. So a process with limits
reads the files first. Files that this process can read are safe for the gateway. A cache in the
user's cache folder records the models that passed, so that a restart of the server needs no
check.

`python -m headrace.fleet.model_check` reads a ModelConfig from stdin as msgpack. The answer, a
Readable or Unreadable, is written to stdout as JSON.
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

from headrace.fleet.atomic_file import keep_file
from headrace.fleet.file_stamp import file_stamp
from headrace.fleet.served_model import ServedModel
from headrace_common.checkpoints.find import MINI, find_model
from headrace_common.checkpoints.gguf_folder import conversion
from headrace_common.checkpoints.headers import count_parameters
from headrace_common.checkpoints.small_file import read_small
from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import ModelConfig
from headrace_common.config.sources import environment_without_keys
from headrace_common.errors import ModelError
from headrace_common.system.panics import STEERING

MAX_CPU_S = 60
MAX_BYTES = 2 << 30
# Seconds until a check is stopped. Reading from a slow disk can take long.
_MAX_WALL_S = 300
_COMMAND = ("-m", "headrace.fleet.model_check")
_MAX_OUTPUT = 1 << 16
_MAX_MESSAGE, _MAX_DETAILS = 2_000, 8_000  # characters
_MAX_REMEMBERED = 256
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    # A panic in a Rust library deadlocks if there is no memory for a backtrace.
    "RUST_BACKTRACE": "0",
    "RUST_LIB_BACKTRACE": "0",
}
_places = threading.Semaphore(2)
"""Limits the number of concurrent checks: each check uses a core and up to MAX_BYTES of memory."""


class Readable(msgspec.Struct, frozen=True, tag=True):
    """The answer for a model that can be read.

    For a GGUF file, `folder` contains the files that were converted from the GGUF file.
    """

    folder: bytes
    num_parameters: int | None


class Unreadable(msgspec.Struct, frozen=True, tag=True):
    """The answer for a model that cannot be read. `details` are for the log."""

    code: str
    message: str
    details: str = ""


class Checked(NamedTuple):
    """A readable model's folder, and the number of weights if the files state this number."""

    folder: Path
    num_parameters: int | None


class NotChecked(ModelError):
    """Raised when the process for a check could not be started; the model may still be readable."""


def read_checked(config: ModelConfig, path: str) -> ServedModel:
    """Check the model at `path` in a process with limits, then read the model in this process.

    Raises ModelError if the model cannot be read. The small model in Headrace's own package is
    not checked.
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
    """Check a model on the disk; raise ModelError if the model cannot be served.

    A check takes about a second, and at most MAX_CPU_S seconds of processor time. Unchanged files
    that passed a check are not checked again.
    """
    memory = _memory(config)
    answer = _remembered(memory)
    if answer is None:
        answer = _ask(config)
        _remember(memory, answer)
    return Checked(Path(os.fsdecode(answer.folder)), answer.num_parameters)


def _memory(config: ModelConfig) -> Path | None:
    """Return the cache file for these settings and the current state of the model's files.

    Returns None if the model is not on this machine.
    """
    if (stamp := file_stamp(config)) is None:
        return None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    known = (conversion(), msgspec.to_builtins(config), stamp)
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
    """Write the answer to the cache.

    If the write fails, the next start checks the model again.
    """
    if memory is None:
        return
    with contextlib.suppress(OSError):
        keep_file(memory, msgspec.json.encode(answer))
        files = sorted(memory.parent.iterdir(), key=lambda it: it.stat().st_mtime)
        for file in files[:-_MAX_REMEMBERED]:
            file.unlink()


def _ask(config: ModelConfig) -> Readable:
    """Let a process check the model; raise ModelError with the reason if the check fails."""
    with _places:
        try:
            done = subprocess.run(
                [sys.executable, *_COMMAND],
                input=msgspec.msgpack.encode(config),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_MAX_WALL_S,
                check=False,
                env=environment_without_keys() | _ENVIRONMENT,
            )
        except subprocess.TimeoutExpired:
            raise _failure(f"took longer than {_MAX_WALL_S} s") from None
        except OSError as error:
            message = (
                f"No process could be started to read the model ({error.strerror}); try again."
            )
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
    # Output that libraries print must not mix with the answer, so stdout is redirected to stderr.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Running streams get processor time before this check.
    os.nice(19)
    _limit(resource.RLIMIT_CPU, MAX_CPU_S)
    _limit(resource.RLIMIT_DATA, MAX_BYTES)
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ModelConfig)
    answers.write(msgspec.json.encode(_read(config)))
    answers.close()
    # Skip the cleanup of libraries, since a library may be in a bad state.
    os._exit(0)


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most, hard))


def _read(config: ModelConfig) -> Readable | Unreadable:
    """Read everything that the gateway will read from the model's files."""
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
        message = f"Reading the model's files took more than {MAX_BYTES >> 20} MiB of memory."
        return Unreadable("load_failed", message)
    # A panic in a Rust library is a BaseException.
    except BaseException as error:
        details = "".join(traceback.format_exception(error))[-_MAX_DETAILS:]
        message = f"The model's files cannot be read ({type(error).__name__}); download them again."
        return Unreadable("load_failed", message, details)
    return Readable(os.fsencode(model.folder), num_parameters)


if __name__ == "__main__":
    main()
