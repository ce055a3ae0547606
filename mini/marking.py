"""Marks the answers that greedy decoding would give, and measures how fast they are generated."""

import time
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer

from mini.conversation import IGNORED
from mini.exam import Subject, paper


@dataclass(frozen=True)
class Mark:
    subject: Subject
    num_right: int
    num_asked: int
    num_tokens_right: int
    num_tokens: int
    # The prompt and the expected answer.
    first_wrong: str

    @property
    def share(self) -> float:
        return self.num_right / self.num_asked


def _encoded(subject: Subject, tokenizer: Tokenizer, dice: Random) -> tuple[list[int], list[int]]:
    """Return ids and targets of a question whose length is within the subject's range."""
    low, high = subject.tokens
    while True:
        ids: list[int] = []
        wanted: list[int] = []
        for text, learnt in paper(subject, dice):
            part = tokenizer.encode(text).ids
            ids += part
            wanted += part if learnt else [IGNORED] * len(part)
        answered = len(wanted) - wanted.count(IGNORED)
        if low <= (len(ids) if subject.counts_prompt else answered) <= high:
            return ids[:-1], wanted[1:]


@torch.no_grad()
def tokens_right(model: Any, ids: list[int], wanted: list[int]) -> tuple[int, int]:
    """Return how many expected tokens are the most probable ones, and how many there are.

    Each token is predicted from the expected tokens before it. If all are right, greedy decoding
    would produce exactly the expected answer with its end; otherwise it would deviate at the first
    wrong one. So one forward pass shows whether greedy decoding succeeds.
    """
    targets = torch.tensor(wanted)
    at = (targets >= 0).nonzero().squeeze(1)
    said = model(torch.tensor([ids]), logits_to_keep=at).logits[0].argmax(-1)
    return int((said == targets[at]).sum()), len(at)


def mark(model: Any, tokenizer: Tokenizer, subject: Subject, num: int, seed: int) -> Mark:
    dice = Random(f"{seed} exam {subject.name}")
    num_right, num_tokens_right, num_tokens, first_wrong = 0, 0, 0, ""
    for _ in range(num):
        ids, wanted = _encoded(subject, tokenizer, dice)
        right, total = tokens_right(model, ids, wanted)
        num_right += right == total
        num_tokens_right += right
        num_tokens += total
        if right < total and not first_wrong:
            first_wrong = tokenizer.decode(ids, skip_special_tokens=False)
    return Mark(subject, num_right, num, num_tokens_right, num_tokens, first_wrong)


@torch.no_grad()
def speeds(model: Any, num_tokens: int = 256) -> tuple[float, float]:
    """Return tokens per second for a prompt of 1,024 tokens, and for one decoding stream."""
    prompt = torch.arange(1024).unsqueeze(0) % 256 + 16
    model(prompt)
    start = time.perf_counter()
    model(prompt)
    prefill = 1024 / (time.perf_counter() - start)
    start = time.perf_counter()
    model.generate(
        prompt[:, :16], max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
    )
    return prefill, num_tokens / (time.perf_counter() - start)
