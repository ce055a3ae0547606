import inspect
from types import SimpleNamespace
from typing import Any

import torch

from headrace.runner.lanes.foreign import Signature, tensor_bytes

OFFERED = {"input_ids": 1, "position_ids": 2}


def test_only_accepted_arguments_are_passed() -> None:
    def forward(input_ids: int, use_cache: bool = True) -> None: ...

    assert Signature.of(forward).accepted(OFFERED) == {"input_ids": 1}


def test_a_function_that_takes_any_keyword_gets_everything() -> None:
    def forward(input_ids: int, **others: Any) -> None: ...

    assert Signature.of(forward).accepted(OFFERED) == OFFERED


def test_a_signature_that_cannot_be_read_gets_everything(monkeypatch: Any) -> None:
    def unreadable(_: Any) -> None:
        raise ValueError

    monkeypatch.setattr(inspect, "signature", unreadable)
    assert Signature.of(print).accepted(OFFERED) == OFFERED


def test_tensors_are_counted_once_wherever_they_hang() -> None:
    x = torch.zeros(10)
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=x, values=x[:2]), {"state": (x,)}])
    cache.itself = cache
    assert tensor_bytes(cache) == 40 + 8
