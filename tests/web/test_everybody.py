"""The page for those who use no mouse, or have it read to them: axe, and the keyboard."""

import json
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.web.page import Page, eventually
from tests.web.test_chat import click
from tests.web.test_choices import WEATHER, choose

AXE = Path(__file__).parents[2] / "build/web-venv/node_modules/axe-core/axe.min.js"
RUN = """
const done = arguments[arguments.length - 1];
axe.run(document).then(({violations}) => done(violations.map(({id, nodes}) =>
  [id, nodes.map((node) => [node.target.join(" "), node.failureSummary])])));
"""
EVERYTHING = (
    "# Title\n\nSome *text*, `code`, [a link](https://e.example/), ~~no~~.\n\n- one\n  1. two\n\n"
    "> said\n\n```py\nx = 'a' # why\nreturn 12\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n---\nend"
    "[^1]\n\n- [ ] to do\n- [x] done\n\nOf $x^2$:\n\n$$\ny\n$$\n\n[^1]: a note"
)


def look_like(page: Page, scheme: str, width: int = 1200) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def violations(page: Page) -> Any:
    if not page.driver.execute_script("return Boolean(window.axe)"):
        page.driver.execute_script(AXE.read_text())
    return page.driver.execute_async_script(RUN)


def fill(page: Page, tmp_path: Path) -> None:
    """A conversation with one of each thing that a message can have."""
    call = {"id": "c1", "name": "get_weather", "arguments": '{"city":"Oslo"}'}
    result = {"id": "c1", "name": "get_weather", "text": "rain"}
    dot = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQ"
    messages: list[dict[str, Any]] = [
        {"role": "user", "text": "Hello", "images": [dot + "DwAFhAGAWjR9awAAAABJRU5ErkJggg=="]},
        {"role": "assistant", "calls": [call], "reasoning": "I wonder."},
        {"role": "tool", "results": [result]},
        {"role": "assistant", "text": EVERYTHING, "calls": [call]},
    ]
    for number, message in enumerate(messages):
        parent = str(number - 1) if number else None
        message |= {"id": str(number), "conversation": "c", "parent": parent, "created": number}
    conversation = {"id": "c", "title": "All of it", "created": 1, "updated": 1, "leaf": "3"}
    file = tmp_path / "filled.json"
    file.write_text(json.dumps({"conversations": [conversation], "messages": messages}))
    page.find("#file").send_keys(str(file))
    eventually(lambda: page.texts("#list li"))
    page.driver.execute_script("document.querySelector('#list button').click()")
    eventually(lambda: page.texts(".message.assistant .body"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_the_chat(page: Page, scheme: str, tmp_path: Path) -> None:
    for width in (1200, 390):
        look_like(page, scheme, width)
        page.open()
        assert violations(page) == []
        fill(page, tmp_path)
        assert violations(page) == []
        page.find("#options").click()
        assert violations(page) == []
        click(page, "#choices", "Cancel")
        page.find("#menu").click()
        assert violations(page) == []
        press(page, Keys.ESCAPE)
        page.find("#title").click()
        assert violations(page) == []
        press(page, Keys.ESCAPE)
    page.find("#open-side").click()
    assert violations(page) == []
    look_like(page, "light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_the_dashboard(page: Page, scheme: str) -> None:
    look_like(page, scheme)
    page.open("/dashboard")
    eventually(lambda: page.texts("dd"))
    page.start_load_test()
    eventually(lambda: len(page.texts("#rows strong")) == 5)
    assert violations(page) == []
    look_like(page, "light")


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.driver.switch_to.active_element.send_keys(key)


def focus(page: Page) -> str:
    return page.driver.execute_script(
        "const it = document.activeElement;"
        "return it.id || it.getAttribute('aria-label') || it.textContent"
    )


def tab_to(page: Page, wanted: str, most: int = 40) -> None:
    seen = []
    for _ in range(most):
        if (seen := [*seen, focus(page)])[-1] == wanted:
            return
        press(page, Keys.TAB)
    raise AssertionError(f"no {wanted!r} among {seen}")


def test_the_keyboard_is_enough(page: Page) -> None:
    choose(page, "#settings", tools=json.dumps([WEATHER]), temperature="0")
    page.open()
    eventually(lambda: page.texts("#model option"))
    assert focus(page) == "input"
    tab_to(page, "Skip to the message field")
    press(page, Keys.ENTER)
    tab_to(page, "input")
    press(page, "What is the weather in Oslo?", Keys.ENTER)
    page.wait_for_end()
    eventually(lambda: page.texts(".results"))
    page.driver.execute_script("document.getElementById('thread').focus()")
    tab_to(page, "Result of get_weather")
    press(page, "rain")
    tab_to(page, "Send result")
    press(page, Keys.ENTER)
    eventually(lambda: len(page.answers()) == 2)
    page.wait_for_end()
    page.open(page.driver.execute_script("return '/' + location.hash"))
    page.driver.refresh()
    tab_to(page, "title")
    press(page, Keys.ENTER, "Rain", Keys.ENTER)
    eventually(lambda: page.driver.title.startswith("Rain"))
    tab_to(page, "menu")
    press(page, Keys.ENTER, Keys.ARROW_UP)
    assert focus(page) == "Delete"
    press(page, Keys.ENTER)
    eventually(lambda: page.texts(".toast span") == ["Deleted “Rain”."])
