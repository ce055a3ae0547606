"""Builds a tokenizer.json from a GGUF file's fields. It needs only the `tokenizers` library."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as splitters

from headrace_common.checkpoints.gguf_header import GgufHeader
from headrace_common.errors import ModelError
from headrace_common.system.panics import STEERING

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # token types

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPLITS = {
    "llama-bpe": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    ),
    "qwen2": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    ),
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    ),
    "gpt-4o": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    ),
}
_SAME = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "dbrx": "llama-bpe",
    "refact": "smollm",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
}
# With these pre-tokenizers, a word that is in the vocabulary becomes one token without merges.
_WHOLE_WORDS_FIRST = ("llama-bpe", "tekken")
_NO_SPLIT_OF_ITS_OWN = ("gpt-2", "gpt2", "default")
_SPACE = "\u2581"  # SentencePiece's character for a space


def build_tokenizer(header: GgufHeader) -> Tokenizer:
    """Build the tokenizer.

    Raises ModelError if the tokenizer is missing, damaged or of an unknown kind.
    """
    try:
        return _build(header)
    except (ModelError, *STEERING):
        raise
    # Fields may have wrong types. The library is written in Rust and may panic.
    except BaseException as error:
        kept = error if isinstance(error, Exception) else None
        raise _unusable("one of its fields is missing or invalid") from kept


def _build(header: GgufHeader) -> Tokenizer:
    fields = header.fields
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise _unusable("it has no tokens")
    kinds = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise _unusable(f"it has {len(kinds)} types for {len(tokens)} tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = fields.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(fields, vocabulary)
    elif model == "llama":
        merges = _merges_by_score(fields, tokens, vocabulary, kinds)
        tokenizer = _sentence_piece(fields, tokens, vocabulary, merges)
    elif model == "gemma4":
        merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
        tokenizer = _sentence_piece(fields, tokens, vocabulary, merges)
    else:
        raise _unusable(f"its type is {model}, but only gpt2, llama and gemma4 are supported")
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    _begin_with(tokenizer, fields, tokens, by_default=model in ("llama", "gemma4"))
    return tokenizer


def _byte_level(fields: dict[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    named = fields.get("tokenizer.ggml.pre", "default")
    name = _SAME.get(named, named)
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", [])]
    try:
        bpe = models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_WORDS_FIRST)
    # The library raises a plain Exception, for example if a merge has unknown tokens.
    except Exception:
        raise _unusable("its merges are invalid") from None
    tokenizer = Tokenizer(bpe)
    if name in _NO_SPLIT_OF_ITS_OWN:
        tokenizer.pre_tokenizer = splitters.ByteLevel(add_prefix_space=False)
    elif name == "smollm":
        tokenizer.pre_tokenizer = splitters.Sequence(
            [splitters.Digits(individual_digits=True), splitters.ByteLevel(add_prefix_space=False)]
        )
    elif name in _SPLITS:
        tokenizer.pre_tokenizer = splitters.Sequence(
            [
                splitters.Split(Regex(_SPLITS[name]), "isolated"),
                splitters.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        known = ", ".join(sorted({*_SPLITS, *_SAME, "smollm", *_NO_SPLIT_OF_ITS_OWN}))
        raise _unusable(f"its pre-tokenizer is {named}, but only {known} are supported")
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


Merges = list[tuple[str, str]]


def _merges_by_score(
    fields: dict[str, Any], tokens: list[str], vocabulary: dict[str, int], kinds: list[int]
) -> Merges:
    """Derive the merges of a SentencePiece model, which has none, from its scores."""
    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise _unusable("some of its tokens have no score")
    merges = []
    for number, token in enumerate(tokens):
        if kinds[number] in (_CONTROL, _BYTE):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[number], vocabulary[left], vocabulary[right], left, right))
    merges.sort()
    return [merge[3:] for merge in merges]


def _sentence_piece(
    fields: dict[str, Any], tokens: list[str], vocabulary: dict[str, int], merges: Merges
) -> Tokenizer:
    """Build a BPE tokenizer that merges characters, not bytes, and has a character for spaces."""
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise _unusable("its unknown token is not in its vocabulary")
    bpe = models.BPE(
        vocabulary,
        merges,
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    has_prefix = fields.get(
        "tokenizer.ggml.add_space_prefix", fields["tokenizer.ggml.model"] == "llama"
    )
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps
    )
    return tokenizer


def _begin_with(
    tokenizer: Tokenizer, fields: dict[str, Any], tokens: list[str], by_default: bool
) -> None:
    number = fields.get("tokenizer.ggml.bos_token_id")
    if not fields.get("tokenizer.ggml.add_bos_token", by_default) or number is None:
        return
    if not 0 <= number < len(tokens):
        raise _unusable("its first token (bos_token_id) is not in its vocabulary")
    token = tokens[number]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, number)]
    )


def _unusable(why: str) -> ModelError:
    return ModelError(
        f"The tokenizer of the GGUF file cannot be used: {why}; use the model's safetensors files.",
        "tokenizer_invalid",
    )
