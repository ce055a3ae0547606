"""Compare tokenization in parts with a single call: `fuzz_tokenizers.py N [SEED]`.

The texts are divided among all kinds of tokenizers that the tests train. Each text is tokenized
in windows of 200 and of 400 characters, and in pieces that are split before special tokens.
Prints each text for which the results differ, and exits with 1 if there is such a text.
"""

import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from headrace.text.encoder import Encoder
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_probes import hard_texts
from headrace.text.windowed_encoding import Sizes, WindowedText
from tools.harness.small_tokenizers import KINDS, ours

SIZES = (Sizes(window=200, overlap=100), Sizes(window=400, overlap=200))


def main(num_texts: int, seed: int) -> int:
    num_wrong = 0
    for number, kind in enumerate(KINDS):
        texts = hard_texts(seed * len(KINDS) + number, ours(kind).added_tokens)
        share = num_texts // len(KINDS) + (number < num_texts % len(KINDS))
        wrong = [text for text in islice(texts, share) if not agrees(ours(kind), text)]
        num_wrong += len(wrong)
        print(f"{kind}: {len(wrong)} of {share} differ", flush=True)
        for text in wrong[:3]:
            print(f"  {text!r}")
    print(f"{num_texts} texts, seed {seed}: {num_wrong} differ")
    return int(num_wrong > 0)


def agrees(tokenizer: Tokenizer, text: str) -> bool:
    expected = tokenizer.encode(text, add_special_tokens=True)
    windows_agree = all(in_windows(tokenizer, text, sizes) == expected for sizes in SIZES)
    return windows_agree and in_pieces(tokenizer, text) == tokenizer.encode(text, False)


def in_windows(tokenizer: Tokenizer, text: str, sizes: Sizes):
    encoding = WindowedText(tokenizer, text, sizes, tokenizer.outer_ids)
    while encoding.advance():
        pass
    return encoding.token_ids


def in_pieces(tokenizer: Tokenizer, text: str):
    encoding = Encoder(tokenizer, Sizes(piece=1)).begin(text, False)
    while encoding.advance():
        pass
    return encoding.token_ids


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
