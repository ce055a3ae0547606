"""What --quantize costs in quality: log probability of a text without it, in int8 and in int4.

python benchmarks/int8_loss.py --model DIR --text FILE [--tokens 1024]
"""

import argparse
from array import array
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from headrace.core.config import ModelConfig
from headrace.core.ids import SequenceId
from headrace.core.plan import Begin, Chunk, StepPlan
from headrace.core.sampling import Sampling
from headrace.runner.load import load_runner


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    ids = tokenizer.encode(options.text.read_text()).ids[: options.tokens]
    print(f"{len(ids)} tokens")
    for kind in ("none", "int8", "int4"):
        mean = mean_logprob(options.model, ids, kind)
        print(f"{kind}: mean log probability {mean:.4f}, perplexity {np.exp(-mean):.3f}")


def mean_logprob(folder: Path, ids: list[int], quantize: str) -> float:
    """Of every token but the first, in one prompt."""
    config = ModelConfig(
        model=str(folder),
        device="cpu",
        quantize=quantize,  # type: ignore[arg-type]
        max_model_len=len(ids) + 16,
        kv_cache_memory_bytes=2 << 30,
    )
    runner = load_runner(config, folder)[0]
    number = SequenceId(0)
    begin = Begin(number, array("i", ids), len(ids), 0, Sampling(num_prompt_logprobs=0))
    blocks = array("i", range(-(-len(ids) // config.block_size)))
    chunk = Chunk(number, 0, len(ids), len(ids), (), blocks)
    result = runner.launch(StepPlan(begun=(begin,), chunks=(chunk,))).result()
    logprobs = result.chunks[0].prompt_logprobs
    assert logprobs is not None
    return float(np.frombuffer(logprobs.values, np.float32).mean())


if __name__ == "__main__":
    main()
