"""Runs models of transformers over KV blocks, with all chunks of a step in one packed forward.

The layers of a model call an attention function that is registered with transformers. Two checks
during loading test the registered function. Headrace must support every argument that the layers
pass to the function. The logits must equal the logits with the model's own attention.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace_common.cache import LayerCache, ModelCache, bytes_per_position
from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import InstructionSet, LaneFacts
from headrace_common.plan import BlockCopy, Chunk
from headrace_engine.models.step import Step
from headrace_engine.runner.attention import Attention, NaiveAttention
from headrace_engine.runner.batched_attention import plain_attention
from headrace_engine.runner.inputs import pack
from headrace_engine.runner.lanes.foreign import FOREIGN_ERRORS, TOLERANCE, Signature
from headrace_engine.runner.storage import CacheStorage
from headrace_kernels import CpuAttention

_PACKED, _RECORDING = "headrace_packed", "headrace_recording"
"""Names of two attention functions: one runs steps, the other records how layers attend."""

_PASSED = frozenset({"position_ids", "use_cache", "logits_to_keep", "return_dict"})
"""Arguments of the forward that a model may pass on to its attention."""
_KNOWN = _PASSED | {"scaling", "sliding_window", "softcap", "s_aux"}
_NEUTRAL = {"dropout": 0.0, "is_causal": True}
_SHIFTING_ROPE = ("dynamic", "longrope")
_PROBE_LENGTHS = (40, 23)
_PROBE_STEPS = (
    ((0, 7), (0, 16)),
    ((7, 30), (16, 1)),
    ((37, 1), (17, 1)),
    ((38, 1), (18, 5)),
    ((39, 1),),
)
"""The chunks of each probe step, as (start, length): one chunk per probe sequence.

