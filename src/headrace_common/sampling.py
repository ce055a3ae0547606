"""How the tokens of a request are drawn and what ends them; plain numbers, no tensors."""

from typing import Literal

import msgspec

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last", "score"]
"""How rows become one; of all rows: max, and the three kinds of mean (mean_sqrt_len: their sum by
the root of their number; weightedmean: row i, from 1, counts i times)."""


class Pooling(msgspec.Struct, frozen=True):
    """How a sequence that draws nothing ends: in one vector made of its prompt's rows.

    Several modes stand one after the other in the vector. score stands alone: what a
    classification head makes of the last row, as it is.
    """

    modes: tuple[PoolingMode, ...]
    num_first: int = 0  # tokens of the first text where the prompt is a pair of texts

    @property
    def needs_whole(self) -> bool:
        """Whether pooling needs rows of the whole prompt, so that none may come from a cache."""
        return not {"last", "score"}.issuperset(self.modes)

    def num_rows(self, start: int, end: int, total: int) -> int:
        """The number of a chunk's last rows needed; the chunk is [start, end) of `total` tokens."""
        if not {"last", "score", "cls"}.issuperset(self.modes):
            return end - start
        if "cls" in self.modes and start == 0:
            return end
        return int(end == total and self.modes != ("cls",))


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Resolved parameters, equal for all choices of a request.

    The order of operations is: logits + bias, repetition, frequency and presence penalty, end
    tokens and what the grammar forbids masked, then argmax if greedy, else temperature, top_k,
    top_p, min_p and one draw. If `samplers` is not empty, these samplers run in that order instead,
    behind the mask and before the draw.
    """

    temperature: float = 1.0  # below GREEDY_BELOW: argmax, ties to the lowest id
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = -1  # how many of the last tokens the penalties count; -1: all
    typical_p: float = 1.0
    top_n_sigma: float = -1.0  # -1: off
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    min_keep: int = 0  # candidates that top_p, min_p, typ_p and xtc leave at least
    samplers: tuple[str, ...] = ()  # by llama.cpp's names; empty: PLAIN_ORDER, computed faster
    logit_bias: dict[int, float] = {}
    seed: int = 0  # any int64; token i of choice k draws with Philox key seed, counter (i, k)
    max_tokens: int | None = None  # None: the rest of the context; 0: compute the prompt only
    min_tokens: int = 0  # before it nothing but the length ends a choice
    end_token_ids: tuple[int, ...] = ()  # the model's own; masked while ignored or too early
    stop_token_ids: tuple[int, ...] = ()  # the client's; they end a choice, never masked
    ignore_eos: bool = False
    num_logprobs: int | None = None  # None: none; k: the sampled token and the k likeliest
    num_prompt_logprobs: int | None = None  # the same for each prompt token but the first
    grammar: str = ""  # what the answer must match, in llguidance's form; "": anything
    grammar_tags: tuple[int, int] | None = None  # an answer may begin with reasoning between these
    grammar_waits: bool = False  # the prompt has opened reasoning: the grammar begins after it
    pooling: Pooling | None = None  # nothing is drawn; max_tokens is then 0
    guess: bool = True  # whether tokens may be guessed ahead, which changes none of them

    @property
    def is_greedy(self) -> bool:
        # Other samplers may remove the likeliest token before the temperature is applied.
        return self.temperature < GREEDY_BELOW and not self.samplers

    def in_order(self, order: tuple[str, ...] | None) -> "Sampling":
        """Return these parameters with the samplers in this order; those it lacks are off.

        Without an order, llama.cpp's applies if one of the samplers that only llama.cpp has is on.
        """
        if order is not None:
            off = {
                name: OFF[name] for key in SETTINGS.keys() - set(order) for name in SETTINGS[key]
            }
            return msgspec.structs.replace(self, samplers=order, **off)
        if any(getattr(self, name) != OFF[name] for name in _ONLY_LLAMA_CPP):
            return msgspec.structs.replace(self, samplers=LLAMA_CPP_ORDER)
        if self.min_keep > 1:
            return msgspec.structs.replace(self, samplers=PLAIN_ORDER)
        return self

    def masks_ends(self, num_generated: int) -> bool:
        """Whether end tokens may not be drawn as token `num_generated` (counted from 0)."""
        return self.ignore_eos or num_generated < self.min_tokens

    def ends_with(self, token_id: int, num_generated: int) -> bool:
        """Whether token `token_id`, the `num_generated`-th (counted from 1), ends its choice."""
        if self.grammar and token_id in self.end_token_ids:
            return True  # it was drawn because nothing else may follow, or because it may end
        if num_generated <= self.min_tokens:
            return False
        is_end = token_id in self.end_token_ids and not self.ignore_eos
        return is_end or token_id in self.stop_token_ids


GREEDY_BELOW = 1e-5

PLAIN_ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
LLAMA_CPP_ORDER = (
    *("penalties", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p"),
    *("xtc", "temperature"),
)
SETTINGS = {
    "penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "temperature": ("temperature", "dynatemp_range"),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "typ_p": ("typical_p",),
    "top_n_sigma": ("top_n_sigma",),
    "xtc": ("xtc_probability",),
}
"""The samplers by llama.cpp's names, and the parameters that turn each on."""

_ONLY_LLAMA_CPP = ("typical_p", "top_n_sigma", "xtc_probability", "dynatemp_range")
OFF = {name: getattr(Sampling(), name) for names in SETTINGS.values() for name in names}
"""The values with which a sampler changes nothing."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of one or more tokens, packed row by row.

    A row is the token itself, then the likeliest ones, falling, ties by id: `width` entries of
    int32 in `ids` and of float32 in `values` (natural logarithm, at least -9999).
    """

    width: int
    ids: bytes
    values: bytes

    def row(self, number: int) -> "Logprobs":
        part = slice(4 * self.width * number, 4 * self.width * (number + 1))
        return Logprobs(self.width, self.ids[part], self.values[part])
