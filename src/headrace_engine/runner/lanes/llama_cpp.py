"""Runs GGUF files with llama.cpp, which processes the batches that Headrace's scheduler plans.

llama.cpp's cache is one pool of cells. A cell belongs to one or more sequences, so copying a
sequence takes no memory. The scheduler counts memory in blocks; SequenceMap maps blocks to
sequences.
"""

import ctypes
import importlib
import logging
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_common.ids import SlotId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import LaneFacts
from headrace_common.plan import BlockCopy, Chunk, SlotCopy
from headrace_engine.runner.lanes.lane import LaneOptions, LaneTraits
from headrace_engine.runner.lanes.sequence_map import Ints, SequenceMap

logger = logging.getLogger(__name__)

# The maximum number of tokens in a call of llama_decode.
_BATCH = 512
# A call has room for at least this many rows of logits, each as long as the vocabulary.
_OUTPUTS = 64
# A context has at least this many sequences, one for each row of logits.
_SEQUENCES = _OUTPUTS
# Memory is measured with this number of tokens, and with twice this number. Both numbers fit any
# model's window.
_PROBE = 8
# The Python log levels of llama.cpp's levels 3 (warning) and 4 (error).
_LEVELS = {3: logging.INFO, 4: logging.WARNING}
_ERROR = 4
# Errors that llama.cpp has logged since this list was last cleared.
_ERRORS: list[str] = []
# The result of llama_decode if no cells are free.
_NO_FREE_CELLS = 1


