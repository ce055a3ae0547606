"""Evaluate headrace-mini on held-out questions, and write docs/reference/headrace-mini.md."""

import argparse
import platform
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from mini.card import Facts, write_card
from mini.exam import SUBJECTS
from mini.marking import mark, speeds
from mini.training import LENGTHS, NUM_STEPS, STEP_TOKENS
from mini.turn import HELD_OUT

SHIPPED = Path("src/headrace_common/checkpoints/mini")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--num", type=int, default=200, help="prompts a skill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--card", type=Path, default=Path("docs/reference/headrace-mini.md"))
    parser.add_argument("--show-wrong", action="store_true", help="print one failure a skill")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    marks = []
    for subject in tqdm(SUBJECTS, disable=None):
        marks.append(mark(model, tokenizer, subject, options.num, options.seed))
        print(f"{marks[-1].share:7.1%}  {subject.name}", flush=True)
        if options.show_wrong and marks[-1].first_wrong:
            print(repr(marks[-1].first_wrong[-400:]))
    prefill, decode = speeds(model)
    num_bytes = (options.model / "model.safetensors").stat().st_size
    facts = Facts(
        size=f"{model.num_parameters():,} parameters, {num_bytes / 1e6:.1f} MB of weights",
        context=max(max(mix) for _, mix in LENGTHS),
        positions=model.config.max_position_embeddings,
        held_out=HELD_OUT,
        tokens=NUM_STEPS * STEP_TOKENS / 1e6,
        seed=options.seed,
        prefill=prefill,
        decode=decode,
        threads=torch.get_num_threads(),
        machine=f"a {platform.machine()} processor",
    )
    options.card.parent.mkdir(parents=True, exist_ok=True)
    options.card.write_text(write_card(marks, facts))


if __name__ == "__main__":
    main()
