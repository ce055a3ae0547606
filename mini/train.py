"""Trains headrace-mini from a seed: generator, tokenizer, weights, and the files that ship."""

import argparse
from pathlib import Path

from tokenizers import Tokenizer

from mini.export import export
from mini.training import NUM_STEPS, Plan, Training
from mini.vocabulary import train_tokenizer

VOCAB_SIZE = 1536


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--decay-steps", type=int, default=5000)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--work", type=Path, default=Path("build/mini"), help="for checkpoints")
    parser.add_argument("--out", type=Path, help="where the finished model goes")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    saved = options.work / "tokenizer.json"
    if not options.resume:
        train_tokenizer(options.seed, VOCAB_SIZE).save(str(saved))
    tokenizer = Tokenizer.from_file(str(saved))
    plan = Plan(options.seed, options.steps, options.decay_steps, options.save_every)
    training = Training(plan, tokenizer)
    if options.resume:
        training.load(options.work)
    training.run(options.work)
    if options.out:
        export(training.shape, training.mean, tokenizer, options.out)


if __name__ == "__main__":
    main()
