"""Answers requests in the caller's process, as coroutines of the caller's event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, overload

from headrace.llm.loaded_model import LoadedModel
from headrace_common.answer import Answer, Messages, Piece, Ranked
from headrace_common.sampling_options import SamplingOptions

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray


class AsyncLLM(LoadedModel):
    """Runs a model in the caller's process, for programs with an event loop.

    Takes the same options as LLM. The constructor begins the load and returns; `async with` waits
    for the load. Cancelling a call cancels its request.

    Example:
        >>> async with AsyncLLM("smollm2") as llm:
        ...     answer = await llm.chat("Name the capital of France.")
        ...     async for piece in llm.stream("Count from 1 to 5."):
        ...         print(piece.text, end="")
    """

    _waits_for_load = False

    @overload
    async def generate(
        self,
        prompt: str | list[int],
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> Answer: ...

    @overload
    async def generate(
        self,
        prompt: list[str] | list[list[int]],
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> list[Answer]: ...

    async def generate(
        self,
        prompt: Any,
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> Any:
        """Continue raw text, with the arguments and results of `LLM.generate`.

        Example:
            >>> answer = await llm.generate("1, 2, 3, 4,", max_tokens=8, temperature=0)
        """
        return await self._do(self._host.generate, prompt, options, fields, progress)

    @overload
    async def chat(
        self,
        messages: Messages | str,
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> Answer: ...

    @overload
    async def chat(
        self,
        messages: list[Messages] | list[str],
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> list[Answer]: ...

    async def chat(
        self,
        messages: Any,
        *,
        options: SamplingOptions | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> Any:
        """Answer one conversation or several, with the arguments and results of `LLM.chat`.

        Example:
            >>> answer = await llm.chat("Name five animals.")
        """
        return await self._do(self._host.chat, messages, options, fields, progress)

    async def stream(
        self,
        messages: Messages | str | None = None,
        *,
        prompt: str | list[str] | list[int] | list[list[int]] | None = None,
        options: SamplingOptions | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of an answer, with the arguments of `LLM.stream`.

        Example:
            >>> async for piece in llm.stream("Count from 1 to 5."):
            ...     print(piece.text, end="")
        """
        await self._loaded()
        call = await asyncio.to_thread(self._host.stream, messages, prompt, options, fields)
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Piece | None]()

        def put(piece: Piece | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        running = self._host.start(self._host.feed(call, put))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await self._host.result(running)
        finally:
            running.cancel()

    async def embed(
        self,
        input: str | list[int] | list[str] | list[list[int]],
        *,
        progress: bool = False,
        **fields: Any,
    ) -> "NDArray[float32]":
        """Return vectors, with the arguments and results of `LLM.embed`.

        Example:
            >>> vectors = await llm.embed(["A wheel.", "A mill."])
        """
        vectors: NDArray[float32] = await self._do(self._host.embed, input, fields, progress)
        return vectors

    async def rerank(self, query: str, documents: list[Any], **fields: Any) -> list[Ranked]:
        """Rank documents, with the arguments and results of `LLM.rerank`.

        Example:
            >>> best = (await llm.rerank("What turns a mill?", documents))[0]
        """
        ranking: list[Ranked] = await self._do(self._host.rerank, query, documents, fields)
        return ranking

    async def close(self) -> None:
        """End all requests and free the model. Idempotent."""
        await asyncio.to_thread(self._host.close)

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await self._loaded()
        except BaseException:
            # `async with` does not call `__aexit__` then.
            self._host.close_later()
            raise
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def _loaded(self) -> None:
        """Wait for the load. A cancelled caller does not cancel the load."""
        await asyncio.shield(asyncio.wrap_future(self._host.has_started))

    async def _do(self, check: Callable[..., Coroutine[Any, Any, Any]], *given: Any) -> Any:
        """Check a request in a thread, and run its work on the model's event loop."""
        await self._loaded()
        work = await asyncio.to_thread(check, *given)
        return await self._host.result(self._host.start(work))