class LlamaCpp:
    storage = None
    traits = LaneTraits("llama-cpp", own_kernels="llama.cpp's")

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, options: LaneOptions
    ) -> None:
        """Load the model. Layers may be offloaded to any device; logits are always on the CPU."""
        self._api = _library()
        parameters = self._api.llama_model_default_params()
        parameters.n_gpu_layers = -1 if options.may_offload else 0
        # Read the file instead of mapping the file. As a result, the free memory is known, and no
        # step waits for the disk.
        parameters.load_mode = self._api.LLAMA_LOAD_MODE_NONE
        if b"AMX_INT8 = 1" in self._api.llama_print_system_info():
            # llama.cpp's matrix products for AMX crash the process (version 0.3.36).
            parameters.use_extra_bufts = False
        # If a model has several files, llama.cpp finds the other files by the name of the first
        # file.
        path = spec.folder / spec.weight_files[0]
        _ERRORS.clear()
        self._model = self._api.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise ModelError(f"llama.cpp cannot load {spec.name}: {_first_error()}.")
        if objection := self._objection():
            raise ModelError(f"Lane {self.traits.id} cannot run {spec.name}: {objection}.")
        self.device = torch.device("cpu")
        # The dtype of the cache.
        self.dtype = torch.float32 if dtype == torch.float32 else torch.float16
        self.num_parameters = self._api.llama_model_n_params(self._model)
        self.weight_bytes = self._api.llama_model_size(self._model)
        self._vocab = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        # Whether the model's only memory is recurrent state.
        self._is_recurrent = self._api.llama_model_is_recurrent(self._model)
        self._has_states = self._is_recurrent or self._api.llama_model_is_hybrid(self._model)
        self._sizes: tuple[int, int] | None = None
        self._context: DecodingContext | None = None

    def _objection(self) -> str | None:
        if self._api.llama_model_has_encoder(self._model):
            return "it has an encoder"
        if not self._api.llama_model_has_decoder(self._model):
            return "it generates no tokens"
        if self._api.llama_model_is_diffusion(self._model):
            return "it does not generate token by token"
        return None

    def layout(
        self, free_bytes: int, max_num_seqs: int, max_positions: int, block_size: int
    ) -> MemoryLayout:
        """Return blocks if the model's only memory is the KV cache, else a slot for each sequence.

        Recurrent states can be neither truncated nor found by their tokens, so models with
        recurrent states need slots.
        """
        fixed, per_position = self._measure()
        self._num_seqs = max_num_seqs
        if not self._has_states:
            wanted = max_num_seqs * -(-max_positions // block_size)
            num_blocks = min(wanted, free_bytes // (block_size * max(1, per_position)))
            longest = min(max_positions, num_blocks * block_size)
            return MemoryLayout(block_size, num_blocks, max_positions=longest)
        slot_bytes = fixed + per_position * max_positions
        num_slots = max(1, min(max_num_seqs, free_bytes // max(1, slot_bytes)))
        if per_position:
            room = max(0, free_bytes // num_slots - fixed)
            max_positions = min(max_positions, room // per_position)
        return MemoryLayout(block_size, num_slots=num_slots, max_positions=max_positions)

    def open(self, layout: MemoryLayout) -> None:
        num_all = self._api.llama_max_parallel_sequences()
        # Half of llama.cpp's sequences are reserved for the prefixes that SequenceMap keeps.
        if max(self._num_seqs, layout.num_slots) > num_all // 2:
            raise ModelError(
                f"Lane {self.traits.id} runs at most {num_all // 2} sequences at the same time, "
                f"but --max-num-seqs is {self._num_seqs}; lower this value."
            )
        if self._context is not None:
            self._context.close()
        if layout.num_blocks:
            num_cells = layout.num_blocks * layout.block_size
            num_seqs = min(num_all, max(_SEQUENCES, 2 * self._num_seqs))
            facts = LaneFacts("blocks", "lazy-prefix", "cells of llama.cpp's own cache")
        else:
            num_seqs = layout.num_slots
            num_cells = layout.max_positions * (1 if self._is_recurrent else num_seqs)
            facts = LaneFacts("slot", "lazy-prefix", "recurrent states, which cannot be truncated")
        self.traits = self.traits.with_changes(facts=facts)
        self._context = context = self._open(num_cells, num_seqs)
        self._sequence_map: SequenceMap | None = None
        if layout.num_blocks:
            self._sequence_map = SequenceMap(
                context, layout.num_blocks, layout.block_size, num_seqs
            )

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        assert self._context is not None
        if self._sequence_map is not None:
            self._sequence_map.next_step()
        pieces = []
        # `assign` may also process tokens.
        try:
            for chunk, ids in zip(chunks, token_ids, strict=True):
                if self._sequence_map is None:
                    sequence = int(chunk.slot_id)
                    if chunk.start == 0:
                        self._context.remove(sequence, 0)
                else:
                    sequence = self._sequence_map.assign(chunk.block_ids, chunk.start, ids)
                tokens = np.asarray(ids, np.int32)
                pieces.append(ChunkTokens(sequence, chunk.start, tokens, chunk.num_rows))
            return self._context.decode(pieces)
        except (MemoryError, RuntimeError):
            if self._sequence_map is not None:
                self._sequence_map.clear()
            raise

    def logits(self, rows: Tensor) -> Tensor:
        return rows

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None:
        for each in blocks:
            assert self._sequence_map is not None
            self._sequence_map.copy(each.source, each.target)
        for slot in slots:
            assert self._context is not None
            self._context.remove(int(slot.target), 0)
            self._context.copy(int(slot.source), int(slot.target), -1)

    def _measure(self) -> tuple[int, int]:
        """Return a saved sequence's size in llama.cpp: fixed bytes, and bytes per position."""
        if self._sizes is None:
            context = self._open(2 * _PROBE, 1)
            found = []
            for start in (0, _PROBE):
                tokens = np.arange(_PROBE, dtype=np.int32) % self._vocab
                context.decode([ChunkTokens(0, start, tokens, 1)])
                found.append(context.sequence_bytes(SlotId(0)))
            context.close()
            per_position = -(-(found[1] - found[0]) // _PROBE)
            self._sizes = max(0, found[0] - _PROBE * per_position), per_position
        return self._sizes

    def _open(self, num_cells: int, num_sequences: int) -> "DecodingContext":
        return DecodingContext(
            self._api, self._model, self._vocab, num_cells, num_sequences, self.dtype
        )


class ChunkTokens(NamedTuple):
    """Tokens of one llama.cpp sequence; the last `num_rows` tokens need logits."""

    sequence: int
    start: int
    token_ids: Ints
    num_rows: int


class DecodingContext:
    """A llama.cpp context, which has a cache and processes batches."""

    def __init__(
        self,
        api: Any,
        model: Any,
        vocab: int,
        num_cells: int,
        num_sequences: int,
        dtype: torch.dtype,
    ) -> None:
        self._api, self._vocab = api, vocab
        self._num_outputs = max(_OUTPUTS, num_sequences)
        parameters = api.llama_context_default_params()
        parameters.n_ctx = num_cells
        parameters.n_batch = parameters.n_ubatch = _BATCH
        parameters.n_seq_max = num_sequences
        parameters.n_outputs_max = self._num_outputs
        parameters.n_threads = parameters.n_threads_batch = torch.get_num_threads()
        parameters.kv_unified = True
        # Without this setting, llama.cpp drops positions outside a window, and no prefix can be
        # shared.
        parameters.swa_full = True
        kind = api.GGML_TYPE_F32 if dtype == torch.float32 else api.GGML_TYPE_F16
        parameters.type_k = parameters.type_v = kind
        _ERRORS.clear()
        self._context = api.llama_init_from_model(model, parameters)
        if not self._context:
            raise ModelError(
                f"llama.cpp cannot allocate a cache of {num_cells} tokens: {_first_error()}."
            )
        self._memory = api.llama_get_memory(self._context)
        self._batch = _BatchArrays(api)

    def close(self) -> None:
        self._api.llama_free(self._context)

    def remove(self, sequence: int, start: int) -> None:
        """Remove all positions of the sequence from `start` on."""
        self._api.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def copy(self, source: int, target: int, end: int) -> None:
        """Share the positions of `source` before `end` (-1: all) with `target`, which is empty."""
        self._api.llama_memory_seq_cp(self._memory, source, target, 0 if end >= 0 else -1, end)

    def compute(self, sequence: int, token_ids: Ints) -> None:
        self.decode([ChunkTokens(sequence, 0, token_ids, 0)])

    def sequence_bytes(self, sequence: int) -> int:
        return int(self._api.llama_state_seq_get_size(self._context, sequence))

    def decode(self, chunks: Sequence[ChunkTokens]) -> Tensor:
        """Return float32 logits: `num_rows` rows for each chunk, in the order of the chunks.

        Raises MemoryError if there are too few cells, RuntimeError if llama.cpp fails.
        """
        rows = torch.empty(sum(chunk.num_rows for chunk in chunks), self._vocab)
        target = rows.numpy()
        number = 0
        for tokens, positions, sequences, has_logits in _split_calls(chunks, self._num_outputs):
            batch = self._batch.fill(tokens, positions, sequences, has_logits)
            _ERRORS.clear()
            if code := self._api.llama_decode(self._context, batch):
                text = f"llama.cpp failed to decode with code {code}: {_first_error()}"
                raise MemoryError(text) if code == _NO_FREE_CELLS else RuntimeError(text)
            for index in np.flatnonzero(has_logits):
                found = self._api.llama_get_logits_ith(self._context, int(index))
                target[number] = np.ctypeslib.as_array(found, (self._vocab,))
                number += 1
        return rows


def _split_calls(
    chunks: Sequence[ChunkTokens], num_outputs: int
) -> Iterator[tuple[Ints, Ints, Ints, NDArray[np.int8]]]:
    """Divide the chunks into calls; yield each call's tokens, positions, sequences and logit flags.

    A call has at most _BATCH tokens and `num_outputs` rows of logits.
    """
    sizes = [len(chunk.token_ids) for chunk in chunks]
    tokens = np.concatenate([chunk.token_ids for chunk in chunks])
    positions = np.concatenate(
        [chunk.start + np.arange(n, dtype=np.int32) for chunk, n in zip(chunks, sizes, strict=True)]
    )
    sequences = np.repeat(np.array([chunk.sequence for chunk in chunks], np.int32), sizes)
    has_logits = np.concatenate(
        [np.arange(n) >= n - c.num_rows for c, n in zip(chunks, sizes, strict=True)]
    ).astype(np.int8)
    counted = np.cumsum(has_logits)
    start = 0
    while start < len(tokens):
        before = counted[start - 1] if start else 0
        fitting = int(np.searchsorted(counted, before + num_outputs, side="right"))
        end = min(start + _BATCH, fitting, len(tokens))
        part = slice(start, end)
        yield tokens[part], positions[part], sequences[part], has_logits[part]
        start = end


class _BatchArrays:
    """The arrays that a llama_batch points to; each token belongs to one sequence."""

    def __init__(self, api: Any) -> None:
        self._tokens, self._positions, self._sequences = np.zeros((3, _BATCH), np.int32)
        self._counts = np.ones(_BATCH, np.int32)
        self._wanted = np.zeros(_BATCH, np.int8)
        integers = ctypes.POINTER(ctypes.c_int32)
        first, step = self._sequences.ctypes.data, self._sequences.itemsize
        self._each = (integers * _BATCH)(
            *(ctypes.cast(first + step * n, integers) for n in range(_BATCH))
        )
        self._batch = batch = api.llama_batch()
        batch.token = self._tokens.ctypes.data_as(integers)
        batch.pos = self._positions.ctypes.data_as(integers)
        batch.n_seq_id = self._counts.ctypes.data_as(integers)
        batch.seq_id = ctypes.cast(self._each, ctypes.POINTER(integers))
        batch.logits = self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    def fill(
        self, tokens: Ints, positions: Ints, sequences: Ints, has_logits: NDArray[np.int8]
    ) -> Any:
        count = self._batch.n_tokens = len(tokens)
        self._tokens[:count], self._positions[:count] = tokens, positions
        self._sequences[:count], self._wanted[:count] = sequences, has_logits
        return self._batch


def _library() -> Any:
    """Import llama-cpp-python and send its log to `logger`; ModelError if the import fails."""
    try:
        api: Any = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise ModelError(
            f"llama-cpp-python cannot be imported ({error}); run pip install '.[llama-cpp]' in "
            "the checkout."
        ) from None
    if _LOG_CALLBACK == []:
        _LOG_CALLBACK.append(api.llama_log_callback(_write_log))
    api.llama_log_set(_LOG_CALLBACK[0], ctypes.c_void_p(0))
    return api


# This list keeps the callback alive, because llama.cpp calls it until the process ends.
_LOG_CALLBACK: list[Callable[..., None]] = []


def _write_log(level: int, text: bytes, _: object) -> None:
    line = text.decode(errors="replace").strip()
    if level == _ERROR and line:
        _ERRORS.append(line)
    if line.strip("."):
        logger.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


def _first_error() -> str:
    """Return the first error that llama.cpp logged, without its function name.

    The first error is the cause. Later errors only report the first error again.
    """
    first = _ERRORS[0] if _ERRORS else "it gives no reason"
    return re.sub(r"^\w+: (error loading model: )?", "", first).rstrip(".")
