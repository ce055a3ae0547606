"""The page about the command line says what the command says."""

from tools.make_cli_docs import PAGE, page


def test_the_page_is_what_help_says_now() -> None:
    assert PAGE.read_text() == page(), "run: python -m tools.make_cli_docs"


def test_every_verb_has_its_section() -> None:
    for verb in ("serve", "chat", "generate", "doctor", "bench"):
        assert f"## `headrace {verb}" in page()
