"""The generated pages of the reference say what the code says."""

import pytest

from tools.make_reference_docs import PAGES, Page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)
def test_a_generated_page_is_current(page: Page) -> None:
    assert page.path.read_text() == page.render(), "run: python -m tools.make_reference_docs"
