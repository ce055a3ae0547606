"""Draws speculative tokens for the simulator: each is correct with a given probability."""

from array import array
from random import Random

from headrace_engine.scheduler.guess import Guess
from headrace_engine.scheduler.sequence import Sequence
from stress.simulator.fake_runner import VOCABULARY, token_at
from stress.simulator.scenario import Scenario


class MadeUp:
    """A guesser whose stated probabilities need not be true."""

    def __init__(self, sequence: Sequence, scenario: Scenario) -> None:
        self._sequence = sequence
        self._rng = Random(scenario.seed + 5)
        self._share = scenario.right_guesses

    def guess(self, token_ids: "array[int]", forced: tuple[int, ...], most: int) -> Guess:
        sequence = self._sequence
        first = len(token_ids) - sequence.num_prompt
        right = [
            token_at(sequence.sampling, sequence.choice, first + number) for number in range(most)
        ]
        ids = tuple(self._one(token_id) for token_id in right[: self._rng.randint(1, most)])
        return Guess(ids, tuple(0.9**number for number in range(1, len(ids) + 1)))

    def _one(self, token_id: int) -> int:
        is_right = self._rng.random() < self._share
        return token_id if is_right else 3 + self._rng.randrange(VOCABULARY)
