"""Writes data/*.gguf: tiny random models, quantized by llama.cpp itself.

python -m tests.checkpoints.make_k_files, where llama-cpp-python is installed
"""

import tempfile
from pathlib import Path

import llama_cpp

from tools.harness.gguf_files import add_merge, to_gguf
from tools.harness.tiny_models import CHAT_TEMPLATE, END, make_tiny_model

DATA = Path(__file__).parent / "data"
SHAPE = {
    "vocab_size": 260,  # as many as it has tokens
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
FILES = {
    "llama-Q4_K_M": ("LlamaForCausalLM", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M),
    "qwen3-Q5_K_M": ("Qwen3ForCausalLM", llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M),
}


def main() -> None:
    DATA.mkdir(exist_ok=True)
    for name, (architecture, kind) in FILES.items():
        with tempfile.TemporaryDirectory() as name_of_folder:
            folder = make_tiny_model(Path(name_of_folder) / "model", architecture, **SHAPE)
            assert add_merge(folder) == SHAPE["vocab_size"]
            whole = Path(name_of_folder) / "whole.gguf"
            to_gguf(folder, whole, "F32", chat_template=CHAT_TEMPLATE, eos_token_id=END)
            quantize(whole, DATA / f"{name}.gguf", kind)


def quantize(source: Path, target: Path, kind: int) -> None:
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = kind, 1
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), parameters)
    if code:
        raise SystemExit(f"llama_model_quantize ended with {code}")


if __name__ == "__main__":
    main()
