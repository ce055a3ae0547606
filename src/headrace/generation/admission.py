"""From a request to the token ids that are submitted, or to the reason why it is refused."""

import asyncio
from array import array
from concurrent.futures import ThreadPoolExecutor

from headrace.core.errors import RequestError
from headrace.core.request import Chat, Ids, Prompt, Request, Text
from headrace.generation.served import ServedModel


class Admission:
    """Renders and tokenizes in worker threads of its own, and checks what comes of it."""

    def __init__(self, num_workers: int = 2) -> None:
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="text")

    async def prompts(self, model: ServedModel, request: Request) -> tuple[bytes, ...]:
        """Packed int32 ids of each prompt; RequestError if one cannot be served."""
        encoded = await asyncio.gather(*(self.encode(model, prompt) for prompt in request.prompts))
        for number, token_ids in enumerate(encoded):
            _check_length(model, request, number, len(token_ids))
        return tuple(token_ids.tobytes() for token_ids in encoded)

    async def encode(self, model: ServedModel, prompt: Prompt) -> "array[int]":
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, _encode, model, prompt)

    async def render(self, model: ServedModel, chat: Chat) -> str:
        """The very text that a chat's prompt is tokenized from."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, _render, model, chat)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)


def _encode(model: ServedModel, prompt: Prompt) -> "array[int]":
    match prompt:
        case Ids(token_ids):
            return array("i", token_ids)
        case Text(text, add_special_tokens):
            return model.tokenizer.encode(text, add_special_tokens)
        case Chat():
            return model.tokenizer.encode(_render(model, prompt), False)


def _render(model: ServedModel, chat: Chat) -> str:
    if model.template is None:
        raise RequestError(
            "unsupported_operation",
            "This model has no chat template; "
            "use /v1/completions, or serve it with --chat-template.",
        )
    return model.template.render(chat)


def _check_length(model: ServedModel, request: Request, number: int, num_tokens: int) -> None:
    param = "messages" if request.route == "/v1/chat/completions" else "prompt"
    if len(request.prompts) > 1:
        param = f"{param}[{number}]"
    if num_tokens == 0:
        raise RequestError(
            "empty_prompt", "The prompt has no tokens; send at least one character.", param
        )
    limit = model.max_model_len
    longest = limit if request.sampling.max_tokens == 0 else limit - 1
    if num_tokens > longest:
        raise RequestError(
            "context_length_exceeded",
            f"The prompt has {num_tokens} tokens and the context holds {limit}; "
            f"shorten it to {longest} tokens or fewer.",
            param,
            {"n_prompt_tokens": num_tokens, "n_ctx": limit},
        )
