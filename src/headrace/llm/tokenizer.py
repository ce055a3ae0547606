"""Converts between text and token ids, for callers of LLM."""

from collections.abc import Iterable
from typing import Any

from headrace.llm.host import Host
from headrace_common.answer import Messages


class ModelTokenizer:
    """The loaded model's tokenizer. `llm.tokenizer` returns it.

    Example:
        >>> ids = llm.tokenizer.encode("Hello!")
        >>> llm.tokenizer.decode(ids)
        >>> llm.tokenizer.count("Hello!")
    """

    def __init__(self, host: Host) -> None:
        self._host = host

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: The text.
            add_special_tokens: Whether to add the tokens with which the model's prompts begin.

        Example:
            >>> llm.generate(llm.tokenizer.encode("1, 2, 3,"))
        """
        fields = {"prompt": text, "add_special_tokens": add_special_tokens}
        return self._host.prompt_ids(None, fields).token_ids.tolist()

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids.

        Args:
            token_ids: Token ids, such as `answer.token_ids`.
            skip_special_tokens: Whether to leave out special tokens.

        Example:
            >>> llm.tokenizer.decode(answer.token_ids)
        """
        return self._host.text_of(list(token_ids), skip_special_tokens)

    def count(self, messages: Messages | str, **fields: Any) -> int:
        """Return the number of tokens of a text, or of messages with the chat template.

        Args:
            messages: A text, or messages as in `llm.chat`.
            **fields: Fields that change the prompt of a chat, such as `tools`.

        Example:
            >>> llm.tokenizer.count([{"role": "user", "content": "Hello!"}])
        """
        if isinstance(messages, str):
            return len(self.encode(messages, **fields))
        return len(self._host.prompt_ids(messages, fields).token_ids)
