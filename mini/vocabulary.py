"""Trains the tokenizer on generated text: byte-level BPE with a separate token for each digit."""

from collections.abc import Iterator
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from mini.conversation import conversation

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(seed: int, vocab_size: int, num_conversations: int = 3000) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(Random(f"{seed} tokenizer"), num_conversations), trainer)
    # The marks of thoughts and calls are text for a client, but the ends of turns are special.
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer


def _texts(dice: Random, num_conversations: int) -> Iterator[str]:
    for _ in range(num_conversations):
        exchanges = conversation(dice, 256)
        for _ in range(12):
            text = "".join(piece for piece, _ in next(exchanges))
            for mark in (*SPECIAL, *MARKS):
                text = text.replace(mark, "\n")
            yield text
