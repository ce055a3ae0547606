"""Runs encoder-decoder models of transformers: encodes a source once, then decodes from a slot.

In families like T5 and BART, the encoder runs layer by layer, so that a source can be encoded
over several steps. An encoder runs whole if it cannot run layer by layer with the same result.
"""

import copy as copies
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_common.ids import SlotId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import LaneFacts
from headrace_common.plan import (
    BlockCopy,
    Chunk,
    EncodeChunk,
    EncoderInput,
    SlotCopy,
    SourceSpec,
)
from headrace_engine.runner.lanes.foreign import (
    TOLERANCE,
    Signature,
    SlotLane,
    Weights,
    capture_first_call,
    load_pretrained,
    tensor_bytes,
)
from headrace_engine.runner.lanes.lane import LaneOptions, LaneTraits

# The number of source tokens in the test of layer-by-layer encoding.
_PROBE = 48
_NORMS = ("final_layer_norm", "layer_norm")


@dataclass(slots=True)
class _EncoderState:
    """The state of an encoder between two layers."""

    hidden: Tensor  # [1, tokens, hidden]
    # The positional arguments of a layer after the hidden states.
    arguments: list[Any]
    keywords: dict[str, Any]


class _Encoder:
    """An encoder of transformers that can run layer by layer."""

    def __init__(self, encoder: nn.Module) -> None:
        self._encoder = encoder
        lists = [child for child in encoder.children() if isinstance(child, nn.ModuleList)]
        self.layers = lists[0] if len(lists) == 1 else nn.ModuleList()

    def whole(self, ids: Tensor) -> Tensor:
        """Return [1, tokens, hidden] from the encoder's own forward."""
        hidden: Tensor = self._encoder(input_ids=ids, return_dict=True).last_hidden_state
        return hidden

    def begin(self, ids: Tensor) -> _EncoderState:
        """Compute everything before the first layer with the encoder's own forward."""
        (hidden, *arguments), keywords = capture_first_call(self.layers[0], lambda: self.whole(ids))
        return _EncoderState(hidden, arguments, keywords)

    def advance(self, state: _EncoderState, start: int, end: int) -> None:
        """Run the layers [start, end)."""
        for layer in self.layers[start:end]:
            output = layer(state.hidden, *state.arguments, **state.keywords)
            if isinstance(output, tuple):
                output, *further = output
                if len(state.arguments) > 1 and further:
                    # T5's first layer computes the position bias that the other layers use.
                    state.arguments[1] = further[0]
            state.hidden = output

    def end(self, state: _EncoderState) -> Tensor:
        for name in _NORMS:
            if (norm := getattr(self._encoder, name, None)) is not None:
                normed: Tensor = norm(state.hidden)
                return normed
        return state.hidden


@dataclass(slots=True)
class _Slot:
    """The state of the encoder while it runs, and later the caches of the answer."""

    num_source: int
    state: _EncoderState | None = None
    cache: Any = field(default=None)


