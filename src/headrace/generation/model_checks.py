"""Checks that a model can do what a request asks, before it begins and when it goes on."""

from headrace.fleet.served_model import ServedModel
from headrace.streams.record import Record, ServedSetup
from headrace.text.text_model import longest_prompt
from headrace.workers.image_file import Admitted, see_images
from headrace.workers.pool import Work
from headrace_common.errors import RequestError
from headrace_common.jobs import Encoded, EncodedAhead, EncodePairs, EncodePrompts
from headrace_common.request import Chat, Ids, Request

_PROMPT_FIELDS = {"/v1/responses": "input"}  # where it has another name than usual


def check_generates(model: ServedModel) -> None:
    """RequestError if the model draws no tokens."""
    if model.ready is not None and "generate" not in model.ready.tasks:
        route = "/v1/rerank" if "score" in model.ready.tasks else "/v1/embeddings"
        message = f"{model.names[0]} generates no text; use {route}, or serve another model."
        raise RequestError("unsupported_operation", message, "model")


async def encode(
    work: Work,
    model: ServedModel,
    job: EncodePrompts | EncodePairs,
    packed: bytes,
    ahead: EncodedAhead | None,
) -> Encoded:
    """The job's result: that from ahead, unless the model or its limit has changed since."""
    if ahead is not None and (ahead.number, ahead.longest) == (model.number, job.longest):
        return ahead.encoded
    return await work.do(job, [packed])


async def admit(
    work: Work,
    model: ServedModel,
    request: Request,
    packed: bytes,
    ahead: EncodedAhead | None = None,
) -> Admitted:
    """The ids of each prompt; RequestError if one cannot be served.

    `packed` are the prompts, of which the request may have only stubs.
    """
    longest = _longest_prompt(model, request)
    if model.has_source and request.echo:
        message = "This model reads a source and does not go on with it; leave echo out."
        raise RequestError("unsupported_parameter", message, "echo")
    chats = [prompt for prompt in request.prompts if isinstance(prompt, Chat)]
    if any(chat.num_images or chat.images for chat in chats):
        admitted = await see_images(work, packed, model.names[0])
    else:
        job = EncodePrompts(longest, model.names[0])
        encoded = await encode(work, model, job, packed, ahead)
        admitted = Admitted(encoded.prompts, encoded.tokenization, changes=encoded.changes)
    for number, token_ids in enumerate(admitted.prompts):
        _check_length(model, request, number, len(token_ids) // 4, longest)
    return admitted


def _longest_prompt(model: ServedModel, request: Request) -> int:
    return longest_prompt(model, model.max_model_len, request.sampling.max_tokens)


def check_can_begin(record: Record, model: ServedModel) -> None:
    """RequestError if the model, now that it is loaded, does not do what was admitted before."""
    check_generates(model)
    longest = _longest_prompt(model, record.request)
    for number, token_ids in enumerate(record.prompts):
        _check_length(model, record.request, number, len(token_ids) // 4, longest)


async def see_again(
    work: Work, model: ServedModel, record: Record
) -> tuple[Admitted, RequestError | None]:
    """Prepares a stream's images again after a restart; with an error if they have changed."""
    try:
        again = await admit(work, model, record.request, record.images)
    except RequestError as error:
        return Admitted(record.prompts), error
    if again.prompts == record.prompts:
        return again, None
    again.close()
    message = "The model now reads these images in another way. Send the request again."
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
        # a long text is not read to its end; ids are all there
        count = num_tokens if isinstance(request.prompts[number], Ids) else f"at least {num_tokens}"
        raise too_long(limit, longest, param, str(count), num_tokens)


def too_long(limit: int, longest: int, param: str, count: str, num_tokens: int) -> RequestError:
    """`num_tokens`, `count` in words, in a context of `limit`, of which `longest` may be taken."""
    name = param.partition("[")[0]
    return RequestError(
        "context_length_exceeded",
        # clients know this error by OpenAI's words, which the first two sentences keep
        f"This model's maximum context length is {limit} tokens. However, your {name} resulted "
        f"in {count} tokens. Please reduce the length of the {name} to {longest} tokens.",
        param,
        {"n_prompt_tokens": num_tokens, "n_ctx": limit},
    ).noting(prompt_tokens=num_tokens, limit=longest)


def check_can_go_on(
    fingerprint: str, then: ServedSetup, num_tokens: int, model: ServedModel
) -> int | None:
    """The context if it is smaller than the one that the stream began with, else None.

    RequestError `model_changed` if this model cannot go on with a stream that began on the one of
    that fingerprint and setup. `num_tokens` are those of its longest unfinished choice, prompt and
    answer so far.
    """
    now = model.setup
    if fingerprint != model.system_fingerprint:
        raise RequestError(
            "model_changed", f"{_what_changed(then, now)} Send the request again to run it anew."
        )
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
        return "The server now runs other weights, or the same ones with other settings."
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
