"""Runs an encoder layer of transformers for some rows at a time, with the layer's own code.

Each token's row attends to all rows, so a layer takes two passes. The first pass computes and
stores queries, keys and values. The second pass computes everything else, including attention to
all stored keys. Both passes call the layer with some rows only; an attention function of this
module stores the keys, or uses the stored keys.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace_common.errors import ModelError

_NAME = "headrace_encoder_rows"


@dataclass(slots=True)
class EncoderState:
    """Holds an encoder's data between two units, the parts into which its run is divided."""

    hidden: Tensor  # [1, tokens, hidden]
    # The positional arguments of a layer after the hidden states.
    arguments: list[Any]
    keywords: dict[str, Any]
    # Queries, keys and values of the current layer, each [1, heads, tokens, head size].
    projected: tuple[Tensor, ...] = ()
    # T5's position bias by distance, from 1 - tokens to tokens - 1: [1, heads, 1, 2·tokens - 1].
    bias: Tensor | None = None
    # The outputs of the current decoder layer's projections, each [1, tokens, heads·head size].
    crossing: list[Tensor] = field(default_factory=list)

    def set_hidden(self, hidden: Tensor) -> None:
        """Replace the hidden states by the output of a whole layer."""
        self.hidden = hidden


class _Projected(Exception):
    """Raised to leave a layer once its queries, keys and values are stored."""


@dataclass(slots=True)
class _Pass:
    """One call of a layer for the rows [start, end)."""

    state: EncoderState
    start: int
    end: int
    is_first: bool
    attention: str  # the name of the model's own attention function

    def attend(
        self, module: nn.Module, projected: tuple[Tensor, ...], mask: Tensor | None, options: Any
    ) -> Any:
        state, rows = self.state, slice(self.start, self.end)
        num_tokens = state.hidden.shape[1]
        if self.is_first:
            if not self.start:
                state.projected = tuple(
                    each.new_empty(1, each.shape[1], num_tokens, each.shape[3])
                    for each in projected
                )
            for stored, each in zip(state.projected, projected, strict=True):
                stored[:, :, rows] = each
            raise _Projected
        if mask is not None and mask.shape[-2] == num_tokens:
            mask = mask[..., rows, :]
        if options.get("position_bias") is not None:
            options = options | {"position_bias": self._bias(module)}
        queries, keys, values = state.projected
        own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        attention: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(self.attention, own)
        return attention(module, queries[:, :, rows], keys, values, mask, **options)

    def _bias(self, module: Any) -> Tensor:
        """Return T5's position bias [1, heads, rows, tokens], which depends on distances only.

        Only some layers have a table of biases; the layers that follow use the same biases.
        """
        num_tokens = self.state.hidden.shape[1]
        if getattr(module, "has_relative_attention_bias", False) and not self.start:
            before = module.compute_bias(1, num_tokens, past_seen_tokens=num_tokens - 1)
            after = module.compute_bias(1, num_tokens)
            self.state.bias = torch.cat([before, after[..., 1:]], dim=-1)
        assert self.state.bias is not None, "the first layer has no position bias"
        # Window w has the biases of row (tokens - 1 - w).
        windows = self.state.bias[:, :, 0].unfold(-1, num_tokens, 1)
        return windows[:, :, num_tokens - self.end : num_tokens - self.start].flip(-2)


_running: ContextVar[_Pass | None] = ContextVar("_running", default=None)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Any:
    """Replace the attention function of a model while a layer runs for some rows."""
    running = _running.get()
    assert running is not None, "only EncoderRows calls layers with this function"
    return running.attend(module, (query, key, value), attention_mask, options)


AttentionInterface.register(_NAME, _attend)


