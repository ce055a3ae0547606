"""A draft model needs the tokenizer of the model that it drafts for."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.same_tokenizer import check_same_tokenizer
from headrace_common.errors import ModelError

MINI = find_model("headrace-mini")


def changed(folder: Path, change: Any) -> Path:
    """Write a folder with a changed tokenizer of headrace-mini."""
    tokenizer = msgspec.json.decode((MINI / "tokenizer.json").read_bytes())
    change(tokenizer)
    (folder / "other").mkdir()
    (folder / "other" / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))
    return folder / "other"


def test_equal_tokenizers_are_accepted_even_if_their_files_differ(tmp_path: Path) -> None:
    check_same_tokenizer(MINI, MINI)
    check_same_tokenizer(MINI, changed(tmp_path, lambda it: it.pop("version")))


def test_another_token_is_refused_with_both_names(tmp_path: Path) -> None:
    def rename(tokenizer: dict[str, Any]) -> None:
        vocab = tokenizer["model"]["vocab"]
        token = next(token for token, token_id in vocab.items() if token_id == 300)
        vocab["another"] = vocab.pop(token)

    with pytest.raises(ModelError, match="model other does not have the tokenizer of mini: 1 tok"):
        check_same_tokenizer(MINI, changed(tmp_path, rename))


def test_a_missing_or_another_special_token_is_refused(tmp_path: Path) -> None:
    def plain(tokenizer: dict[str, Any]) -> None:
        tokenizer["added_tokens"][0]["special"] = False

    with pytest.raises(ModelError, match=r"\(special\) in mini but '.*' in other\. Use a draft"):
        check_same_tokenizer(MINI, changed(tmp_path, plain))


def test_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    def add(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["vocab"]["one more"] = 99_999

    with pytest.raises(ModelError, match="token 99999 is missing in mini but 'one more' in other"):
        check_same_tokenizer(MINI, changed(tmp_path, add))


def test_a_tokenizer_of_an_unknown_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="The tokenizer of other cannot be compared"):
        check_same_tokenizer(MINI, changed(tmp_path, lambda it: it.pop("model")))
