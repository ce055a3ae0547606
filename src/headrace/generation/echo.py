"""The prompt as the beginning of an answer: its text, and its tokens' log probabilities."""

from headrace.core.messages import PromptLogprobs
from headrace.generation.choice import Choice
from headrace.generation.logprobs import token_logprobs, unconditioned
from headrace.streams.events import TokenLogprob
from headrace.streams.record import Record
from headrace.text.tokenizer import Tokenizer


class Echo:
    """Collects what the engine says of each prompt, and puts it before each choice's text."""

    def __init__(self, record: Record, tokenizer: Tokenizer) -> None:
        self._record = record
        self._tokenizer = tokenizer
        self._entries: dict[int, dict[int, list[TokenLogprob]]] = {}
        self._begun: set[int] = set()

    def add(self, prompt: int, item: PromptLogprobs) -> None:
        rows = self._entries.setdefault(prompt, {})
        rows[item.start] = token_logprobs(item.logprobs, self._tokenizer)

    def begin(self, choice: Choice) -> None:
        """Writes the prompt into the choice, once."""
        if choice.index in self._begun:
            return
        self._begun.add(choice.index)
        token_ids = self._record.prompt_ids(choice.prompt)
        skip = self._record.request.skip_special_tokens
        choice.echo(self._tokenizer.decode(token_ids, skip), self._logprobs(choice, token_ids[0]))

    def _logprobs(self, choice: Choice, first_id: int) -> list[TokenLogprob]:
        if self._record.request.sampling.num_prompt_logprobs is None:
            return []
        rows = self._entries.get(choice.prompt, {})
        follow = [entry for start in sorted(rows) for entry in rows[start]]
        return [unconditioned(first_id, self._tokenizer), *follow]
