"""Answers requests in the caller's process, without HTTP."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, overload

from headrace.llm.loaded_model import LoadedModel
from headrace_common.answer import Answer, Messages, Piece, Ranked
from headrace_common.sampling_options import SamplingOptions

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray


class LLM(LoadedModel):
    """Runs a model in the caller's process.

    Any thread may call the methods; concurrent calls share the engine's steps. Each method takes
    and checks the fields of its HTTP route: RequestFailed names the wrong field. Unlike the route,
    a method also refuses unknown fields.

    Example:
        >>> from headrace import LLM
        >>> with LLM("smollm2") as llm:
        ...     print(llm.chat("Name the capital of France.").text)
    """

    @classmethod
    def load(cls, model: str = "headrace-mini", **options: Any) -> "LLM":
        """Load a model. This is another spelling of `LLM(model, **options)`."""
        return cls(model, **options)

    @overload
    def generate(
        self,
        prompt: str | list[int],
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> Answer: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> list[Answer]: ...

    def generate(
        self,
        prompt: Any,
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> Any:
        """Continue raw text, without a chat template.

        Args:
            prompt: A text or a list of token ids, or a list of such prompts. Several prompts are
                answered independently, in the same engine steps.
            options: Options of the answers.
            progress: Whether to show a progress bar on stderr if there are several inputs.
            **fields: Fields of `/v1/completions`. They take precedence over `options`.

        Returns:
            One Answer, or a list of Answers in the order of the prompts.

        Example:
            >>> llm.generate("1, 2, 3, 4,", max_tokens=8, temperature=0).text
        """
        return self._host.call(self._host.generate(prompt, options, fields, progress))

    @overload
    def chat(
        self,
        messages: Messages | str,
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> Answer: ...

    @overload
    def chat(
        self,
        messages: list[Messages] | list[str],
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> list[Answer]: ...

    def chat(
        self,
        messages: Any,
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> Any:
        """Answer the last message of a conversation, or of each conversation in a list.

        Args:
            messages: Messages as in OpenAI's API. A string is one message of the user. A list of
                strings or of conversations is answered in the same engine steps.
            options: Options of the answers.
            progress: Whether to show a progress bar on stderr if there are several inputs.
            **fields: Fields of `/v1/chat/completions`. They take precedence over `options`.

        Returns:
            One Answer, or a list of Answers in the order of the conversations.

        Example:
            >>> llm.chat("Name five animals.", options=SamplingOptions(temperature=0)).text
            >>> [it.text for it in llm.chat(["What is 2 + 3?", "Spell cat."])]
        """
        return self._host.call(self._host.chat(messages, options, fields, progress))

    def stream(
        self,
        messages: Messages | str | None = None,
        *,
        prompt: str | list[str] | list[int] | list[list[int]] | None = None,
        options: SamplingOptions | None = None,
        **fields: Any,
    ) -> Iterator[Piece]:
        """Yield the pieces of an answer as they are generated.

        Leaving the loop cancels the request.

        Args:
            messages: Messages as in `chat`, for one conversation.
            prompt: Raw text or token ids as in `generate`, instead of messages.
            options: Options of the answer.
            **fields: Fields of the route. They take precedence over `options`.

        Example:
            >>> for piece in llm.stream("Count from 1 to 5."):
            ...     print(piece.text, end="")
        """
        call = self._host.stream(messages, prompt, options, fields)
        return self._keeping_model(self._host.pieces(call))

    def _keeping_model(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yield the pieces. As the generator refers to this object, the model is not freed."""
        yield from pieces

    def embed(
        self,
        input: str | list[int] | list[str] | list[list[int]],
        *,
        progress: bool = False,
        **fields: Any,
    ) -> "NDArray[float32]":
        """Return the vector of one input, or a matrix with one row for each input of a list.

        Args:
            input: A text or a list of token ids, or a list of such inputs.
            progress: Whether to show a progress bar on stderr if there are several inputs.
            **fields: Fields of `/v1/embeddings`, such as `dimensions`.

        Returns:
            Numbers as float32. Models that normalize return vectors of length 1.

        Example:
            >>> vectors = llm.embed(["A wheel.", "A mill."])
            >>> vectors[0] @ vectors[1]
        """
        vectors: NDArray[float32] = self._host.call(self._host.embed(input, fields, progress))
        return vectors

    def rerank(self, query: str, documents: list[Any], **fields: Any) -> list[Ranked]:
        """Rank documents by relevance to a query, the most relevant first.

        Args:
            query: The question.
            documents: Texts, or objects with a `text`.
            **fields: Fields of `/v1/rerank`, such as `top_n`.

        Example:
            >>> best = llm.rerank("What turns a mill?", documents)[0]
            >>> documents[best.index]
        """
        ranking: list[Ranked] = self._host.call(self._host.rerank(query, documents, fields))
        return ranking

    def close(self) -> None:
        """End all requests and free the model. Idempotent."""
        self._host.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
