"""The first minutes: an empty page that says what is there, and a keyboard that does all of it."""

from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.web.page import Page, eventually
from tests.web.test_composer import field
from tests.web.test_everybody import focus, press, violations

REFUSE = """
const send = window.fetch;
window.fetch = async (url, options) => {
  if (!String(url).includes("/chat/completions") || window.isOpen) return send(url, options);
  const error = { code: "server_overloaded", message: "130 requests wait" };
  return Response.json({ error }, { status: 429, headers: { "Retry-After": "9" } });
};
"""
TOASTS = """
window.toasts = [];
const take = ({ addedNodes }) => addedNodes.forEach(({ className, textContent }) =>
  className === "toast" && toasts.push(textContent));
const watch = new MutationObserver((all) => all.forEach(take));
watch.observe(document.getElementById("toasts"), { childList: true });
"""


def hold(page: Page, *keys: str) -> None:
    chain = ActionChains(page.driver)
    for key in keys[:-1]:
        chain.key_down(key)
    chain.send_keys(keys[-1])
    for key in reversed(keys[:-1]):
        chain.key_up(key)
    chain.perform()


def is_open(page: Page, css: str) -> Any:
    return page.driver.execute_script("return document.querySelector(arguments[0]).open", css)


def test_an_empty_page_says_what_the_model_can_do(page: Page) -> None:
    wanted = ["4,096 tokens of context", "can think first", "can call tools"]
    eventually(lambda: page.texts(".can li") == wanted)
    assert page.texts(".welcome h2") == ["headrace-mini"]
    about = "A tiny built-in test model: it can count, spell, add and call tools"
    assert page.texts(".welcome .about") == [about]
    assert focus(page) == "input" and len(page.texts(".starters button")) == 4
    page.find(".starters button").click()
    assert field(page) == page.texts(".starters span")[0]
    assert focus(page) == "input"


RIGHT = (
    ", ".join(map(str, range(1, 21))),
    "b-a-n-a-n-a",
    "23 + 45 = 68",
    "get_weather",
)


@pytest.mark.parametrize("number", range(4))
def test_each_card_of_the_built_in_model_gets_a_right_answer(page: Page, number: int) -> None:
    eventually(lambda: len(page.texts(".starters button")) == 4)
    page.driver.find_elements(By.CSS_SELECTOR, ".starters button")[number].click()
    page.find("#input").send_keys(Keys.ENTER)
    assert page.wait_for_end()["outcome"] == "done"
    assert RIGHT[number] in "".join(page.texts(".message.assistant"))


def test_the_first_page_leads_to_a_model_that_can_talk(page: Page) -> None:
    eventually(lambda: page.texts(".welcome .primary") == ["Get another model"])
    page.find(".welcome .primary").click()
    eventually(lambda: is_open(page, "#pulls"))
    assert violations(page) == []


def test_shortcuts_do_what_their_list_says(page: Page) -> None:
    page.send("Spell the word banana.")
    page.wait_for_end()
    hold(page, Keys.CONTROL, "k")
    assert focus(page) == "search"
    hold(page, Keys.CONTROL, Keys.SHIFT, "o")
    eventually(lambda: page.texts("#title") == ["New conversation"] and focus(page) == "input")
    hold(page, Keys.CONTROL, "/")
    eventually(lambda: is_open(page, "#shortcuts"))
    assert len(page.texts("#shortcuts dt")) == 8 and violations(page) == []
    press(page, Keys.ESCAPE)
    eventually(lambda: not is_open(page, "#shortcuts"))
    page.find("#list .open").click()
    eventually(lambda: page.texts(".message.user .body"))
    page.find("#input").send_keys(Keys.ARROW_UP)
    edited = "return document.activeElement.value"
    eventually(lambda: page.driver.execute_script(edited) == "Spell the word banana.")


def test_a_busy_server_is_amber_and_says_when_it_is_tried_again(page: Page) -> None:
    page.driver.execute_script(REFUSE)
    page.send("Spell the word banana.")
    eventually(lambda: "The server is busy. Trying again in" in "".join(page.texts(".mends")))
    seconds = page.texts(".mends")[0]
    eventually(lambda: page.texts(".mends")[0] != seconds)
    assert page.texts(".status .trouble") == [] and violations(page) == []
    page.driver.execute_script("window.isOpen = true")
    assert page.wait_for_end()["outcome"] == "done"


def test_a_server_that_is_away_is_told_while_nothing_runs(page: Page) -> None:
    eventually(lambda: page.texts("#presence") == ["Connected"])
    page.driver.execute_script(TOASTS)
    page.offline(True)
    eventually(lambda: "The server cannot be reached" in page.find("#away").text)
    assert page.texts("#presence") == ["No connection"] and violations(page) == []
    page.offline(False)
    eventually(lambda: not page.find("#away").is_displayed())
    eventually(lambda: page.driver.execute_script("return toasts") == ["Reconnected."])
    assert page.texts("#presence") == ["Connected"]
