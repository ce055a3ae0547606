"""Defines how tokens are drawn and when an answer ends."""

from typing import Literal

import msgspec

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last", "score"]
"""How the rows of a prompt become one vector. A row is the model's output for one token.

`max` and the means use all rows. mean_sqrt_len divides the sum of the rows by the square root of
their number. weightedmean gives the rows the weights 1, 2, 3 and so on.
"""


class Pooling(msgspec.Struct, frozen=True):
    """How the rows of a prompt become one vector, for a sequence that draws no tokens.

    The vectors of several modes are joined. `score` must be the only mode. Its vector is the
    unchanged output of a classification head for the last row.
    """

    modes: tuple[PoolingMode, ...]
    num_first: int = 0  # tokens of a pair's first text

    @property
    def needs_whole(self) -> bool:
        """Whether all rows of the prompt are needed. If so, no token may come from the cache."""
        return not {"last", "score"}.issuperset(self.modes)

    def num_rows(self, start: int, end: int, total: int) -> int:
        """Return how many rows at the end of the chunk [start, end) are needed.

        `total` is the number of the prompt's tokens.
        """
        if not {"last", "score", "cls"}.issuperset(self.modes):
            return end - start
        if "cls" in self.modes and start == 0:
            return end
        return int(end == total and self.modes != ("cls",))


class Breaker(msgspec.Struct, frozen=True, array_like=True):
    """A way to write a DRY sequence breaker: a token of `heads`, followed by the tokens of `tail`.

    `heads` has the ids of the tokens that contain the start of the breaker, in ascending order. The
    ids are stored as differences between successive ids, in int32 and compressed with zlib. `tail`
    is empty if each of these tokens contains the whole breaker.
    """

    tail: tuple[int, ...]
    heads: bytes


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampling parameters of a request, with all defaults. All choices use the same values.

    The order of operations is: logits + bias; repetition, frequency and presence penalty; mask of
    end tokens and of tokens that the grammar forbids. Then comes argmax if greedy, else
    temperature, top_k, top_p, min_p and one draw. If `samplers` is not empty, the named samplers
    run between the mask and the draw instead, in the order of `samplers`.

    The default of a new field must turn its sampler off. Then a request that was stored by an
    earlier version draws the same tokens.
    """

    # Below GREEDY_BELOW, the likeliest token is chosen. Among equally likely tokens, the token with
    # the lowest id is chosen.
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = -1  # number of last tokens that the penalties count; -1: all
    typical_p: float = 1.0
    top_n_sigma: float = -1.0  # -1: off
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    min_keep: int = 0  # minimum number of candidates that top_p, min_p, typ_p and xtc keep
    # Samplers by their names in llama.cpp. If the tuple is empty, the faster PLAIN_ORDER applies.
    samplers: tuple[str, ...] = ()
    logit_bias: dict[int, float] = {}
    # Any int64. Token i of choice k is drawn with Philox: seed is the key, (i, k) is the counter.
    seed: int = 0
    # None: as many tokens as fit into the context. 0: only the prompt is processed.
    max_tokens: int | None = None
    # With fewer tokens, a choice ends only at the length limit or where its grammar must end.
    min_tokens: int = 0
    # The end tokens of the model. They are masked before min_tokens, and always with ignore_eos.
    end_token_ids: tuple[int, ...] = ()
    # The client's tokens that end a choice. Unlike end tokens, they are never masked.
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # The number of likeliest tokens that are reported with each sampled token. None: no report.
    num_logprobs: int | None = None
    # The same number for each token of the prompt except the first.
    num_prompt_logprobs: int | None = None
    grammar: str = ""  # in the format of llguidance; "": no grammar
    # Ids of the tokens before and after reasoning. Reasoning may precede the text that the
    # grammar constrains.
    grammar_tags: tuple[int, int] | None = None
    # The prompt has already opened reasoning, so the grammar starts when the reasoning ends.
    grammar_waits: bool = False
    # Set if the sequence computes a vector instead of drawing tokens.
    pooling: Pooling | None = None
    # Whether speculative decoding is allowed. It never changes the drawn tokens.
    guess: bool = True
    mirostat: int = 0  # 0: off; else version 1 or 2
    mirostat_tau: float = 5.0  # target surprise, in bits
    mirostat_eta: float = 0.1  # learning rate
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    # The length of the shortest penalized repetition. Its penalty is dry_multiplier.
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # number of last tokens that are searched; -1: all
    # The breakers as the client sent them.
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    # The same breakers as tokens of the model.
    dry_breakers: tuple[Breaker, ...] = ()

    @property
    def is_greedy(self) -> bool:
        # Other samplers may remove the likeliest token before the temperature is applied.
        return self.temperature < GREEDY_BELOW and not self.samplers

    def in_order(self, order: tuple[str, ...] | None) -> "Sampling":
        """Return these parameters with the samplers in this order. Samplers not in `order` are off.

        If `order` is None, parameters in _ONLY_LLAMA_CPP select llama.cpp's order. With Mirostat,
        `order` is ignored: only the temperature runs before Mirostat, as in llama.cpp.
        """
        if self.mirostat:
            order = ("temperature", "mirostat")
            return msgspec.structs.replace(self._with_only(order), dynatemp_range=0.0)
        if order is not None:
            return self._with_only(order)
        if any(getattr(self, name) != OFF[name] for name in _ONLY_LLAMA_CPP):
            return self._with_only(LLAMA_CPP_ORDER)
        if self.min_keep > 1:
            return self._with_only(PLAIN_ORDER)
        return self

    def _with_only(self, order: tuple[str, ...]) -> "Sampling":
        if not self.dry_multiplier:
            order = tuple(name for name in order if name != "dry")
        off = {name: OFF[name] for key in SETTINGS.keys() - set(order) for name in SETTINGS[key]}
        return msgspec.structs.replace(self, samplers=order, **off)

    def masks_ends(self, num_generated: int) -> bool:
        """Whether end tokens are masked for token number `num_generated`, counted from 0."""
        return self.ignore_eos or num_generated < self.min_tokens

    def ends_with(self, token_id: int, num_generated: int) -> bool:
        """Whether the token ends its choice.

        `num_generated` is the number of the choice's tokens, this token included.
        """
        if self.grammar and token_id in self.end_token_ids:
            # The grammar allows an end token only where the answer may or must end.
            return True
        if num_generated <= self.min_tokens:
            return False
        is_end = token_id in self.end_token_ids and not self.ignore_eos
        return is_end or token_id in self.stop_token_ids


GREEDY_BELOW = 1e-5

PLAIN_ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
LLAMA_CPP_ORDER = (
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p"),
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
    "dry": ("dry_multiplier", "dry_breakers"),
}
"""The parameters that turn each sampler on, by the sampler's name in llama.cpp."""

_ONLY_LLAMA_CPP = (
    *(name for sampler in SETTINGS.keys() - set(PLAIN_ORDER) for name in SETTINGS[sampler]),
    "dynatemp_range",
)
OFF = {name: getattr(Sampling(), name) for names in SETTINGS.values() for name in names}
"""Parameter values with which the samplers change nothing."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of one or more tokens, packed row by row.

    A row has the token itself, then the likeliest tokens in descending order, ties by id. Each row
    has `width` entries, as int32 in `ids` and as float32 in `values`. Values are natural
    logarithms, at least -9999.
    """

    width: int
    ids: bytes
    values: bytes

    def row(self, number: int) -> "Logprobs":
        part = slice(4 * self.width * number, 4 * self.width * (number + 1))
        return Logprobs(self.width, self.ids[part], self.values[part])
