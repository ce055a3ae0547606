"""Checks that a draft model has the same tokenizer as the model that it drafts for."""

from pathlib import Path

import msgspec

from headrace_common.checkpoints.small_file import read_small
from headrace_common.checkpoints.tokenizer_file import MAX_FILE, tokenizer_file
from headrace_common.errors import ModelError


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Vocabulary(msgspec.Struct):
    # Maps tokens to ids, or lists a pair of token and score for each id.
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokensJson(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def check_same_tokenizer(folder: Path, draft: Path) -> None:
    """Raise ModelError if the vocabularies or the special tokens of the two models differ."""
    (ours, special), (theirs, their_special) = map(_tokens, (folder, draft))
    if ours == theirs and special == their_special:
        return
    differing = [i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)]
    differing += special ^ their_special
    first = min(differing)
    raise ModelError(
        f"The draft model {draft.name} does not have the tokenizer of {folder.name}: "
        f"{len(differing)} tokens differ, and token {first} is {_told(first, ours, special)} in "
        f"{folder.name} but {_told(first, theirs, their_special)} in {draft.name}. Use a draft "
        "model of the same family."
    )


def _tokens(folder: Path) -> tuple[dict[int, str], set[int]]:
    """Return the token of each id, and the ids of the special tokens."""
    try:
        read = msgspec.json.decode(read_small(tokenizer_file(folder), MAX_FILE), type=_TokensJson)
    except msgspec.MsgspecError as error:
        raise ModelError(
            f"The tokenizer of {folder.name} cannot be compared: {error}. Use a draft model whose "
            "tokenizer.json is in the format of the tokenizers library."
        ) from None
    vocab = read.model.vocab
    if isinstance(vocab, dict):
        tokens = {token_id: token for token, token_id in vocab.items()}
    else:
        tokens = {token_id: token for token_id, (token, _) in enumerate(vocab)}
    tokens |= {each.id: each.content for each in read.added_tokens}
    return tokens, {each.id for each in read.added_tokens if each.special}


def _told(token_id: int, tokens: dict[int, str], special: set[int]) -> str:
    if token_id not in tokens:
        return "missing"
    return f"{tokens[token_id]!r}" + (" (special)" if token_id in special else "")
