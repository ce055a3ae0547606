"""Texts keep their ids if a trained tokenizer encodes them in pieces."""

from itertools import islice
from pathlib import Path

from headrace.text.encoder import Encoder
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_probes import hard_texts
from headrace_common.checkpoints.find import find_model
from tests.text.test_known_pieces import SMALL, encoded


def test_texts_with_special_tokens_keep_their_ids(smollm2_file: Path) -> None:
    tokenizer = Tokenizer.load(find_model(str(smollm2_file)))
    encoder = Encoder(tokenizer, SMALL)
    assert "<|im_start|>" in tokenizer.cut_marks
    for text in islice(hard_texts(9, sorted(tokenizer.cut_marks)), 200):
        for _ in ("new", "known"):
            assert encoded(encoder, text) == list(tokenizer.encode(text, False)), repr(text)
