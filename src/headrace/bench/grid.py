"""The grid of `headrace bench matrix`: loads and chunking modes. Has no side effects."""

import itertools

import msgspec


class MixedLoad(msgspec.Struct, frozen=True):
    """Prompts that arrive at random while streams run."""

    num_streams: int
    rate: float  # prompts per second
    prompt_tokens: int
    # Fraction of each prompt that the server has in its cache.
    cached_share: float

    def __str__(self) -> str:
        return (
            f"{self.num_streams} streams, {self.rate:g} prompts/s of {self.prompt_tokens:,} "
            f"tokens, {self.cached_share:.0%} cached"
        )


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The values of each dimension. Every combination is one load."""

    streams: tuple[int, ...]
    rates: tuple[float, ...]
    lengths: tuple[int, ...]
    cached: tuple[float, ...]
    num_prompts: int  # prompts of each cell

    def loads(self) -> list[MixedLoad]:
        every = itertools.product(self.streams, self.rates, self.lengths, self.cached)
        return list(dict.fromkeys(MixedLoad(*values) for values in every))


GRIDS = {
    "full": Grid(
        streams=(2, 8),
        rates=(1.0, 2.0, 4.0),
        lengths=(4096, 8192, 12288),
        cached=(0.0, 0.5, 0.9),
        num_prompts=16,
    ),
    "short": Grid(
        streams=(4,), rates=(0.05,), lengths=(4096, 12288), cached=(0.0, 0.9), num_prompts=4
    ),
}

_NO_TARGET = ("--max-stall-ms", "off", "--max-step-ms", "off")
CHUNKING = {
    "off": (*_NO_TARGET, "--max-open-prompts", "1", "--max-step-tokens"),
    "tokens": (*_NO_TARGET, "--max-step-tokens", "512"),
    "time": (),
}
"""Flags of the servers: whole prompts, a fixed number of tokens per step, or the stall target."""

# Without speculative decoding, each token of a stream arrives alone, so every gap is one step.
_ALL = ("--guess", "off", "--prefix-cache-dir", "none")
# Room for the streams' decode tokens in a step that processes a whole prompt.
_NUM_DECODING = 1024


def server_flags(chunking: str, grid: Grid) -> tuple[str, ...]:
    """Return the flags of a server with this chunking mode."""
    whole = (str(max(grid.lengths) + _NUM_DECODING),) if chunking == "off" else ()
    return (*_ALL, *CHUNKING[chunking], *whole)
