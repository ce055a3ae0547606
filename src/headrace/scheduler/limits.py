"""The numbers a scheduler works under once device and model are known; never measured ones."""

import msgspec

from headrace.core.layout import MemoryLayout


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved: what the configuration left open has been filled in for the device."""

    max_num_seqs: int
    max_step_tokens: int
    max_model_len: int  # the model's positions, or fewer if the user said so

    def max_total(self, layout: MemoryLayout) -> int:
        """Tokens, prompt and answer, at which a sequence ends: what an empty memory can hold."""
        bounds = [self.max_model_len]
        if layout.num_blocks:
            bounds.append(layout.num_blocks * layout.block_size)
        if layout.max_positions:
            bounds.append(layout.max_positions)
        return min(bounds)
