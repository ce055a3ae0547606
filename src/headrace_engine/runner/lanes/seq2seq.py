"""Runs encoder-decoder models of transformers: encodes a source once, then decodes from a slot.

In families like T5 and BART, a step can encode some rows of one layer, so that a source can be
encoded over many short steps. An encoder runs layer by layer, or whole, if a test at the
start finds that smaller pieces change the result.
"""

import copy as copies
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    ATTEND,
    EMBED,
    LAYER,
    PROJECT,
    UNIT_ROWS,
    BlockCopy,
    Chunk,
    EncodeChunk,
    EncoderInput,
    EncoderPiece,
    SlotCopy,
    SourceSpec,
)
from headrace_engine.runner.lanes.encoder_rows import (
    CrossLayer,
    EncoderRows,
    EncoderState,
    record_linears,
)
from headrace_engine.runner.lanes.foreign import (
    FOREIGN_ERRORS,
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


class _Encoder:
    """An encoder of transformers that can run layer by layer, and perhaps some rows at a time."""

    def __init__(self, encoder: nn.Module) -> None:
        self._encoder = encoder
        lists = [child for child in encoder.children() if isinstance(child, nn.ModuleList)]
        self.layers = lists[0] if len(lists) == 1 else nn.ModuleList()
        found = (getattr(encoder, name, None) for name in _NORMS)
        self._norm: nn.Module | None = next((norm for norm in found if norm is not None), None)
        self.rows = EncoderRows(encoder, self.layers, self._norm)

    def whole(self, ids: Tensor) -> Tensor:
        """Return [1, tokens, hidden] from the encoder's own forward."""
        hidden: Tensor = self._encoder(input_ids=ids, return_dict=True).last_hidden_state
        return hidden

    def begin(self, ids: Tensor) -> EncoderState:
        """Compute everything before the first layer with the encoder's own forward."""
        (hidden, *arguments), keywords = capture_first_call(self.layers[0], lambda: self.whole(ids))
        return EncoderState(hidden, arguments, keywords)

    def advance(self, state: EncoderState, start: int, end: int) -> None:
        """Run the layers [start, end); the last layer includes the norm after it."""
        for number in range(start, end):
            output = self.layers[number](state.hidden, *state.arguments, **state.keywords)
            if isinstance(output, tuple):
                output, *further = output
                if len(state.arguments) > 1 and further:
                    # T5's first layer computes the position bias that the other layers use.
                    state.arguments[1] = further[0]
            state.set_hidden(output)
        if self._norm is not None and end == len(self.layers):
            state.set_hidden(self._norm(state.hidden))


@dataclass(slots=True)
class _Slot:
    """The state of the encoder while it runs, and later the caches of the answer."""

    num_source: int
    state: EncoderState | None = None
    cache: Any = None


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
        num_layers = len(self._encoder.layers) if self._can_run(self._by_layer) else 0
        self._cross: tuple[CrossLayer, ...] = ()
        if num_layers and self._can_run(self._by_rows):
            self._cross = self._cross_layers()
        self._source = SourceSpec(self._start_ids, num_layers, len(self._cross))
        encoder = "pieces" if num_layers else "whole"
        facts = LaneFacts("slot", "bidirectional", encoder=encoder)
        self.traits = self.traits.with_changes(source=self._source, facts=facts)

    def open(self, layout: MemoryLayout) -> None:
        self._slots.clear()

    def encode(self, chunk: EncodeChunk, work: EncoderInput) -> bool:
        """Run some units of the encoder; the last units compute the cross-attention cache."""
        if chunk.start == 0:
            self._slots[chunk.slot_id] = _Slot(work.size)
        slot = self._slots[chunk.slot_id]
        if not self._source.can_be_cut:
            hidden = self._encoder.whole(self._ids(array("i", work.data)))
            slot.cache = self._cross_attention(hidden)
            return True
        for piece in work.pieces(chunk.start, chunk.end):
            self._run_piece(slot, work, piece)
        if chunk.end == work.num_units:
            slot.state = None
        return True

    def _run_piece(self, slot: _Slot, work: EncoderInput, piece: EncoderPiece) -> None:
        kind, start, end = piece.stage.kind, piece.start - piece.first, piece.end - piece.first
        if kind == EMBED:
            slot.state = self._encoder.begin(self._ids(array("i", work.data)))
            slot.cache = self._new_cache(DynamicCache())
            return
        state = slot.state
        assert state is not None, "an encoding starts with its first unit"
        rows = start * piece.stage.num_rows, min(end * piece.stage.num_rows, work.size)
        if kind == LAYER:
            self._encoder.advance(state, start, end)
        elif kind == PROJECT:
            self._encoder.rows.project(state, (piece.number - 1) // 2, *rows)
        elif kind == ATTEND:
            self._encoder.rows.attend(state, (piece.number - 1) // 2, *rows)
        elif not self._cross:
            slot.cache = self._cross_attention(state.hidden)
        else:
            number = piece.number - 1 - 2 * self._source.num_layers
            if (found := self._cross[number].project(state, *rows)) is not None:
                cross = slot.cache.cross_attention_cache
                cross.update(*found, number)
                slot.cache = self._new_cache(cross)

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
    def _can_run(self, by_pieces: Callable[[Tensor], Tensor]) -> bool:
        """Return whether the encoder gives the same result when it runs in pieces."""
        if not self._encoder.layers:
            return False
        ids = self._ids(self._probe())
        expected = self._encoder.whole(ids)
        try:
            got = by_pieces(ids)
        except (*FOREIGN_ERRORS, AssertionError, ModelError, RuntimeError):
            return False
        error = (got - expected).abs().max()
        return bool(error <= TOLERANCE[self.dtype] * expected.abs().max())

    def _by_layer(self, ids: Tensor) -> Tensor:
        state = self._encoder.begin(ids)
        for number in range(len(self._encoder.layers)):
            self._encoder.advance(state, number, number + 1)
        return state.hidden

    def _by_rows(self, ids: Tensor) -> Tensor:
        rows = self._encoder.rows
        rows.spare_projections(self._encoder.begin(ids))
        state = self._encoder.begin(ids)
        for number in range(len(self._encoder.layers)):
            for run in (rows.project, rows.attend):
                for start in range(0, ids.shape[1], UNIT_ROWS):
                    run(state, number, start, min(start + UNIT_ROWS, ids.shape[1]))
        return state.hidden

    @torch.inference_mode()
    def _cross_layers(self) -> tuple[CrossLayer, ...]:
        """Return the decoder's projections of the source; () if they cannot be found."""
        hidden = self._encoder.whole(self._ids(self._probe()))
        with record_linears(self._model) as calls:
            cache = self._cross_attention(hidden).cross_attention_cache
        try:
            return tuple(CrossLayer.find(calls, it.keys, it.values) for it in cache.layers)
        except LookupError:
            return ()

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
