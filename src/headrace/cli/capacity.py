"""What the memory of a loaded model holds, in words."""

from headrace.core.layout import MemoryLayout
from headrace.core.messages import Ready
from headrace.runner.lanes.lane import Lane


def cache_bytes(lane: Lane, block_size: int) -> tuple[int, int]:
    """Bytes per token and further bytes per sequence, from the lane's layouts of two budgets."""
    small, large = 1 << 40, 1 << 41
    lengths = [lane.layout(b, 1, 1 << 60, block_size).max_positions for b in (small, large)]
    per_token = round((large - small) / max(1, lengths[1] - lengths[0]))
    fixed = small - lengths[0] * per_token
    if fixed <= block_size * per_token:
        return per_token, 0  # it is rounding, not a cost
    layout = lane.layout(small, 1, 1 << 60, block_size)
    return per_token, fixed // max(1, layout.num_slots + layout.num_snapshots)


def slots(layout: MemoryLayout, per_sequence: int) -> str:
    """What bounds the streams of a model with states."""
    if not layout.num_blocks or not layout.num_slots:
        return ""
    size = f"{per_sequence / (1 << 20):.1f} MiB"
    kept = f"{layout.num_snapshots} more keep states that prompts with the same begin go on from"
    return f"; there are {layout.num_slots} slots of {size} for their states, and {kept}"


def fit(ready: Ready) -> str:
    """Streams that fit: of the greatest length, and shorter ones."""
    layout = ready.layout
    whole = layout.max_positions
    num = layout.num_slots
    if layout.num_blocks:
        num = layout.num_blocks // max(1, layout.blocks_for(whole))
    return f"{min(num, ready.max_num_seqs)} of {whole} tokens, or {ready.max_num_seqs} shorter ones"
