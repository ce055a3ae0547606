"""llama.cpp's logits of a text, by the C functions in the wheel xllamacpp; a process of its own.

`python -m tests.trained.llama_cpp MODEL IDS.json LOGITS.npy` writes a row for each id.
"""

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

_ROOM = 2048  # bytes, more than any of llama.cpp's own structs of parameters


class _Params(ctypes.Structure):
    """Parameters as the library fills them in; the first numbers of a context's are known."""

    _fields_ = (("num", ctypes.c_uint32 * 3), ("rest", ctypes.c_char * (_ROOM - 12)))


class _Batch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("tokens", ctypes.POINTER(ctypes.c_int32)),
        ("vectors", ctypes.c_void_p),
        ("positions", ctypes.POINTER(ctypes.c_int32)),
        ("num_sequences", ctypes.POINTER(ctypes.c_int32)),
        ("sequences", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("wants_logits", ctypes.POINTER(ctypes.c_int8)),
    )


def llama_logits(
    model: Path, token_ids: list[int], target: Path
) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Write the logits after each token to the file `target`, and map them: [tokens, vocab]."""
    ids = target.with_suffix(".json")
    ids.write_text(json.dumps(token_ids))
    command = [sys.executable, "-m", "tests.trained.llama_cpp", str(model), str(ids), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: np.ndarray[Any, np.dtype[np.float32]] = np.load(target, mmap_mode="c")
    return found


def _functions() -> Any:
    import xllamacpp

    assert xllamacpp.__file__ is not None
    (file,) = Path(xllamacpp.__file__).parent.glob("*.so")
    lib = ctypes.CDLL(str(file))
    lib.llama_model_default_params.restype = _Params
    lib.llama_context_default_params.restype = _Params
    lib.llama_model_load_from_file.restype = ctypes.c_void_p
    lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Params]
    lib.llama_init_from_model.restype = ctypes.c_void_p
    lib.llama_init_from_model.argtypes = [ctypes.c_void_p, _Params]
    lib.llama_batch_init.restype = _Batch
    lib.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
    lib.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    lib.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    lib.llama_model_get_vocab.restype = ctypes.c_void_p
    lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    lib.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
    return lib


def _write_logits(path: str, token_ids: list[int], target: str) -> None:
    """Write the logits after each token as float32 [tokens, vocab]."""
    lib = _functions()
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.num[:] = [len(token_ids)] * 3  # positions, and the most tokens of a batch
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(len(token_ids), 0, 1)
    batch.num_tokens = len(token_ids)
    for place, token_id in enumerate(token_ids):
        batch.tokens[place], batch.positions[place] = token_id, place
        batch.num_sequences[place], batch.sequences[place][0] = 1, 0
        batch.wants_logits[place] = 1
    assert lib.llama_decode(context, batch) == 0
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    rows = np.lib.format.open_memmap(target, "w+", np.float32, (len(token_ids), size))
    for place in range(len(token_ids)):
        rows[place] = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, place), (size,))


if __name__ == "__main__":
    _write_logits(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), sys.argv[3])
