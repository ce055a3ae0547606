"""Hostile forms for /v1/files: their parts, headers, length or pace are unusual."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator

from stress.attack.target import Manner

_MARK = "boundary7"
_PIECE = 1 << 16
_ODD_BOUNDARIES = (
    *(
        "",
        " ",
        "a" * 70,
        "a" * 71,
        "a" * 100_000,
        "--",
        "\x00",
        "a b",
        "a\tb",
        "é",
        '"',
        "a;b",
        "-",
    ),
    *("a\\", "=?utf-8?q?a?=", "a" * 69 + " "),
)
Pieces = Iterable[bytes]


def drawn_form(rng: random.Random, size: int) -> tuple[str, list[bytes], Pieces, Manner]:
    """Return a form's kind, its header lines, the pieces of its body, and how a client sends it.

    Long forms have about `size` bytes.
    """
    kind = rng.choice(tuple(KINDS))
    lines = [f"Content-Type: multipart/form-data; boundary={_MARK}".encode()]
    pieces = list(KINDS[kind](rng, size))
    manner = Manner("any", within_s=40.0)
    if kind == "boundary":
        odd = rng.choice(_ODD_BOUNDARIES)
        quoted = f'"{odd}"' if rng.random() < 0.5 else odd
        lines = [f"Content-Type: multipart/form-data; boundary={quoted}".encode()]
        pieces = [piece.replace(_MARK.encode(), odd.encode()) for piece in pieces]
    length = sum(map(len, pieces))
    if kind == "leaves":
        manner = Manner("rude", within_s=rng.uniform(0.1, 3.0))
        lines.append(b"Content-Length: %d" % (length * 2))
    elif kind == "drip":
        # This client disconnects before it has sent the whole form.
        manner = Manner("rude", within_s=15.0, pause_s=0.5)
        lines.append(b"Content-Length: %d" % length)
    elif kind == "truncated" and rng.random() < 0.5:
        manner = Manner("rude", within_s=15.0, half_closes=True)
        lines.append(b"Content-Length: %d" % (length * 2))
    elif rng.random() < 0.3:
        lines.append(b"Transfer-Encoding: chunked")
        pieces = [*(b"%x\r\n%s\r\n" % (len(it), it) for it in pieces if it), b"0\r\n\r\n"]
    else:
        lines.append(b"Content-Length: %d" % length)
    return kind, lines, pieces, manner


def head(lines: list[bytes], key: tuple[tuple[str, str], ...]) -> bytes:
    given = [f"{name}: {value}".encode() for name, value in key]
    first = [b"POST /v1/files HTTP/1.1", b"Host: 127.0.0.1", b"Connection: close"]
    return b"\r\n".join([*first, *given, *lines, b"", b""])


def _part(name: str, content: bytes = b"", filename: str | None = None) -> bytes:
    file = f'; filename="{filename}"' if filename is not None else ""
    line = f'--{_MARK}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
    return line.encode() + content + b"\r\n"


_END = f"--{_MARK}--\r\n".encode()
_FILE = _part("purpose", b"batch") + _part("file", b'{"custom_id":"1"}\n', "a.jsonl")


def _long(piece: bytes, size: int) -> Iterator[bytes]:
    """Yield the piece repeatedly, up to `size` bytes in total."""
    block = piece * max(1, _PIECE // len(piece))
    yield from itertools.repeat(block, max(1, size // len(block)))


def _empty_fields(rng: random.Random, size: int) -> Iterator[bytes]:
    yield from _long(_part(rng.choice(("purpose", "x", "")), rng.choice((b"", b"a"))), size)
    yield _FILE + _END


def _parameters(rng: random.Random, size: int) -> Iterator[bytes]:
    sort = rng.choice(("; a=b", '; a="b"', ";", '; a="\\"', "; a*0=b", "; filename=a"))
    number = rng.choice((4000, 100_000))
    line = f'--{_MARK}\r\nContent-Disposition: form-data; name="x"{sort * number}\r\n\r\n\r\n'
    yield from itertools.repeat(line.encode(), max(1, min(200, size // len(line))))
    yield _FILE + _END


def _headers(rng: random.Random, size: int) -> Iterator[bytes]:
    line = rng.choice((b"X-A: b\r\n", b"X" * 5000 + b": y\r\n", b": \r\n", b"no colon\r\n", b"\r"))
    yield f"--{_MARK}\r\n".encode()
    yield from _long(line, size)
    yield b"\r\n" + _END


def _without_end(rng: random.Random, size: int) -> Iterator[bytes]:
    yield _part("file", b"", "a.jsonl")[:-2]
    yield from _long(rng.choice((b"a", b"\r\n", b"\r\n--", b"\r\n--boundary", b"\n")), size)


def _preamble(rng: random.Random, size: int) -> Iterator[bytes]:
    yield from _long(rng.choice((b"a", b"\r\n", b"\r\n--", f"--{_MARK}x\r\n".encode())), size)
    yield _FILE + _END


def _epilogue(rng: random.Random, size: int) -> Iterator[bytes]:
    yield _FILE + _END
    yield from _long(rng.choice((b"a", _END, f"--{_MARK}\r\n".encode())), size)


def _odd_boundary(rng: random.Random, size: int) -> Iterator[bytes]:
    yield _FILE + _END


def _odd_names(rng: random.Random, size: int) -> Iterator[bytes]:
    odd = ("../../x", "\0", "a\nb", "x" * 10_000, "😀", '\\"', "", "CON", "/etc/passwd", "%00")
    yield _part("purpose", b"batch")
    yield _part("file", b"{}\n", rng.choice(odd))
    yield _part(rng.choice(odd), b"1") * rng.choice((1, 20))
    yield _END


def _truncated(rng: random.Random, size: int) -> Iterator[bytes]:
    whole = _FILE + _END
    yield whole[: rng.randrange(len(whole))]


def _drip(rng: random.Random, size: int) -> Iterator[bytes]:
    whole = _FILE + _END
    step = rng.choice((1, 10, 40))
    yield from (whole[at : at + step] for at in range(0, len(whole), step))


def _leaves(rng: random.Random, size: int) -> Iterator[bytes]:
    yield _part("file", b"", "a.jsonl")[:-2]
    yield from _long(rng.choice((b"a\n", _part("x"))), size)


def _damaged(rng: random.Random, size: int) -> Iterator[bytes]:
    whole = bytearray(_FILE + _END)
    for _ in range(rng.choice((1, 3, 30))):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    yield bytes(whole)


KINDS: dict[str, Callable[[random.Random, int], Iterator[bytes]]] = {
    "empty fields": _empty_fields,
    "parameters": _parameters,
    "headers": _headers,
    "without end": _without_end,
    "preamble": _preamble,
    "epilogue": _epilogue,
    "boundary": _odd_boundary,
    "names": _odd_names,
    "truncated": _truncated,
    "drip": _drip,
    "leaves": _leaves,
    "damaged": _damaged,
}
