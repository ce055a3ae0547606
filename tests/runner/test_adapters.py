"""The slots of adapters, over a lane that computes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headrace_common.adapter import Adapter
from headrace_engine.models.step import Step
from headrace_engine.runner.adapters import Adapters, ReadAdapter, Site
from headrace_kernels import LowRankLayer, LowRankPart

LAYERS = ("first", "last")


class Lane:
    """A model with two linear layers."""

    device, dtype, has_kernels = torch.device("cpu"), torch.float32, False

    def sites(self) -> dict[str, Site]:
        return {name: Site(nn.Linear(2, 2), 2, {name: (0, 2)}) for name in LAYERS}

    def adapted(self, adapt: Callable[[Step], Step]) -> "Lane":
        return self


def read(name: str, *layers: str) -> ReadAdapter:
    part = LowRankPart(0, torch.ones(1, 2), torch.ones(2, 1))
    return ReadAdapter(Adapter(name, "", name), {layer: [part] for layer in layers}, 0)


def changed(adapters: Adapters, name: str) -> list[str]:
    """Return the layers that an adapter changes."""
    slot = adapters._slots[name]
    return [layer for layer in LAYERS if list(adapters._layers[layer].parts(slot))]


def test_an_adapter_for_which_memory_was_short_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapters = Adapters(Lane())  # type: ignore[arg-type]
    put = LowRankLayer.put

    def fail(layer: LowRankLayer, *given: Any) -> None:
        if layer is adapters._layers["last"]:
            raise MemoryError
        put(layer, *given)

    with monkeypatch.context() as patched:
        patched.setattr(LowRankLayer, "put", fail)
        with pytest.raises(MemoryError):
            adapters.put(read("large", *LAYERS))
    assert not adapters._layers["first"]._held
    adapters.put(read("small", "last"))
    adapters.put(read("large", *LAYERS))
    assert changed(adapters, "small") == ["last"]
    assert changed(adapters, "large") == [*LAYERS]
