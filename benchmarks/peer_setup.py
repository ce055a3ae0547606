"""Prepares peers.py: the environments of the other servers, and the files of their models.

Everything is stored in one folder and made only once. All models have the same random weights.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from safetensors.torch import load_file

from tools.harness.gguf_files import add_tokenizer, gguf_name, write_file
from tools.make_random_model import make_random_model

# The exporter needs torch, in the version of constraints.txt.
OPENVINO = ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "torch==2.13.0")
LLAMA = ("llama-cpp-python==0.3.36",)
# GCC 12 assumes that the instruction which loads the AMX tile table reads only 8 bytes. GCC
# therefore removes the writes to the remaining bytes, and llama.cpp crashes at its first
# quantized prompt. This replacement of _tile_loadconfig declares all 64 bytes as read.
_TILE_TABLE = """\
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
static inline void load_whole_table(const void * table) {
    __asm__ volatile("ldtilecfg\\t%X0" ::"m"(*(const char (*)[64]) table));
}
#undef _tile_loadconfig
#define _tile_loadconfig load_whole_table
#endif
"""
_FORMATS = {"bf16": (), "int8": ("--weight-format", "int8"), "int4": ("--weight-format", "int4")}
_FILE_TYPES = {"Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "Q4_K_M": "LLAMA_FTYPE_MOSTLY_Q4_K_M"}
# Without GGML_NATIVE, all instruction sets that are older than AVX-512 are enabled.
_BUILDS = {"native": "-DGGML_NATIVE=ON", "avx2": "-DGGML_NATIVE=OFF -DGGML_AVX512=OFF"}
_QUANTIZE = """
import sys, llama_cpp
source, target, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, kind)
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), params))
"""


class Setup:
    """The prepared files. `folder` has the environments, and a folder of models per shape.

    `isa` decides how llama.cpp is built: "avx2", or "native" for all instructions of this machine.
    """

    def __init__(self, folder: Path, shape: str, isa: str = "native") -> None:
        self._environments, self._shape, self._isa = folder, shape, isa
        self.models = folder / shape
        self.models.mkdir(parents=True, exist_ok=True)

    def python(self, peer: str) -> Path:
        """Return the interpreter of a peer's environment, which is created on first use."""
        if peer == "headrace":
            return Path(sys.executable)
        packages = OPENVINO if peer == "openvino" else LLAMA
        name = peer.replace(".", "-")
        if peer == "llama.cpp" and self._isa != "native":
            name += f"-{self._isa}"
        folder = (self._environments / name).absolute()
        python, ready = folder / "bin" / "python", folder / "ready"
        if not ready.exists():
            _run(sys.executable, "-m", "venv", str(folder))
            if peer == "openvino":
                _refuse_cuda(python, packages)
            pip = (str(python), "-m", "pip")
            native = {} if peer == "openvino" else {"CMAKE_ARGS": self._flags()}
            # Otherwise pip would use an earlier wheel that was built with other flags.
            anew = ("--no-cache-dir",) if native else ()
            _run(*pip, "install", "--quiet", *anew, *packages, environment=native)
            if peer == "openvino":
                # The exporter works without torchvision. A torchvision for a different torch
                # makes it fail.
                _run(*pip, "uninstall", "--quiet", "--yes", "torchvision")
            ready.touch()
        return python

    def _flags(self) -> str:
        """Return llama.cpp's build flags: for this machine, or only for AVX2, FMA and F16C."""
        header = (self._environments / "tile_table.h").absolute()
        header.write_text(_TILE_TABLE)
        kind = _BUILDS[self._isa]
        return f"{kind} -DMTMD_BUILD=OFF '-DCMAKE_CXX_FLAGS=-include {header}'"

    def folder(self) -> Path:
        """Return the checkpoint from which all other files are made."""
        return self._made("hf", lambda path: make_random_model(path, self._shape))

    def openvino(self, form: str) -> Path:
        def export(path: Path) -> None:
            tool = self.python("openvino").parent / "optimum-cli"
            command = (str(tool), "export", "openvino", "--model", str(self.folder()))
            _run(*command, "--task", "text-generation-with-past", *_FORMATS[form], str(path))

        return self._made(f"openvino-{form}", export)

    def gguf(self, kind: str) -> Path:
        """Return a GGUF file. BF16 has the exact weights; llama.cpp rounds all other kinds."""
        if kind == "BF16":
            return self._made("BF16.gguf", lambda path: write_gguf(self.folder(), path))

        def rounded(path: Path) -> None:
            source, python = str(self.gguf("BF16")), str(self.python("llama.cpp"))
            _run(python, "-c", _QUANTIZE, source, str(path), _FILE_TYPES[kind])

        return self._made(f"{kind}.gguf", rounded)

    def _made(self, name: str, make) -> Path:  # type: ignore[no-untyped-def]
        """Make a file or folder, under a temporary name until the file or folder is complete."""
        path, half = self.models / name, self.models / f"half-{name}"
        if not path.exists():
            print(f"Making {path}", file=sys.stderr, flush=True)
            make(half)
            half.rename(path)
        return path


def write_gguf(folder: Path, target: Path, matrices: Kind = Kind.BF16) -> None:
    """Write a model folder of make_random_model as one file."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, config["model_type"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    described = json.loads((folder / "tokenizer.json").read_text())
    add_tokenizer(writer, described, {"eos_token_id": config["eos_token_id"]})
    for name, tensor in load_file(folder / "model.safetensors").items():
        kind = matrices if tensor.ndim > 1 else Kind.F32
        raw = np.ascontiguousarray(quantize(tensor.float().numpy(), kind))
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
    write_file(writer)


def _refuse_cuda(python: Path, packages: tuple[str, ...]) -> None:
    """Exit if pip would install torch with gigabytes of CUDA libraries."""
    command = (str(python), "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-")
    report = subprocess.run([*command, *packages], stdout=subprocess.PIPE, check=True).stdout
    planned = json.loads(report)["install"]
    if any(package["metadata"]["name"].startswith("nvidia-") for package in planned):
        raise SystemExit(
            "pip would install torch with CUDA. Let pip find a build for CPUs first, "
            "for instance with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS."
        )


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    """Run a command with its output on stderr; raises SystemExit if it fails."""
    try:
        subprocess.run(
            command, check=True, env=os.environ | (environment or {}), stdout=sys.stderr.fileno()
        )
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(command[:6])} ... failed with {error.returncode}.") from None
