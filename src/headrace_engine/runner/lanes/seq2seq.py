"""Encoder-decoder models of transformers: a source is encoded once, its answer lives in a slot.

Of T5's and BART's families the encoder is walked layer by layer, so a source can be encoded in
pieces; of others, and where the walk gives another result, it is one piece.
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
    EncodeWork,
    SlotCopy,
    SourceSpec,
)
from headrace_engine.runner.lanes.foreign import (
    TOLERANCE,
    Signature,
    SlotLane,
    Weights,
    load_pretrained,
    tensor_bytes,
    until_called,
)
from headrace_engine.runner.lanes.lane import LaneOptions, LaneTraits

_PROBE = 48  # tokens of a source, on which the walk and the cuts are tried
_NORMS = ("final_layer_norm", "layer_norm")


@dataclass(slots=True)
class _Walk:
    """An encoder between two layers."""

    hidden: Tensor  # [1, tokens, hidden]
    arguments: list[Any]  # of a layer, after the hidden states
    keywords: dict[str, Any]


class _Encoder:
    """Transformers' encoder, called in parts that do what its own forward does."""

    def __init__(self, encoder: nn.Module) -> None:
        self._encoder = encoder
        lists = [child for child in encoder.children() if isinstance(child, nn.ModuleList)]
        self.layers = lists[0] if len(lists) == 1 else nn.ModuleList()

    def whole(self, ids: Tensor) -> Tensor:
        """[1, tokens, hidden]."""
        hidden: Tensor = self._encoder(input_ids=ids, return_dict=True).last_hidden_state
        return hidden

    def begin(self, ids: Tensor) -> _Walk:
        """Everything before the first layer, by the encoder's own forward."""
        (hidden, *arguments), keywords = until_called(self.layers[0], lambda: self.whole(ids))
        return _Walk(hidden, arguments, keywords)

    def advance(self, walk: _Walk, start: int, end: int) -> None:
        """Layers [start, end)."""
        for layer in self.layers[start:end]:
            output = layer(walk.hidden, *walk.arguments, **walk.keywords)
            if isinstance(output, tuple):
                output, *further = output
                if len(walk.arguments) > 1 and further:
                    walk.arguments[1] = further[0]  # T5's position bias, made by the first layer
            walk.hidden = output

    def end(self, walk: _Walk) -> Tensor:
        for name in _NORMS:
            if (norm := getattr(self._encoder, name, None)) is not None:
                normed: Tensor = norm(walk.hidden)
                return normed
        return walk.hidden


@dataclass(slots=True)
class _Slot:
    """A source on its way through the encoder, then the caches of its answer."""

    num_source: int
    walk: _Walk | None = None
    cache: Any = field(default=None)


