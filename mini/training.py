"""The training loop of headrace-mini: seeded rows of growing length, and checkpoints."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from mini.beginning import begin, given
from mini.conversation import row
from mini.model import Mini, Shape, rotation
from mini.optimizer import optimizers

# This takes three to four hours on two cores.
NUM_STEPS = 21_700
STEP_TOKENS = 2048
# Tokens that are computed at once, few enough for a core's cache.
THREAD_TOKENS = 1024
NUM_THREADS = 2
WARMUP = 30
# During these steps, the weights that were set at the start are not trained.
NUM_HELD_STEPS = 1000
# For each first step, the lengths of rows and how often they are drawn.
LENGTHS: tuple[tuple[int, dict[int, float]], ...] = (
    (0, {128: 1.0}),
    (400, {256: 1.0}),
    (900, {256: 0.5, 512: 0.3, 1024: 0.2}),
    (1500, {256: 0.4, 512: 0.2, 1024: 0.2, 2048: 0.2}),
    (1600, {256: 0.6, 512: 0.2, 1024: 0.1, 2048: 0.1}),
    (3900, {128: 0.2, 256: 0.3, 512: 0.2, 1024: 0.15, 2048: 0.15}),
    (9300, {128: 0.15, 256: 0.2, 512: 0.2, 1024: 0.2, 2048: 0.25}),
    (15100, {128: 0.1, 256: 0.2, 512: 0.25, 1024: 0.2, 2048: 0.25}),
)


@dataclass(frozen=True)
class Plan:
    seed: int
    num_steps: int
    # In the last steps, the learning rate falls to zero.
    num_decay_steps: int
    save_every: int

    def rate(self, step: int) -> float:
        """Return the fraction of the full learning rate."""
        left = (self.num_steps - step) / max(1, self.num_decay_steps)
        return min(1.0, (step + 1) / WARMUP, max(left, 0.0))

    def length(self, step: int) -> int:
        mix = next(mix for start, mix in reversed(LENGTHS) if step >= start)
        dice = Random(f"{self.seed} length {step}")
        return dice.choices(list(mix), list(mix.values()))[0]


class Training:
    """The weights, their running mean (which is shipped) and the state of the optimizers."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.tokenizer, self.step = plan, tokenizer, 0
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.shape = Shape(vocab_size=tokenizer.get_vocab_size())
        self.model = Mini(self.shape)
        begin(self.model)
        self.model.to(self.device)
        self.named, self.given = list(self.model.named_parameters()), given(self.model)
        self.mean = {name: p.detach().clone() for name, p in self.named}
        self.optimizers = optimizers(self.model)
        self.rates = [group["lr"] for group in self._groups()]
        # Threads compute different rows, not parts of one operator, so they synchronize once per
        # step.
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(NUM_THREADS)
        self.turn = tuple(t.to(self.device) for t in rotation(self.shape, 2048))

    def run(self, folder: Path) -> None:
        bar = tqdm(total=self.plan.num_steps, initial=self.step, mininterval=5, unit="step")
        smooth = None
        while self.step < self.plan.num_steps:
            loss = self.advance()
            smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
            bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
            bar.update()
            if self.step % self.plan.save_every == 0:
                self.save(folder)
        self.save(folder)

    def advance(self) -> float:
        """Trains all weights for one step; returns the mean loss of its rows."""
        length = self.plan.length(self.step)
        rate = self.plan.rate(self.step)
        ids, wanted = self._rows(length)
        turn = (self.turn[0][:length], self.turn[1][:length])
        params = [p for _, p in self.named]
        num_wanted = (wanted >= 0).sum()

        def gradients(part: Tensor) -> tuple[float, tuple[Tensor, ...]]:
            share = (wanted[part] >= 0).sum() / num_wanted
            loss = self.model.loss(ids[part], wanted[part], turn) * share
            return loss.item(), torch.autograd.grad(loss, params)

        parts = torch.arange(len(ids)).split(max(1, THREAD_TOKENS // length))
        losses, grads = zip(*self.pool.map(gradients, parts), strict=True)
        for (name, p), shares in zip(self.named, zip(*grads, strict=True), strict=True):
            is_held = self.step < NUM_HELD_STEPS and name in self.given
            p.grad = None if is_held else torch.stack(shares).sum(0)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group, full in zip(self._groups(), self.rates, strict=True):
            group["lr"] = full * rate
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self._follow()
        return sum(losses)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _rows(self, length: int) -> tuple[Tensor, Tensor]:
        dice = Random(f"{self.plan.seed} rows {self.step}")
        rows = [row(dice, self.tokenizer, length) for _ in range(max(2, STEP_TOKENS // length))]
        ids, wanted = zip(*rows, strict=True)
        return torch.tensor(ids, device=self.device), torch.tensor(wanted, device=self.device)

    @torch.no_grad()
    def _follow(self) -> None:
        keep = min(0.995, self.step / (self.step + 10))
        for name, p in self.named:
            self.mean[name].lerp_(p, 1 - keep)

    def save(self, folder: Path) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "mean": self.mean,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, folder / "checkpoint.new")
        (folder / "checkpoint.new").replace(folder / "checkpoint.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "checkpoint.pt", map_location=self.device)
        self.step, self.mean = state["step"], state["mean"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
