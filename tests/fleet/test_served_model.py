import asyncio
from typing import Any

import msgspec
import pytest

from headrace.fleet.served_model import ServedModel
from headrace.generation.model_checks import admit
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import RequestError
from headrace_common.request import Chat, Prompt, Request, Text
from headrace_common.sampling import Sampling
from headrace_common.worker_jobs import Encoded
from tests.gateway.builders import READY, FakeModel


class NoTokens:
    """Fake workers that encode every prompt to no tokens."""

    async def do(self, *job: Any) -> Encoded:
        return Encoded((b"",), "one-shot")


@pytest.mark.parametrize(("prompt", "param"), [(Chat(()), "messages"), (Text(""), "prompt")])
def test_an_empty_prompt_is_reported_by_the_field_of_its_kind(prompt: Prompt, param: str) -> None:
    request = Request("/v1/toy", "mini", (prompt,), Sampling())
    with pytest.raises(RequestError) as refused:
        asyncio.run(admit(NoTokens(), FakeModel(), request, b""))  # type: ignore[arg-type]
    assert (refused.value.code, refused.value.param) == ("empty_prompt", param)


OWN = "headrace-mini takes at most 4,096 tokens; --max-model-len 131072 has no effect"
MEMORY = (
    "headrace-mini has memory for 3,072 tokens, but --max-model-len is 4096; "
    "raise --kv-cache-memory-bytes"
)


@pytest.mark.parametrize(
    ("asked", "longest", "notes"),
    [
        (None, 4096, []),
        (2048, 2048, []),
        (4096, 4096, []),
        (131072, 4096, [OWN]),
        (4096, 3072, [MEMORY]),
    ],
)
def test_a_context_shorter_than_configured_is_reported(
    asked: int | None, longest: int, notes: list[str]
) -> None:
    model = ServedModel(ModelConfig(model="headrace-mini", max_model_len=asked))
    model.came_up(msgspec.structs.replace(READY, max_model_len=longest))
    assert model.load_notes == notes