class EncoderRows:
    """The layers of an encoder, computed for some rows at a time."""

    def __init__(self, encoder: Any, layers: nn.ModuleList, norm: nn.Module | None) -> None:
        self._config, self._layers, self._norm = encoder.config, layers, norm

    def project(self, state: EncoderState, number: int, start: int, end: int) -> None:
        """Store the queries, keys and values of rows [start, end) for layer `number`.

        Raises ModelError if the layer computes its attention without transformers' functions.
        """
        try:
            self._call(state, number, start, end, is_first=True)
        except _Projected:
            return
        raise ModelError("A layer of the encoder does not call transformers' attention functions.")

    def attend(self, state: EncoderState, number: int, start: int, end: int) -> None:
        """Compute the output of layer `number` for rows [start, end), in place."""
        rows = self._call(state, number, start, end, is_first=False)
        if self._norm is not None and number == len(self._layers) - 1:
            rows = self._norm(rows)
        state.hidden[:, start:end] = rows

    def spare_projections(self, state: EncoderState) -> None:
        """Install hooks so that second passes skip the projections, which are already stored."""
        for number, layer in enumerate(self._layers):
            with record_linears(layer) as calls:
                self.project(state, number, 0, 1)
            for linear, _, _ in calls:
                linear.register_forward_pre_hook(_drop_rows)
                linear.register_forward_hook(_restore_rows)

    def _call(self, state: EncoderState, number: int, start: int, end: int, is_first: bool) -> Any:
        attention = self._config._attn_implementation
        token = _running.set(_Pass(state, start, end, is_first, attention))
        self._config._attn_implementation = _NAME
        try:
            rows = state.hidden[:, start:end]
            output = self._layers[number](rows, *state.arguments, **state.keywords)
        finally:
            self._config._attn_implementation = attention
            _running.reset(token)
        return output[0] if isinstance(output, tuple) else output


def _drop_rows(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    running = _running.get()
    return None if running is None or running.is_first else (arguments[0][:, :0],)


def _restore_rows(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
    running = _running.get()
    if running is None or running.is_first:
        return None
    return output.new_empty(1, running.end - running.start, output.shape[-1])


@contextlib.contextmanager
def record_linears(module: nn.Module) -> Iterator[list[tuple[nn.Linear, Tensor, Tensor]]]:
    """Collect the linear modules that are called, with input and output."""
    calls: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def note(linear: Any, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((linear, arguments[0], output))

    hooks = [
        linear.register_forward_hook(note)
        for linear in module.modules()
        if isinstance(linear, nn.Linear)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(slots=True, frozen=True)
class CrossLayer:
    """The projections of a decoder layer that compute the source's keys and values."""

    linears: tuple[nn.Linear, nn.Linear]
    num_heads: int

    @classmethod
    def find(
        cls, calls: Sequence[tuple[nn.Linear, Tensor, Tensor]], keys: Tensor, values: Tensor
    ) -> "CrossLayer":
        """Find the projections among recorded calls by their outputs; raise LookupError if none."""
        found = []
        for wanted in (keys, values):
            flat = wanted.transpose(1, 2).flatten(2)
            linear = next((linear for linear, _, output in calls if _equal(output, flat)), None)
            if linear is None:
                raise LookupError("the cache does not contain the outputs of linear modules")
            found.append(linear)
        return cls((found[0], found[1]), keys.shape[1])

    def project(self, state: EncoderState, start: int, end: int) -> tuple[Tensor, Tensor] | None:
        """Compute rows [start, end); after the last row, return all keys and values.

        Keys and values have the shape [1, heads, tokens, head size].
        """
        rows, num_tokens = state.hidden[:, start:end], state.hidden.shape[1]
        outputs = [linear(rows) for linear in self.linears]
        if not start:
            state.crossing = [each.new_empty(1, num_tokens, each.shape[-1]) for each in outputs]
        for stored, each in zip(state.crossing, outputs, strict=True):
            stored[:, start:end] = each
        if end < num_tokens:
            return None
        keys, values = (
            each.view(1, num_tokens, self.num_heads, -1).transpose(1, 2) for each in state.crossing
        )
        return keys, values


def _equal(output: Tensor, wanted: Tensor) -> bool:
    return output.shape == wanted.shape and torch.equal(output, wanted)
