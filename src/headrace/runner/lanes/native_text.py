"""Our own implementations: all chunks of a step in one packed forward over block memory."""

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.checkpoints.spec import ModelSpec
from headrace.checkpoints.weights import load_weights
from headrace.core.layout import MemoryLayout
from headrace.core.plan import BlockCopy, Chunk, SlotCopy
from headrace.models.registry import family
from headrace.runner.attention import Attention, NaiveAttention
from headrace.runner.inputs import Batch, pack
from headrace.runner.kernels.attention import CpuAttention
from headrace.runner.kernels.forms import Form, forms_here
from headrace.runner.kernels.linear import pack_linear
from headrace.runner.kernels.prepare import prepare, weight_bytes
from headrace.runner.kernels.replay import CapturedForward
from headrace.runner.probe import give_back_freed
from headrace.runner.storage import BlockStorage, bytes_per_position


class NativeText:
    id = "native-text"

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        to_int8: bool = False,
        form: Form | None = None,
    ) -> None:
        """Without `form` it is the processor's best; elsewhere than on a CPU it is plain."""
        make = family(spec.architecture)
        with torch.device("meta"):
            self._model = make(make.read(spec.config))
        self.num_parameters = sum(p.numel() for p in self._model.parameters())
        self._hidden: Callable[[Batch], Tensor]
        self.device, self.dtype = device, dtype
        self._form = (form or forms_here()[0]) if device.type == "cpu" else "plain"
        if self._form != "plain":
            load_weights(self._model, make.weights, spec, dtype, device, self._pack(to_int8))
            prepare(self._model)
        else:
            load_weights(self._model, make.weights, spec, dtype, device)
        self.weight_bytes = weight_bytes(self._model)

    def _pack(self, to_int8: bool) -> Callable[[str], None]:
        def pack(path: str) -> None:
            pack_linear(self._model, path, to_int8, self._form)
            give_back_freed()

        return pack

    def layout(
        self, free_bytes: int, max_num_seqs: int, max_positions: int, block_size: int
    ) -> MemoryLayout:
        block_bytes = block_size * bytes_per_position(self._model.cache_shape, self.dtype)
        wanted = max_num_seqs * -(-max_positions // block_size)
        num_blocks = min(wanted, free_bytes // block_bytes)
        return MemoryLayout(
            block_size=block_size,
            num_blocks=num_blocks,
            max_positions=min(max_positions, num_blocks * block_size),
        )

    def open(self, layout: MemoryLayout) -> None:
        self._storage = BlockStorage(
            self._model.cache_shape, layout.num_blocks, layout.block_size, self.dtype, self.device
        )
        self._attention: Attention
        if self._form == "plain":
            self._attention, self._hidden = NaiveAttention(self._storage), self._forward
            return
        self._attention = CpuAttention(self._storage, form=self._form)
        width = -(-layout.max_positions // layout.block_size)
        self._hidden = CapturedForward(self._forward, width)

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        batch = pack(chunks, token_ids, self._storage.block_size, self.device)
        return self._hidden(batch)[batch.rows]

    def _forward(self, batch: Batch) -> Tensor:
        """Hidden states [tokens, hidden]."""
        return self._model(batch.token_ids, self._attention.step(batch))

    def logits(self, rows: Tensor) -> Tensor:
        return self._model.head(rows).float()

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None:
        for copy in blocks:
            self._storage.copy_block(copy.source, copy.target)
