"""Models of transformers on block memory: all chunks of a step in one packed forward.

Their layers attend through a function of ours that is registered with transformers. Which of them
can be trusted to do so is found out at load: by what their layers hand to that function, and by
comparing its answers with the model's own.
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
from headrace_engine.runner.inputs import pack
from headrace_engine.runner.lanes.foreign import FOREIGN_ERRORS, TOLERANCE, Signature
from headrace_engine.runner.storage import CacheStorage
from headrace_kernels import CpuAttention

_PACKED, _NOTING = "headrace_packed", "headrace_noting"
"""Names of our attention: in a step, and while it notes what a model hands to it."""

_OFFERED = frozenset({"position_ids", "use_cache", "logits_to_keep", "return_dict"})
"""Arguments of ours that a model may hand on to its attention."""
_KNOWN = _OFFERED | {"scaling", "sliding_window", "softcap", "s_aux"}
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
"""Per step the chunks of both sequences, start and length; the last is of one token alone."""
_PROBE_BLOCK = 16
_UNKNOWN = -1
_FARTHEST = 1 << 20  # positions at which a mask is tried


class NotOnBlocks(Exception):
    """Why a model cannot be run on block memory; a clause that follows its name."""


class _Layer(NamedTuple):
    """How one layer attends."""

    number: int
    cache: LayerCache  # keys and values of one size: the shorter of the two ends in zeros
    value_dim: int  # of the layer's own values
    scale: float  # of scores
    cap: float | None  # they are capped softly at this size
    sinks: Tensor | None  # [heads]: scores that hold no value


class _Outlook(NamedTuple):
    """Stands in for a mask: how far back it lets a layer look; 0: to the start."""

    window: int


class ForeignAttention:
    """The attention that the layers of one model call in place of their own."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[int, _Layer] = {}  # by the identity of the module that attends
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
        """Whether a mask is made for each chunk."""
        return isinstance(self._attention, NaiveAttention)

    def open(
        self,
        layout: MemoryLayout,
        dtype: torch.dtype,
        device: torch.device,
        instructions: InstructionSet,
    ) -> None:
        """Takes the memory of the layout in every layer."""
        self.storage = CacheStorage(self.cache, layout, dtype, device)
        layers = self._layers.values()
        sinks = [None if x.sinks is None else x.sinks.float().contiguous() for x in layers]
        if instructions == "plain":
            self._attention = NaiveAttention(self.storage, sinks)
        else:
            windows = [layer.cache.window for layer in layers]
            self._attention = CpuAttention(self.storage, windows, sinks, instructions)

    def begin(
        self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A step: its tokens, their positions, and the rows that are asked for."""
        batch = pack(chunks, token_ids, self.storage.block_size, self.storage.device)
        self._step = self._attention.step(batch)
        return batch.token_ids, batch.positions, batch.rows

    def copy_block(self, source: int, target: int) -> None:
        self.storage.copy_block(source, target)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[1, tokens, heads, dim] of q, k and v [1, heads, tokens, dim]."""
        layer = self._layers[id(module)]
        dim, dtype, kind = layer.cache.key_dim, self.storage.keys[layer.number].dtype, q.dtype
        factor = layer.scale * dim**0.5  # our attention scales by dim ** -0.5
        if factor != 1:
            q = q * factor
        q, k, v = (_rows(x, dim).to(dtype) for x in (q, k, v))
        out = self._step.attend(layer.number, q, k, v, layer.cap)
        return out[None, ..., : layer.value_dim].to(kind)

    def note(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Notes how a layer attends; what it returns has the right shape only."""
        if id(module) in self._layers:
            raise NotOnBlocks("has a layer that attends twice")
        if not isinstance(mask, _Outlook):
            raise NotOnBlocks("makes its attention masks itself")
        if mask.window == _UNKNOWN:
            raise NotOnBlocks("has a mask that is neither causal nor a sliding window")
        _refuse_unknown(options)
        told = options.get("sliding_window")
        if told is not None and mask.window not in (0, told):
            raise NotOnBlocks(f"names a window of {told} and masks one of {mask.window}")
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


_OWNERS: WeakKeyDictionary[nn.Module, ForeignAttention] = WeakKeyDictionary()
"""Our attention by module, since transformers passes nothing else of ours to the function."""


def _refuse_unknown(options: dict[str, Any]) -> None:
    for name, value in options.items():
        is_off = name.startswith("output_") and value is False
        is_neutral = name in _NEUTRAL and value == _NEUTRAL[name]
        if not (value is None or name in _KNOWN or is_neutral or is_off):
            raise NotOnBlocks(
                f"hands the argument {name} to its attention, which ours does not know"
            )


def _rows(x: Tensor, dim: int) -> Tensor:
    """[tokens, heads, dim] of x [1, heads, tokens, dim or fewer]."""
    rows = x[0].transpose(0, 1)
    if rows.shape[2] < dim:
        rows = F.pad(rows, (0, dim - rows.shape[2]))
    # NOTE: one row counts as contiguous whatever its stride, and kernels go by the stride.
    rows = rows.contiguous()
    return rows.as_strided(rows.shape, (rows.shape[1] * dim, dim, 1))


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    return _OWNERS[module].attend(module, query, key, value), None


def _note(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    return _OWNERS[module].note(module, query, key, value, mask, options), None


def _see(mask_function: Callable[..., Tensor], config: Any, **_: Any) -> _Outlook:
    """Finds the window of a mask by trying a few positions, as far as the model goes."""
    length = min(getattr(config, "max_position_embeddings", None) or 4096, _FARTHEST)
    others = torch.arange(length)
    widths: set[int] = set()
    for own in sorted({length - 1, length // 2, length // 2 - 1, length // 3, 0}):
        seen = mask_function(0, 0, torch.tensor(own), others).expand(length)
        width = int(seen.sum())
        if not torch.equal(seen, (others <= own) & (others > own - width)):
            return _Outlook(_UNKNOWN)
        if width <= own:  # it does not reach the start
            widths.add(width)
    if len(widths) > 1:
        return _Outlook(_UNKNOWN)
    return _Outlook(widths.pop() if widths else 0)


ALL_ATTENTION_FUNCTIONS.register(_PACKED, _attend)
ALL_ATTENTION_FUNCTIONS.register(_NOTING, _note)
ALL_MASK_ATTENTION_FUNCTIONS.register(_NOTING, _see)  # in a step no mask is made


class BlockCaches:
    """A model of transformers over blocks; NotOnBlocks says why it cannot be.

    `choose` gives the instruction set of the attention's kernels, once one is needed.
    `own`: logits of every token of a sequence, float32, by the model's own attention; it is called
    with that attention set.
    """

    def __init__(
        self,
        model: Any,
        signature: Signature,
        dtype: torch.dtype,
        device: torch.device,
        choose: Callable[[], InstructionSet],
        own: Callable[["array[int]"], Tensor],
    ) -> None:
        self._model, self._signature = model, signature
        self._dtype, self._device = dtype, device
        usual = model.config._attn_implementation
        try:
            _refuse_by_config(model)
            self._attention = ForeignAttention(model)
            self._note_layers()
            self._instructions = choose()
            self.error = self._check(own)
        except (*FOREIGN_ERRORS, RuntimeError) as error:
            model.set_attn_implementation(usual)
            raise NotOnBlocks(f"ends a packed forward with {type(error).__name__}") from error
        except NotOnBlocks:
            model.set_attn_implementation(usual)
            raise

    def layout(self, free_bytes: int, wanted: int, block_size: int) -> int:
        """How many of the blocks wanted fit."""
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
        why = f"packed, it answers as alone, within {self.error:.1g} of its largest logit"
        return LaneFacts("blocks", mask, why)

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        """Logits of the rows asked for."""
        ids, positions, rows = self._attention.begin(chunks, token_ids)
        kept = rows if len(rows) else rows.new_zeros(1)
        logits = self._call(ids, positions, kept).logits[0]
        if len(logits) != len(kept):  # it keeps all of them
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
    def _note_layers(self) -> None:
        """One forward shows how each layer attends."""
        self._model.set_attn_implementation(_NOTING)
        ids = torch.arange(_PROBE_LENGTHS[0], device=self._device)
        self._call(ids, ids, ids[-1:])
        config = self._model.config.get_text_config()
        num_layers, num_attend = config.num_hidden_layers, len(self._attention.cache)
        if num_attend < num_layers:
            raise NotOnBlocks(f"has {num_layers} layers, of which {num_attend} attend over blocks")

    @torch.inference_mode()
    def _check(self, own: Callable[["array[int]"], Tensor]) -> float:
        """Two sequences, packed and cut, against its own attention, one by one."""
        prompts = [array("i", range(length)) for length in _PROBE_LENGTHS]
        prompts[1].reverse()
        self._model.set_attn_implementation("eager")
        expected = [own(prompt) for prompt in prompts]
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
            raise NotOnBlocks(
                f"answers otherwise packed than alone: by {worst:.1g} of its largest logit, "
                f"where {allowed:g} is rounding"
            )
        return worst


def _refuse_by_config(model: Any) -> None:
    if not model._supports_attention_backend:
        raise NotOnBlocks("has an attention that cannot be replaced")
    for kind in _rope_kinds(model.config.to_dict()):
        if kind in _SHIFTING_ROPE:
            raise NotOnBlocks(f"has {kind} rope, which changes with the longest sequence of a step")


def _rope_kinds(config: Any) -> list[str]:
    if not isinstance(config, dict):
        return []
    found = [str(config["rope_type"])] if "rope_type" in config else []
    return found + [kind for part in config.values() for kind in _rope_kinds(part)]
