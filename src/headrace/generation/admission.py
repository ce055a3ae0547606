"""From a request to the token ids that are submitted, or to the reason why it is refused."""

import asyncio
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headrace.core.errors import RequestError
from headrace.core.request import Chat, Ids, Prompt, Request, Text
from headrace.generation.served import ServedModel

Result = TypeVar("Result")


class Admission:
    """Renders and tokenizes in worker threads of its own, and checks what comes of it."""

    def __init__(self, num_workers: int = 2) -> None:
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="text")

    async def prompts(self, model: ServedModel, request: Request) -> tuple[bytes, ...]:
        """Packed int32 ids of each prompt; RequestError if one cannot be served."""
        longest = model.max_model_len - (request.sampling.max_tokens != 0)
        encoded = await asyncio.gather(
            *(self.encode(model, prompt, longest) for prompt in request.prompts)
        )
        for number, token_ids in enumerate(encoded):
            _check_length(model, request, number, len(token_ids), longest)
        return tuple(token_ids.tobytes() for token_ids in encoded)

    async def encode(
        self, model: ServedModel, prompt: Prompt, longest: int | None = None
    ) -> "array[int]":
        """All ids of a prompt, or the first ones, more than `longest`, of one that is too long.

        Window by window, so that a long text keeps no short one waiting for its end.
        """
        if isinstance(prompt, Ids):
            return array("i", prompt.token_ids)
        match prompt:
            case Text(text, adds_special_tokens):
                pass
            case Chat():
                text, adds_special_tokens = await self.render(model, prompt), False
        encoding = await self._do(model.encoder.begin, text, adds_special_tokens, longest)
        while await self._do(encoding.advance):
            pass
        return encoding.token_ids

    async def render(self, model: ServedModel, chat: Chat) -> str:
        """The very text that a chat's prompt is tokenized from."""
        return await self._do(_render, model, chat)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def _do(self, work: Callable[..., Result], *arguments: object) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, work, *arguments)


def _render(model: ServedModel, chat: Chat) -> str:
    if model.template is None:
        raise RequestError(
            "unsupported_operation",
            "This model has no chat template; "
            "use /v1/completions, or serve it with --chat-template.",
        )
    return model.template.render(chat)


def _check_length(
    model: ServedModel, request: Request, number: int, num_tokens: int, longest: int
) -> None:
    param = "messages" if request.route == "/v1/chat/completions" else "prompt"
    if len(request.prompts) > 1:
        param = f"{param}[{number}]"
    if num_tokens == 0:
        raise RequestError(
            "empty_prompt", "The prompt has no tokens; send at least one character.", param
        )
    if num_tokens > longest:
        limit = model.max_model_len
        raise RequestError(
            "context_length_exceeded",
            f"The prompt has at least {num_tokens} tokens and the context holds {limit}; "
            f"shorten it to {longest} tokens or fewer.",
            param,
            {"n_prompt_tokens": num_tokens, "n_ctx": limit},
        )