class Seq2SeqSource(SlotLane):
    traits = LaneTraits("generic-seq2seq-source")

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, _: LaneOptions
    ) -> None:
        model = load_pretrained(AutoModelForSeq2SeqLM, spec, dtype).to(device).eval()
        self._model, self.device, self.dtype = model, device, dtype
        if model.main_input_name != "input_ids":
            raise ModelError(f"{spec.architecture} reads {model.main_input_name}, and not text.")
        self._signature = Signature.of(model.forward)
        self._encoder = _Encoder(model.get_encoder())
        self._slots: dict[SlotId, _Slot] = {}
        self.num_parameters, self.weight_bytes = Weights.of(model)
        self._start_ids = _start_ids(model)
        can_be_cut = self._can_be_walked()
        num_units = len(self._encoder.layers) + 1 if can_be_cut else 1
        self._source = SourceSpec(self._start_ids, num_units, can_be_cut)
        encoder = "pieces" if can_be_cut else "whole"
        facts = LaneFacts("slot", "bidirectional", encoder=encoder)
        self.traits = self.traits.but(source=self._source, facts=facts)

    def open(self, layout: MemoryLayout) -> None:
        self._slots.clear()

    def encode(self, chunk: EncodeChunk, work: EncodeWork) -> bool:
        """The last unit makes the keys and values of cross-attention, and ends the encoder."""
        source = array("i", work.data)
        if chunk.start == 0:
            self._slots[chunk.slot_id] = _Slot(len(source))
        slot, num_layers = self._slots[chunk.slot_id], self._source.num_units - 1
        if not self._source.can_be_cut:
            hidden = self._encoder.whole(self._ids(source))
        else:
            slot.walk = slot.walk or self._encoder.begin(self._ids(source))
            self._encoder.advance(slot.walk, chunk.start, min(chunk.end, num_layers))
            if chunk.end <= num_layers:
                return True
            hidden = self._encoder.end(slot.walk)
        slot.walk = None
        slot.cache = self._cross_attention(hidden)
        return True

    def _cross_attention(self, hidden: Tensor) -> Any:
        """A cache with the source's part alone: the token that was needed for it is dropped."""
        cache = self._new_cache(DynamicCache())
        self._decode(cache, array("i", [self._start_ids[0]]), 1, BaseModelOutput(hidden))
        return self._new_cache(cache.cross_attention_cache)

    def _new_cache(self, cross: Any) -> Any:
        return EncoderDecoderCache(DynamicCache(config=self._model.config.get_text_config()), cross)

    def _run(self, chunk: Chunk, token_ids: "array[int]") -> Tensor:
        slot = self._slots[chunk.slot_id]
        width = self._model.config.get_text_config().hidden_size
        # the source is in the cache: only its length is read of these
        stand_in = torch.zeros(1, dtype=self.dtype, device=self.device).expand(
            1, slot.num_source, width
        )
        return self._decode(slot.cache, token_ids, chunk.num_rows, BaseModelOutput(stand_in))

    def _decode(
        self, cache: Any, ids: "array[int]", num_rows: int, encoded: BaseModelOutput
    ) -> Tensor:
        """Logits [num_rows, vocab] of the last of these tokens; the cache grows by all."""
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
        """The source's part is never written again, and shared."""
        for copy in slots:
            source = self._slots[copy.source]
            cache = self._new_cache(source.cache.cross_attention_cache)
            cache.self_attention_cache = copies.deepcopy(source.cache.self_attention_cache)
            self._slots[copy.target] = _Slot(source.num_source, cache=cache)

    def _ids(self, ids: "array[int]") -> Tensor:
        return torch.tensor([ids.tolist()], device=self.device)

    def _probe(self) -> "array[int]":
        """Tokens to try the model on, of however few it knows."""
        config = self._model.config
        known = min(config.vocab_size, getattr(config, "decoder_vocab_size", None) or 1 << 30)
        return array("i", (number % known for number in range(_PROBE)))

    @torch.inference_mode()
    def _can_be_walked(self) -> bool:
        """Whether layer by layer gives what the encoder's own forward gives."""
        if not self._encoder.layers:
            return False
        ids = self._ids(self._probe())
        expected = self._encoder.whole(ids)
        try:
            walk = self._encoder.begin(ids)
            for number in range(len(self._encoder.layers)):
                self._encoder.advance(walk, number, number + 1)
            got = self._encoder.end(walk)
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
            return False
        error = (got - expected).abs().max()
        return bool(error <= TOLERANCE[self.dtype] * expected.abs().max())

    @torch.inference_mode()
    def _measure(self) -> int:
        """Bytes per position of the longest source together with the longest answer."""
        ids = self._probe()
        cache = self._cross_attention(self._encoder.whole(self._ids(ids)))
        stand_in = torch.zeros(1, _PROBE, self._model.config.get_text_config().hidden_size)
        stand_in = stand_in.to(self.device, self.dtype)
        self._decode(cache, ids, 1, BaseModelOutput(stand_in))
        return max(1, -(-tensor_bytes(cache) // _PROBE))


def _start_ids(model: Any) -> tuple[int, ...]:
    """The token that every answer starts with, and the one that is forced after it."""
    found = []
    for name in ("decoder_start_token_id", "forced_bos_token_id"):
        for config in (model.generation_config, model.config):
            token_id = getattr(config, name, None)
            if token_id is not None:
                found.append(int(token_id))
                break
        if not found:
            raise ModelError("The model does not say with which token its answers start.")
    return tuple(found)
