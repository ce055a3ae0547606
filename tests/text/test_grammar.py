"""Tests that a grammar's state depends only on the tokens of the answer."""

import json
from array import array
from typing import Any

import pytest

from headrace.text.tokenizer import Tokenizer
from headrace_common.checkpoints.find import find_model
from headrace_common.grammar import Allowed, GrammarCompiler, GrammarError
from headrace_common.sampling import Sampling

ENDS = (2, 0)
WIDTH = 1600  # more than the tokenizer has: logits may be wider
FOLDER = find_model("headrace-mini")
TOKENIZER = Tokenizer.load(FOLDER)
THINK, THOUGHT = 1530, 1531


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.load(FOLDER, WIDTH, ENDS)


def lark(rules: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": rules}]})


def allowed(compiler: GrammarCompiler, rules: str, text: str = "", **fields: Any) -> Allowed:
    sampling = Sampling(grammar=rules, end_token_ids=ENDS, **fields)
    answer = TOKENIZER.encode(text, add_special_tokens=False)
    return compiler.compile(lark(rules)).begin(sampling).allowed(answer)


def texts(found: Allowed) -> set[str]:
    return {TOKENIZER.token_text(i) for i in found.nonzero()[0].tolist()}


def test_the_first_token_is_already_masked(compiler: GrammarCompiler) -> None:
    assert texts(allowed(compiler, 'start: "ye" "s"')) == {"y", "ye", "yes"} & texts(
        allowed(compiler, "start: /(?s:.*)/")
    )


def test_a_grammar_allows_no_special_tokens_or_ids_beyond_the_tokenizer(
    compiler: GrammarCompiler,
) -> None:
    found = allowed(compiler, "start: /(?s:.*)/")
    assert len(found) == WIDTH and not found[TOKENIZER.vocab_size :].any()
    assert not found[[1, THINK, THOUGHT]].any()


@pytest.mark.parametrize("fields", [{}, {"ignore_eos": True}, {"min_tokens": 99}])
def test_a_complete_answer_allows_only_end_tokens(
    compiler: GrammarCompiler, fields: dict[str, Any]
) -> None:
    found = allowed(compiler, 'start: "yes"', "yes", **fields)
    assert found.nonzero()[0].tolist() == sorted(ENDS)


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 99}])
def test_an_answer_that_can_be_longer_respects_min_tokens(
    compiler: GrammarCompiler, fields: dict[str, Any]
) -> None:
    assert allowed(compiler, "start: /a+/", "aa")[list(ENDS)].all()
    assert not allowed(compiler, "start: /a+/", "aa", **fields)[list(ENDS)].any()


def test_tokens_fed_at_once_or_one_by_one_give_the_same_mask(compiler: GrammarCompiler) -> None:
    rules = 'start: %json {"type": "array", "items": {"type": "boolean"}}'
    sampling = Sampling(grammar=rules, end_token_ids=ENDS)
    grammar = compiler.compile(lark(rules))
    answer = TOKENIZER.encode("[true, false", add_special_tokens=False)
    slowly = grammar.begin(sampling)
    for end in range(len(answer) + 1):
        found = slowly.allowed(answer[:end])
        assert (found == grammar.begin(sampling).allowed(answer[:end])).all()


@pytest.mark.parametrize("waits", [True, False])
def test_reasoning_is_free_until_it_ends(compiler: GrammarCompiler, waits: bool) -> None:
    fields = {"grammar_tags": (THINK, THOUGHT), "grammar_waits": waits}
    sampling = Sampling(grammar="x", end_token_ids=ENDS, **fields)
    state = compiler.compile(lark('start: "yes"')).begin(sampling)
    begun = array("i", [] if waits else [THINK])
    begun += TOKENIZER.encode("hm yes", add_special_tokens=False)
    found = state.allowed(begun)
    assert found[THOUGHT] and not found[list(ENDS)].any() and found.sum() == WIDTH - len(ENDS)
    assert texts(state.allowed(begun + array("i", [THOUGHT]))) <= {"y", "ye", "yes"}


def test_an_invalid_grammar_is_refused_in_our_words(
    compiler: GrammarCompiler,
) -> None:
    with pytest.raises(GrammarError, match="a rule that is not defined"):
        compiler.compile(lark("start: foo"))


def test_a_model_without_end_tokens_refuses_a_grammar() -> None:
    with pytest.raises(GrammarError, match="no end token"):
        GrammarCompiler.load(FOLDER, WIDTH, ())


def test_forced_tokens_spell_what_must_follow(compiler: GrammarCompiler) -> None:
    sampling = Sampling(grammar="g", end_token_ids=ENDS)
    rules = lark('start: ("name is " | "none") "water"')

    def forced(text: str) -> str:
        answer = TOKENIZER.encode(text, add_special_tokens=False)
        return TOKENIZER.decode(compiler.compile(rules).begin(sampling).forced(answer), True)

    assert forced("n") == "" and "name is water".startswith("na" + forced("na"))
    assert len(forced("na")) > 3 and forced("xyz") == ""


class Panic(BaseException):
    """A fake of PyO3's PanicException, which does not derive from Exception either."""


def test_a_panic_of_the_library_is_a_grammar_error(compiler: GrammarCompiler) -> None:
    state = compiler.compile(lark('start: "yes"')).begin(Sampling(end_token_ids=ENDS))

    class Panicking:
        def compute_bitmask(self) -> bytes:
            raise Panic

    state._matcher = Panicking()  # type: ignore[assignment]
    with pytest.raises(GrammarError, match="too complex"):
        state.allowed(array("i"))
    assert state.forced(array("i")) == ()
