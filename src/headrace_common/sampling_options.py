"""Defines the options of an answer that Python callers set most often, with types and ranges."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace_common.errors import RequestFailed

_OTHER_NAMES = {
    "max_tokens": "max_completion_tokens",
    "repetition_penalty": "repeat_penalty",
    "top_logprobs": "logprobs",
}
"""Maps a field to a field that replaces it, if a caller sets the second field directly."""


class SamplingOptions(
    msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, forbid_unknown_fields=True
):
    """Options of an answer, for one call or many. None leaves the model's default unchanged.

    A field that is passed to a call directly takes precedence over the same option.

    Args:
        temperature: Randomness of the answer, 0 to 100. 0 always takes the likeliest token.
        top_p: Total probability of the likeliest tokens that may be drawn, 0 to 1.
        top_k: Number of likeliest tokens that may be drawn. 0 and -1 mean all.
        min_p: Least probability of a token, as a fraction of the likeliest token's, 0 to 1.
        max_tokens: Largest number of tokens in the answer. -1 means as many as fit.
        min_tokens: Least number of tokens before the answer may end.
        stop: Texts that end the answer. The answer does not contain them.
        stop_token_ids: Tokens that end the answer.
        seed: Number that makes the drawn tokens repeatable.
        n: Number of answers to the same prompt, 1 to 128.
        repetition_penalty: Above 1, used tokens become less likely. At most 10.
        frequency_penalty: Subtracted from a token's logit for each use in the answer, -2 to 2.
        presence_penalty: Subtracted once from the logit of a token in the answer, -2 to 2.
        logit_bias: Numbers from -100 to 100, added to the logits of tokens by their ids.
        logprobs: Number of likeliest tokens to report with each token, 0 to 20.
        json_schema: JSON Schema that the answer follows.
        ignore_eos: Go on after the model's end token.

    Example:
        >>> options = SamplingOptions(temperature=0.7, top_p=0.9, max_tokens=200)
        >>> llm.chat("Name five animals.", options=options, seed=1)
    """

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=-1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    json_schema: dict[str, Any] | None = None
    ignore_eos: bool | None = None


def with_options(
    fields: dict[str, Any], options: SamplingOptions | None, is_chat: bool
) -> dict[str, Any]:
    """Return the fields of a request body. A field takes precedence over the same option."""
    if options is None:
        return fields
    if not isinstance(options, SamplingOptions):
        message = f"options must be SamplingOptions, not of type {type(options).__name__}."
        raise RequestFailed("invalid_type", message, "options")
    given = {name: getattr(options, name) for name in SamplingOptions.__struct_fields__}
    if is_chat and options.logprobs is not None:
        # The chat's route has a switch and a number, the route for raw text only the number.
        given |= {"logprobs": True, "top_logprobs": options.logprobs}
    given = {
        name: value
        for name, value in given.items()
        if value is not None and _OTHER_NAMES.get(name) not in fields
    }
    return given | fields
