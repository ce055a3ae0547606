"""From a request to the token ids that are submitted, or to the reason why it is refused."""

import msgspec

from headrace.core.errors import RequestError
from headrace.core.request import Ids, Request
from headrace.generation.served import ServedModel
from headrace.generation.work import Work

_ids_of = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode


async def admit(
    work: Work, model: ServedModel, request: Request, packed: bytes
) -> tuple[bytes, ...]:
    """Packed int32 ids of each of the `packed` prompts; RequestError if one cannot be served."""
    longest = model.max_model_len - (request.sampling.max_tokens != 0)
    encoded = _ids_of(await work.do("prompts", [packed], longest))
    for number, token_ids in enumerate(encoded):
        _check_length(model, request, number, len(token_ids) // 4, longest)
    return encoded


def _check_length(
    model: ServedModel, request: Request, number: int, num_tokens: int, longest: int
) -> None:
    name = "messages" if request.route == "/v1/chat/completions" else "prompt"
    param = f"{name}[{number}]" if len(request.prompts) > 1 else name
    if num_tokens == 0:
        raise RequestError(
            "empty_prompt", "The prompt has no tokens; send at least one character.", param
        )
    if num_tokens > longest:
        limit = model.max_model_len
        # a long text is not read to its end; ids are all there
        count = num_tokens if isinstance(request.prompts[number], Ids) else f"at least {num_tokens}"
        raise RequestError(
            "context_length_exceeded",
            # clients know the fault by OpenAI's words, which the first two sentences keep
            f"This model's maximum context length is {limit} tokens. However, your {name} resulted "
            f"in {count} tokens. Please reduce the length of the {name} to {longest} tokens.",
            param,
            {"n_prompt_tokens": num_tokens, "n_ctx": limit},
        )
