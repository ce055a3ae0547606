"""Checks that a model can serve a request, when the request starts and when the stream resumes."""

from headrace.fleet.served_model import ServedModel
from headrace.streams.record import Record, ServedSetup
from headrace.text.text_model import longest_prompt
from headrace.workers.image_file import Admitted, prepare_images
from headrace.workers.pool import JobRunner
from headrace_common.errors import RequestError
from headrace_common.request import Chat, Ids, Request
from headrace_common.worker_jobs import Encoded, EncodedAhead, EncodePairs, EncodePrompts

# The field that contains the prompt, for routes that do not use "prompt" or "messages".
_PROMPT_FIELDS = {"/v1/responses": "input"}


def check_generates(model: ServedModel) -> None:
    """Raise RequestError if the model does not generate tokens."""
    if model.ready is not None and "generate" not in model.ready.tasks:
        route = "/v1/rerank" if "score" in model.ready.tasks else "/v1/embeddings"
        message = f"{model.names[0]} generates no text; use {route}, or serve another model."
        raise RequestError("unsupported_operation", message, "model")


async def encode(
    work: JobRunner,
    model: ServedModel,
    job: EncodePrompts | EncodePairs,
    packed: bytes,
    ahead: EncodedAhead | None,
) -> Encoded:
    """Return the result of the encoding job.

    `ahead` is a result that was computed in advance. It is returned if it was computed for the
    same model and the same length limit.
    """
    if ahead is not None and (ahead.number, ahead.longest) == (model.number, job.longest):
        return ahead.encoded
    return await work.do(job, [packed])


async def admit(
    work: JobRunner,
    model: ServedModel,
    request: Request,
    packed: bytes,
    ahead: EncodedAhead | None = None,
) -> Admitted:
    """Return the token ids of each prompt. Raises RequestError if a prompt cannot be served.

    `packed` contains the prompts in msgpack, because `request` may contain only stubs of the
    prompts.
    """
    ready, longest = model.ready, _longest_prompt(model, request)
    if model.has_source and request.echo:
        message = "This encoder-decoder model does not continue its prompt; leave echo out."
        raise RequestError("unsupported_parameter", message, "echo")
    chats = [prompt for prompt in request.prompts if isinstance(prompt, Chat)]
    if any(chat.num_images or chat.images for chat in chats):
        admitted = await prepare_images(work, packed, model.names[0])
    else:
        salt = request.cache_salt if request.cache_prompt else None
        job = EncodePrompts(longest, model.names[0], cache_salt=salt)
        encoded = await encode(work, model, job, packed, ahead)
        admitted = Admitted(encoded.prompts, encoded.tokenization, changes=encoded.changes)
    for number, token_ids in enumerate(admitted.prompts):
        _check_length(model, request, number, len(token_ids) // 4, longest)
    return admitted._replace(ready=ready)


def _longest_prompt(model: ServedModel, request: Request) -> int:
    return longest_prompt(model, model.max_model_len, request.sampling.max_tokens)


def check_can_begin(record: Record, model: ServedModel) -> None:
    """Raise RequestError if the newly loaded model cannot serve an admitted request."""
    check_generates(model)
    longest = _longest_prompt(model, record.request)
    for number, token_ids in enumerate(record.prompts):
        _check_length(model, record.request, number, len(token_ids) // 4, longest)


async def see_again(
    work: JobRunner, model: ServedModel, record: Record
) -> tuple[Admitted, RequestError | None]:
    """Prepare a stream's images again after a restart.

    Returns an error too if the prompts' token ids have changed or cannot be computed.
    """
    try:
        again = await admit(work, model, record.request, record.images)
    except RequestError as error:
        return Admitted(record.prompts), error
    if again.prompts == record.prompts:
        return again, None
    again.close()
    message = "The model now encodes these images differently. Send the request again."
    return Admitted(record.prompts), RequestError("model_changed", message)


def _check_length(
    model: ServedModel, request: Request, number: int, num_tokens: int, longest: int
) -> None:
    name = _PROMPT_FIELDS.get(request.route) or (
        "messages" if isinstance(request.prompts[number], Chat) else "prompt"
    )
    param = f"{name}[{number}]" if len(request.prompts) > 1 else name
    if num_tokens == 0:
        raise RequestError(
            "empty_prompt", "The prompt has no tokens; send at least one character.", param
        )
    if num_tokens > longest:
        limit = model.max_model_len
        # A text is tokenized only up to the limit, but a list of token ids is counted completely.
        count = num_tokens if isinstance(request.prompts[number], Ids) else f"at least {num_tokens}"
        raise too_long(limit, longest, param, str(count), num_tokens)


def too_long(limit: int, longest: int, param: str, count: str, num_tokens: int) -> RequestError:
    """Return the error for a prompt that exceeds the context.

    `limit` is the context length, and `longest` the maximum length of the prompt. `count` is the
    prompt's number of tokens as text, such as "at least 5000".
    """
    name = param.partition("[")[0]
    return RequestError(
        "context_length_exceeded",
        # Clients recognize this error by OpenAI's wording, so the first two sentences must not
        # change.
        f"This model's maximum context length is {limit} tokens. However, your {name} resulted "
        f"in {count} tokens. Please reduce the length of the {name} to {longest} tokens.",
        param,
        {"n_prompt_tokens": num_tokens, "n_ctx": limit},
    ).noting(prompt_tokens=num_tokens, limit=longest)


def check_can_continue(
    fingerprint: str, then: ServedSetup, num_tokens: int, model: ServedModel
) -> int | None:
    """Return the model's context length if it has shrunk since the stream started, else None.

    The stream started on a model with this fingerprint and with the setup `then`. `num_tokens` is
    the length of the stream's longest unfinished choice, prompt included. Raises RequestError
    `model_changed` if `model` cannot continue the stream.
    """
    now = model.setup
    if fingerprint != model.system_fingerprint:
        raise RequestError("model_changed", f"{_what_changed(then, now)} Send the request again.")
    is_smaller = now.max_model_len < then.max_model_len
    if num_tokens + is_smaller > now.max_model_len:
        raise RequestError(
            "model_changed",
            f"The context is now {now.max_model_len} tokens, and this stream had {num_tokens} "
            "when it was resumed; send a shorter request, or raise --max-model-len.",
        )
    return now.max_model_len if is_smaller else None


def _what_changed(then: ServedSetup, now: ServedSetup) -> str:
    if not then.version:
        return "The server now runs other weights, or the same weights with other settings."
    changes = [
        f"{new} instead of {old}"
        for old, new in (
            (then.dtype, now.dtype),
            (then.device, now.device),
            (f"Headrace {then.version}", f"Headrace {now.version}"),
        )
        if old != new
    ]
    return f"The server now runs {', '.join(changes) or 'other weights'}."
