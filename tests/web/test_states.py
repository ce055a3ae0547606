"""Every state of the page at two widths, light and dark: axe finds nothing, nothing is too wide.

With LOOKS, a folder, it leaves a picture of each there, for a person; without, only the narrow
width is tried.
"""

import os
from pathlib import Path

import pytest

from tests.web.page import Page
from tests.web.states import STATES
from tests.web.test_everybody import look_like, violations

LOOKS = os.environ.get("LOOKS", "")
TOO_WIDE = "return document.documentElement.scrollWidth > innerWidth"


@pytest.mark.parametrize("width", (1280, 390) if LOOKS else (390,))
@pytest.mark.parametrize("state", STATES)
def test_axe_finds_nothing(page: Page, state: str, width: int) -> None:
    look_like(page, "light", width)
    page.open()
    STATES[state](page)
    for scheme in ("light", "dark"):
        look_like(page, scheme, width)
        if LOOKS:
            page.driver.save_screenshot(str(Path(LOOKS, f"{state}-{width}-{scheme}.png")))
        assert violations(page) == [], scheme
    assert not page.driver.execute_script(TOO_WIDE)
    look_like(page, "light")
