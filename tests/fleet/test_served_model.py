import asyncio
from typing import Any

import pytest

from headrace.generation.model_checks import admit
from headrace_common.errors import RequestError
from headrace_common.jobs import Encoded
from headrace_common.request import Chat, Prompt, Request, Text
from headrace_common.sampling import Sampling
from tests.gateway.builders import FakeModel


class NoTokens:
    """Workers by whom every prompt comes out empty."""

    async def do(self, *job: Any) -> Encoded:
        return Encoded((b"",), "one-shot")


@pytest.mark.parametrize(("prompt", "param"), [(Chat(()), "messages"), (Text(""), "prompt")])
def test_an_empty_prompt_is_named_by_its_kind_whatever_the_route(
    prompt: Prompt, param: str
) -> None:
    request = Request("/v1/toy", "mini", (prompt,), Sampling())
    with pytest.raises(RequestError) as refused:
        asyncio.run(admit(NoTokens(), FakeModel(), request, b""))  # type: ignore[arg-type]
    assert (refused.value.code, refused.value.param) == ("empty_prompt", param)
