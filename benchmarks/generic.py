"""Steps of eight streams against those of one, for a model of transformers on our blocks.

    python tools/make_random_model.py --shape qwen3-0.6b --out MODEL
    python -m benchmarks.generic MODEL [--rounds 100] [--threads 2]

The model runs twice in lane `generic-text`, once with one stream and once with eight. Their steps
take turns, so a machine that is busy is busy for both.
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path

from benchmarks.hybrid import Side


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    one, eight = (Side(options.model, options.threads, "generic-text", n) for n in (1, 8))
    print(one.name, time.strftime("%H:%M:%S"), sep="\n")
    pairs = itertools.islice(zip(one.decode(), eight.decode(), strict=False), 5, options.rounds + 5)
    times = [(1e3 * a[0], 1e3 * b[0]) for a, b in pairs]
    low, middle, high = statistics.quantiles([b / a for a, b in times], n=4)
    alone, together = (statistics.median(each) for each in zip(*times, strict=True))
    print(
        f"one stream {alone:.0f} ms a step, eight {together:.0f} ms, "
        f"ratio {middle:.2f} ({low:.2f} to {high:.2f}), {len(times)} pairs"
    )


if __name__ == "__main__":
    main()
