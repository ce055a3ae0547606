"""Small tokenizers of every kind that models use, trained here on a few lines of text."""

import json
from collections.abc import Callable
from functools import cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from headrace.text import tokenizer

CORPUS = (
    "The quick brown fox jumps over the lazy dog, isn't it? We'll see what they've done.",
    "def feed(self, token_id: int) -> str:\n    return self.pending\n\n\tif x == 10:  # why?\n",
    "In 1984 there were 1,234,567 of them; 3.14159 is not 22/7, and 1000000 is 10^6.",
    "Der Bürgermeister hört süße Flöten. L'été, où êtes-vous ? ¿Qué pasó mañana?",
    "日本語のテキストです。漢字かな交じり文。中文文本也在这里。 한국어도 있습니다.",
    "Ελληνικά και кириллица, עברית, العربية, हिन्दी में पाठ।",
    "😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️ and   spaces    of      many lengths\r\n\r\n  end.",
)
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
DIGITS_FROM_THE_RIGHT = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))")


def _byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizer
    built.decoder = decoders.ByteLevel()
    _train_bpe(built, pre_tokenizers.ByteLevel.alphabet())
    return built


def _train_bpe(built: Tokenizer, alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    built.train_from_iterator(CORPUS, trainer)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, whole])


def gpt2() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def prefix_space() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))


def llama3() -> Tokenizer:
    built = _byte_level(_split(LLAMA3))
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", built.token_to_id("<s>"))]
    )
    return built


def qwen() -> Tokenizer:
    built = _byte_level(_split(QWEN))
    built.normalizer = normalizers.NFC()
    return built


def digits_from_the_right() -> Tokenizer:
    return _byte_level(_split(DIGITS_FROM_THE_RIGHT))


def _byte_fallback() -> Tokenizer:
    """Return a trained BPE with tokens for the 256 bytes, which a trainer does not add."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    tokens = [*SPECIALS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=tokens, limit_alphabet=80, show_progress=False
    )
    built.train_from_iterator(CORPUS, trainer)
    return built


def _with_bytes(trained: Tokenizer) -> Tokenizer:
    """Return the vocabulary with byte fallback; only the real special tokens are special."""
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    bpe = models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    built = Tokenizer(bpe)
    built.add_special_tokens([*SPECIALS, "<unk>"])
    return built


def _spaces_to_marks(split: bool, scheme: str) -> Callable[[], Tokenizer]:
    def build() -> Tokenizer:
        built = _with_bytes(_byte_fallback())
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
        built.decoder = _llama_decoder()
        return built

    return build


def _llama_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


def llama2() -> Tokenizer:
    """Has no pre-tokenizer. A normalizer replaces spaces, so the whole text is one word."""
    built = _with_bytes(_byte_fallback())
    built.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    built.decoder = _llama_decoder()
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", built.token_to_id("<s>"))]
    )
    return built


def gemma() -> Tokenizer:
    """Like llama2, but adds no space in front of the text."""
    built = _with_bytes(_byte_fallback())
    built.normalizer = normalizers.Replace(" ", "▁")
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return built


def unigram() -> Tokenizer:
    built = Tokenizer(models.Unigram())
    built.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=[*SPECIALS, "<unk>"], unk_token="<unk>", show_progress=False
    )
    built.train_from_iterator(CORPUS, trainer)
    built.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", built.token_to_id("</s>"))]
    )
    return built


def wordpiece() -> Tokenizer:
    built = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer(lowercase=True)
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece()
    specials = ["[UNK]", "[CLS]", "[SEP]", *SPECIALS]
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=specials, show_progress=False
    )
    built.train_from_iterator(CORPUS, trainer)
    built.post_processor = processors.BertProcessing(
        ("[SEP]", built.token_to_id("[SEP]")), ("[CLS]", built.token_to_id("[CLS]"))
    )
    return built


def joined_words() -> Tokenizer:
    """Has no pre-tokenizer, and merges across spaces, so that a text cannot be divided."""
    built = Tokenizer(models.BPE())
    built.normalizer = normalizers.Replace(" ", "▁")
    built.decoder = decoders.Replace("▁", " ")
    _train_bpe(built, [])
    return built


def single_digits() -> Tokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), whole]))


def stripped_unigram() -> Tokenizer:
    """Removes spaces at both ends of a text."""
    built = unigram()
    built.normalizer = normalizers.Sequence([normalizers.Strip(), built.normalizer])
    return built


def _with_added(build: Callable[[], Tokenizer]) -> Callable[[], Tokenizer]:
    return lambda: _add(build())


def _add(built: Tokenizer) -> Tokenizer:
    """Adds tokens that absorb adjacent spaces, match only whole words, or are normalized."""
    built.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<r>", rstrip=True)])
    built.add_tokens([AddedToken("lot", single_word=True), AddedToken("süß", normalized=True)])
    return built


BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": gpt2,
    "llama3": llama3,
    "qwen": qwen,
    "prefix_space": prefix_space,
    "digits_from_the_right": digits_from_the_right,
    "metaspace_first": _spaces_to_marks(True, "first"),
    "metaspace_always": _spaces_to_marks(True, "always"),
    "metaspace_no_split": _spaces_to_marks(False, "first"),
    "llama2": llama2,
    "gemma": gemma,
    "unigram": unigram,
    "wordpiece": wordpiece,
    "stripped_unigram": stripped_unigram,
    "joined_words": joined_words,
    "single_digits": single_digits,
    "added_qwen": _with_added(qwen),
    "added_gpt2": _with_added(gpt2),
    "added_metaspace": _with_added(_spaces_to_marks(True, "always")),
    "added_llama2": _with_added(llama2),
    "added_unigram": _with_added(unigram),
    "added_wordpiece": _with_added(wordpiece),
}
KINDS = sorted(BUILDERS)


@cache
def library(kind: str) -> Tokenizer:
    """Return the tokenizers library's own tokenizer, whose results count as correct."""
    return BUILDERS[kind]()


@cache
def ours(kind: str) -> tokenizer.Tokenizer:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "x"}
    return tokenizer.Tokenizer(library(kind).to_str().encode(), config)
