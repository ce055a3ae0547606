"""Shortens long conversations of /v1/responses before their requests are admitted."""

import msgspec

from headrace.fleet.served_model import ServedModel
from headrace.protocols.fields.common import max_tokens
from headrace.text.text_model import longest_prompt
from headrace.workers.pool import JobRunner
from headrace_common.request import Chat
from headrace_common.worker_jobs import CheckedBody, FitResponse

# The share of the context that is left for the answer if the request sets no limit.
_ANSWER_SHARE = 8


async def fit(work: JobRunner, model: ServedModel, checked: CheckedBody) -> CheckedBody:
    """Return the request without its oldest items, if it has `truncation: auto` and is too long."""
    fields = checked.fields
    limit, asked = model.max_model_len, max_tokens(fields)
    # A limit of 0 is only known to the engine.
    if fields.get("truncation") != "auto" or not limit:
        return checked
    if any(isinstance(prompt, Chat) and prompt.num_images for prompt in checked.stubs):
        # Only the worker for images can count an image's tokens.
        return msgspec.structs.replace(checked, ignored=(*checked.ignored, "truncation"))
    room = limit - min(asked or limit // _ANSWER_SHARE, limit // 2)
    longest = longest_prompt(model, limit, asked)
    ahead = checked.ahead
    if ahead is not None and sum(map(len, ahead.encoded.prompts)) // 4 <= room:
        return checked
    job = FitResponse(room, longest, model.number)
    return await work.do(job, [msgspec.msgpack.encode(checked)])
