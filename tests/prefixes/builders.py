"""Makes prefix segments and folders for them."""

from array import array
from pathlib import Path

from headrace_common.prefix import PrefixSegment
from headrace_engine.prefixes.folder import About, PrefixFolder

BLOCK = 4  # tokens
ABOUT = About("tiny", "0123456789ab", "native-text", "bfloat16", "avx2", BLOCK, "layers", "torch")


def make_segment(
    first: int = 0, end: int = 2, salt: bytes = b"salt", token: int = 7
) -> PrefixSegment:
    tokens = array("i", range(token, token + end * BLOCK))
    name = bytes([token, end]) * 8
    return PrefixSegment(name, first, end, salt, tokens.tobytes())


def make_folder(root: Path, about: About = ABOUT) -> PrefixFolder:
    folder = PrefixFolder(root, about)
    folder.open()
    return folder


def numbers_of(run: PrefixSegment, size: int = 1000) -> memoryview:
    return memoryview(bytes((run.first + i) % 251 for i in range(size)))


def file_of(folder: PrefixFolder, run: PrefixSegment) -> Path:
    (path,) = folder.path.glob(f"{run.name.hex()}-*")
    return path