The second sequence is shorter, so the last step has only a chunk of the first sequence.
"""
_PROBE_BLOCK = 16
_UNKNOWN = -1
# The maximum number of positions of a mask that are examined.
_FARTHEST = 1 << 20


class BlocksUnsupported(Exception):
    """Raised if a model cannot run over KV blocks.

    The message is a clause that follows the model's name, such as "builds its own attention masks".
    """


class _Layer(NamedTuple):
    """How one layer attends."""

    number: int
    # Keys and values have the same size in the cache. If the sizes differ in the layer, the
    # smaller size is padded with zeros.
    cache: LayerCache
    # The size of the layer's values without padding.
    value_dim: int
    # The factor that scores are multiplied by.
    scale: float
    # The soft cap of scores: scores become cap * tanh(score / cap).
    cap: float | None
    sinks: Tensor | None  # [heads]


class _MaskWindow(NamedTuple):
    """Replaces a layer's attention mask.

    `window` is the layer's window; 0 means that a token attends to all earlier positions.
    """

    window: int


class PackedAttention:
    """The attention that the layers of one model call instead of the model's own attention."""

    def __init__(self, model: nn.Module) -> None:
        # The layers by the id() of the attention module.
        self._layers: dict[int, _Layer] = {}
        self.storage: CacheStorage
        self._attention: Attention
        self._step: Step
        for module in model.modules():
            _OWNERS[module] = self

    @property
    def cache(self) -> ModelCache:
        return tuple(layer.cache for layer in self._layers.values())

    @property
    def makes_masks(self) -> bool:
        """Return whether the attention builds a mask for each chunk."""
        return isinstance(self._attention, NaiveAttention)

    def open(
        self,
        layout: MemoryLayout,
        dtype: torch.dtype,
        device: torch.device,
        instructions: InstructionSet,
    ) -> None:
        """Allocate the cache of every layer."""
        self.storage = CacheStorage(self.cache, layout, dtype, device)
        layers = self._layers.values()
        sinks = [None if x.sinks is None else x.sinks.float().contiguous() for x in layers]
        if instructions == "plain":
            self._attention = plain_attention(self.storage, sinks)
        else:
            windows = [layer.cache.window for layer in layers]
            self._attention = CpuAttention(self.storage, windows, sinks, instructions)

    def begin(
        self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Start a step; return token ids, positions, and the indices of rows that need logits."""
        batch = pack(chunks, token_ids, self.storage.block_size, self.storage.device)
        self._step = self._attention.step(batch)
        return batch.token_ids, batch.positions, batch.rows

    def copy_block(self, source: int, target: int) -> None:
        self.storage.copy_block(source, target)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [1, tokens, heads, dim] for q, k and v [1, heads, tokens, dim]."""
        layer = self._layers[id(module)]
        dim, dtype, kind = layer.cache.key_dim, self.storage.keys[layer.number].dtype, q.dtype
        # `Step.attend` multiplies scores by dim ** -0.5, so q is multiplied by the missing factor.
        factor = layer.scale * dim**0.5
        if factor != 1:
            q = q * factor
        q, k, v = (_rows(x, dim).to(dtype) for x in (q, k, v))
        out = self._step.attend(layer.number, q, k, v, layer.cap)
        return out[None, ..., : layer.value_dim].to(kind)

    def record(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Record how a layer attends; return zeros of the right shape."""
        if id(module) in self._layers:
            raise BlocksUnsupported("has a layer that calls attention twice")
        if not isinstance(mask, _MaskWindow):
            raise BlocksUnsupported("builds its own attention masks")
        if mask.window == _UNKNOWN:
            raise BlocksUnsupported("has a mask that is neither causal nor a sliding window")
        _refuse_unknown(options)
        declared = options.get("sliding_window")
        if declared is not None and mask.window not in (0, declared):
            raise BlocksUnsupported(
                f"declares a window of {declared} tokens, but its mask has a window of "
                f"{mask.window} tokens"
            )
        scale, sinks = options.get("scaling"), options.get("s_aux")
        dim = max(k.shape[3], v.shape[3])
        self._layers[id(module)] = _Layer(
            number=len(self._layers),
            cache=LayerCache(k.shape[1], dim, dim, mask.window or None),
            value_dim=v.shape[3],
            scale=k.shape[3] ** -0.5 if scale is None else float(scale),
            cap=options.get("softcap"),
            sinks=None if sinks is None else sinks.detach().reshape(-1),
        )
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


_OWNERS: WeakKeyDictionary[nn.Module, PackedAttention] = WeakKeyDictionary()
"""The PackedAttention of each module. transformers passes only the module to the function."""


def _refuse_unknown(options: dict[str, Any]) -> None:
    for name, value in options.items():
        is_off = name.startswith("output_") and value is False
        is_neutral = name in _NEUTRAL and value == _NEUTRAL[name]
        if not (value is None or name in _KNOWN or is_neutral or is_off):
            raise BlocksUnsupported(f"passes the unsupported argument {name} to its attention")


def _rows(x: Tensor, dim: int) -> Tensor:
    """Return x [1, heads, tokens, dim or fewer] as [tokens, heads, dim], padded with zeros."""
    rows = x[0].transpose(0, 1)
    if rows.shape[2] < dim:
        rows = F.pad(rows, (0, dim - rows.shape[2]))
    # A tensor with one row counts as contiguous with any strides, but kernels use the strides. So
    # the strides are set explicitly.
    rows = rows.contiguous()
    return rows.as_strided(rows.shape, (rows.shape[1] * dim, dim, 1))


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    return _OWNERS[module].attend(module, query, key, value), None


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    return _OWNERS[module].record(module, query, key, value, mask, options), None


def _find_window(
    mask_function: Callable[..., Tensor],
    config: Any,
    device: torch.device | None = None,
    **_: Any,
) -> _MaskWindow:
    """Find the window of a layer from its mask function, without building the mask.

    transformers calls this function instead of its own mask builders. The function evaluates a
    few rows of the mask, including the first and the last row. If each row is a causal window of
    the same width, this width is the layer's window. Rows that reach back to position 0 do not
    show the width.
    """
    length = min(getattr(config, "max_position_embeddings", None) or 4096, _FARTHEST)
    # Some mask functions contain tensors on the model's device.
    positions = torch.arange(length, device=device)
    widths: set[int] = set()
    for position in sorted({length - 1, length // 2, length // 2 - 1, length // 3, 0}):
        seen = mask_function(0, 0, positions[position], positions).expand(length)
        width = int(seen.sum())
        if not torch.equal(seen, (positions <= position) & (positions > position - width)):
            return _MaskWindow(_UNKNOWN)
        # Only a row that does not reach back to the first position shows the width of the window.
        if width <= position:
            widths.add(width)
    if len(widths) > 1:
        return _MaskWindow(_UNKNOWN)
    return _MaskWindow(widths.pop() if widths else 0)


ALL_ATTENTION_FUNCTIONS.register(_PACKED, _attend)
ALL_ATTENTION_FUNCTIONS.register(_RECORDING, _record)
# Masks are needed only for recording; steps run without them.
ALL_MASK_ATTENTION_FUNCTIONS.register(_RECORDING, _find_window)


class BlockCaches:
    """Runs a model of transformers over KV blocks.

    The constructor raises BlocksUnsupported if the model cannot run over blocks. `choose` returns
    the instruction set of the attention kernels, and is called only if the model can use kernels.
    `reference` returns float32 logits for every token of a sequence, with the attention that is
    currently set.
    """

    def __init__(
        self,
        model: Any,
        signature: Signature,
        dtype: torch.dtype,
        device: torch.device,
        choose: Callable[[], InstructionSet],
        reference: Callable[["array[int]"], Tensor],
    ) -> None:
        self._model, self._signature = model, signature
        self._dtype, self._device = dtype, device
        original = model.config._attn_implementation
        try:
            _refuse_by_config(model)
            self._attention = PackedAttention(model)
            self._record_layers()
            self._instructions = choose()
            self.error = self._check(reference)
        except (*FOREIGN_ERRORS, RuntimeError) as error:
            model.set_attn_implementation(original)
            raise BlocksUnsupported(
                f"fails in a packed forward with {type(error).__name__}"
            ) from error
        except BlocksUnsupported:
            model.set_attn_implementation(original)
            raise

    def layout(self, free_bytes: int, wanted: int, block_size: int) -> int:
        """Return how many of the wanted blocks fit."""
        each = bytes_per_position(self._attention.cache, self._dtype.itemsize)
        return min(wanted, free_bytes // (block_size * each))

    def open(self, layout: MemoryLayout) -> None:
        self._attention.open(layout, self._dtype, self._device, self._instructions)

    @property
    def storage(self) -> CacheStorage:
        return self._attention.storage

    @property
    def facts(self) -> LaneFacts:
        mask = "lazy-prefix" if self._attention.makes_masks else "none"
        why = f"packing changes logits by at most {self.error:.1g} of the largest logit"
        return LaneFacts("blocks", mask, why)

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        """Return the logits of the rows that the chunks need."""
        ids, positions, rows = self._attention.begin(chunks, token_ids)
        kept = rows if len(rows) else rows.new_zeros(1)
        logits = self._call(ids, positions, kept).logits[0]
        # A model that ignores `logits_to_keep` returns all rows.
        if len(logits) != len(kept):
            logits = logits[kept]
        return logits[: len(rows)]

    def copy(self, blocks: Sequence[BlockCopy]) -> None:
        for copy in blocks:
            self._attention.copy_block(copy.source, copy.target)

    def _call(self, ids: Tensor, positions: Tensor, rows: Tensor) -> Any:
        offered = {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "use_cache": False,
            "logits_to_keep": rows,
            "return_dict": True,
        }
        return self._model(**self._signature.accepted(offered))

    @torch.inference_mode()
    def _record_layers(self) -> None:
        """Run one forward that records how each layer attends."""
        self._model.set_attn_implementation(_RECORDING)
        ids = torch.arange(_PROBE_LENGTHS[0], device=self._device)
        self._call(ids, ids, ids[-1:])
        config = self._model.config.get_text_config()
        num_layers, num_attend = config.num_hidden_layers, len(self._attention.cache)
        if num_attend < num_layers:
            raise BlocksUnsupported(
                f"can use blocks in only {num_attend} of its {num_layers} layers"
            )

    @torch.inference_mode()
    def _check(self, reference: Callable[["array[int]"], Tensor]) -> float:
        """Return the largest error of a packed forward, as a fraction of the largest logit.

        The model first processes two short sequences one by one with its own attention. Afterwards
        both sequences run packed, cut into chunks, over shuffled blocks. A wrong mask, position
        or block causes wrong logits. Raises BlocksUnsupported if rounding cannot explain the
        error.
        """
        prompts = [array("i", range(length)) for length in _PROBE_LENGTHS]
        prompts[1].reverse()
        self._model.set_attn_implementation("eager")
        expected = [reference(prompt) for prompt in prompts]
        self._model.set_attn_implementation(_PACKED)
        self.open(MemoryLayout(block_size=_PROBE_BLOCK, num_blocks=8))
        tables = array("i", [6, 1, 4]), array("i", [3, 7, 0])
        worst = 0.0
        for step in _PROBE_STEPS:
            chunks = [
                Chunk(SequenceId(n), start, length, length, (), tables[n])
                for n, (start, length) in enumerate(step)
            ]
            ids = [prompts[n][start : start + size] for n, (start, size) in enumerate(step)]
            parts = self.forward(chunks, ids).float().split([chunk.length for chunk in chunks])
            for n, (part, (start, length)) in enumerate(zip(parts, step, strict=True)):
                error = (part - expected[n][start : start + length]).abs().max()
                worst = max(worst, float(error / expected[n].abs().max()))
        allowed = TOLERANCE[self._dtype]
        if not worst <= allowed:
            raise BlocksUnsupported(
                "computes different logits when sequences are packed: the error is "
                f"{worst:.1g} of the largest logit, but rounding explains only {allowed:g}"
            )
        return worst


def _refuse_by_config(model: Any) -> None:
    if not model._supports_attention_backend:
        raise BlocksUnsupported("uses an attention function that cannot be replaced")
    for kind in _rope_kinds(model.config.to_dict()):
        if kind in _SHIFTING_ROPE:
            raise BlocksUnsupported(
                f"has {kind} rope, which depends on the longest sequence of a step"
            )


def _rope_kinds(config: Any) -> list[str]:
    if not isinstance(config, dict):
        return []
    found = [str(config["rope_type"])] if "rope_type" in config else []
    return found + [kind for part in config.values() for kind in _rope_kinds(part)]