class Seq2SeqSource(SlotLane):
    traits = LaneTraits("generic-seq2seq-source")

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, _: LaneOptions
    ) -> None:
        model = load_pretrained(AutoModelForSeq2SeqLM, spec, dtype).to(device).eval()
        self._model, self.device, self.dtype = model, device, dtype
        if model.main_input_name != "input_ids":
            raise ModelError(f"{spec.architecture} reads {model.main_input_name}, not text.")
        self._signature = Signature.of(model.forward)
        self._encoder = _Encoder(model.get_encoder())
        self._slots: dict[SlotId, _Slot] = {}
        self.num_parameters, self.weight_bytes = Weights.of(model)
        self._start_ids = _start_ids(model)
        can_be_cut = self._can_run_by_layer()
        num_units = len(self._encoder.layers) + 1 if can_be_cut else 1
        self._source = SourceSpec(self._start_ids, num_units, can_be_cut)
        encoder = "pieces" if can_be_cut else "whole"
        facts = LaneFacts("slot", "bidirectional", encoder=encoder)
        self.traits = self.traits.with_changes(source=self._source, facts=facts)

    def open(self, layout: MemoryLayout) -> None:
        self._slots.clear()

    def encode(self, chunk: EncodeChunk, work: EncoderInput) -> bool:
        """Run some layers of the encoder; the last unit computes the cross-attention cache."""
        source = array("i", work.data)
        if chunk.start == 0:
            self._slots[chunk.slot_id] = _Slot(len(source))
        slot, num_layers = self._slots[chunk.slot_id], self._source.num_units - 1
        if not self._source.can_be_cut:
            hidden = self._encoder.whole(self._ids(source))
        else:
            slot.state = slot.state or self._encoder.begin(self._ids(source))
            self._encoder.advance(slot.state, chunk.start, min(chunk.end, num_layers))
            if chunk.end <= num_layers:
                return True
            hidden = self._encoder.end(slot.state)
        slot.state = None
        slot.cache = self._cross_attention(hidden)
        return True

    def _cross_attention(self, hidden: Tensor) -> Any:
        """Return a cache that has the keys and values of the source for cross-attention.

        Decoding one token fills this cache; the cache of the token itself is dropped.
        """
        cache = self._new_cache(DynamicCache())
        self._decode(cache, array("i", [self._start_ids[0]]), 1, BaseModelOutput(hidden))
        return self._new_cache(cache.cross_attention_cache)

    def _new_cache(self, cross: Any) -> Any:
        return EncoderDecoderCache(DynamicCache(config=self._model.config.get_text_config()), cross)

    def _run(self, chunk: Chunk, token_ids: "array[int]") -> Tensor:
        slot = self._slots[chunk.slot_id]
        width = self._model.config.get_text_config().hidden_size
        # The keys and values of the source are cached, so the model only reads the length of
        # these hidden states.
        stand_in = torch.zeros(1, dtype=self.dtype, device=self.device).expand(
            1, slot.num_source, width
        )
        return self._decode(slot.cache, token_ids, chunk.num_rows, BaseModelOutput(stand_in))

    def _decode(
        self, cache: Any, ids: "array[int]", num_rows: int, encoded: BaseModelOutput
    ) -> Tensor:
        """Append the tokens to the cache; return logits [num_rows, vocab] of the last tokens."""
        offered = {
            "decoder_input_ids": self._ids(ids),
            "encoder_outputs": encoded,
            "past_key_values": cache,
            "use_cache": True,
            "return_dict": True,
        }
        logits: Tensor = self._model(**self._signature.accepted(offered)).logits
        return logits[0, logits.shape[1] - num_rows :]

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None:
        """Copy a slot; the cross-attention cache is shared because it never changes."""
        for copy in slots:
            source = self._slots[copy.source]
            cache = self._new_cache(source.cache.cross_attention_cache)
            cache.self_attention_cache = copies.deepcopy(source.cache.self_attention_cache)
            self._slots[copy.target] = _Slot(source.num_source, cache=cache)

    def _ids(self, ids: "array[int]") -> Tensor:
        return torch.tensor([ids.tolist()], device=self.device)

    def _probe(self) -> "array[int]":
        """Return a source for probing the model, made of valid token ids."""
        config = self._model.config
        known = min(config.vocab_size, getattr(config, "decoder_vocab_size", None) or 1 << 30)
        return array("i", (number % known for number in range(_PROBE)))

    @torch.inference_mode()
    def _can_run_by_layer(self) -> bool:
        """Return whether the encoder gives the same result when it runs layer by layer."""
        if not self._encoder.layers:
            return False
        ids = self._ids(self._probe())
        expected = self._encoder.whole(ids)
        try:
            state = self._encoder.begin(ids)
            for number in range(len(self._encoder.layers)):
                self._encoder.advance(state, number, number + 1)
            got = self._encoder.end(state)
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
            return False
        error = (got - expected).abs().max()
        return bool(error <= TOLERANCE[self.dtype] * expected.abs().max())

    @torch.inference_mode()
    def _measure(self) -> int:
        """Return the bytes that one source token and one answer token take together."""
        ids = self._probe()
        cache = self._cross_attention(self._encoder.whole(self._ids(ids)))
        stand_in = torch.zeros(1, _PROBE, self._model.config.get_text_config().hidden_size)
        stand_in = stand_in.to(self.device, self.dtype)
        self._decode(cache, ids, 1, BaseModelOutput(stand_in))
        return max(1, -(-tensor_bytes(cache) // _PROBE))


def _start_ids(model: Any) -> tuple[int, ...]:
    """Return the first token of every answer, and the forced second token if there is one."""
    found = []
    for name in ("decoder_start_token_id", "forced_bos_token_id"):
        for config in (model.generation_config, model.config):
            token_id = getattr(config, name, None)
            if token_id is not None:
                found.append(int(token_id))
                break
        if not found:
            raise ModelError("The model's config does not name the token that starts an answer.")
    return tuple(found)
