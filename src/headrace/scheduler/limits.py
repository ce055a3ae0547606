"""The numbers a scheduler works under once device and model are known; never measured ones."""

import msgspec

from headrace.core.config import SchedulerConfig
from headrace.core.layout import MemoryLayout

MAX_STEP_TOKENS = {"cpu": 512, "cuda": 2048}
MAX_STALL_MS = {"cpu": 100.0, "cuda": 50.0}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved: what the configuration left open has been filled in for the device."""

    max_num_seqs: int
    max_step_tokens: int
    max_model_len: int  # the model's positions, or fewer if the user said so
    max_stall_s: float | None = None  # of a step while somebody decodes; None: no target
    max_step_s: float | None = None  # of any other step
    prompt_share: float = 0.25  # time for prompts in any case, by that of the decode chunks
    forward_per_chunk: bool = False  # the lane runs its chunks one after the other

    def max_total(self, layout: MemoryLayout) -> int:
        """Tokens, prompt and answer, at which a sequence ends: what an empty memory can hold."""
        bounds = [self.max_model_len]
        if layout.num_blocks:
            bounds.append(layout.num_blocks * layout.block_size)
        if layout.max_positions:
            bounds.append(layout.max_positions)
        return min(bounds)


def resolve(
    config: SchedulerConfig,
    layout: MemoryLayout,
    device: str,
    max_num_seqs: int,
    max_model_len: int,
) -> Limits:
    """Fill in for `device`, cpu or cuda, what the configuration leaves open."""
    stall_ms = config.max_stall_ms or MAX_STALL_MS[device]
    return Limits(
        max_num_seqs=max_num_seqs,
        max_step_tokens=config.max_step_tokens or MAX_STEP_TOKENS[device],
        max_model_len=max_model_len,
        max_stall_s=None if stall_ms == "off" else stall_ms / 1000,
        max_step_s=None if config.max_step_ms == "off" else config.max_step_ms / 1000,
        prompt_share=config.prompt_share,
        forward_per_chunk=not layout.num_blocks,  # dense caches are run one by one
    )
