"""More than the text of an answer: thoughts, calls, data, and how sure the model was."""

import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.web.page import MODELS, Page, eventually, new_driver
from tests.web.replay import Replay
from tests.web.server import Server
from tests.web.test_chat import click
from tests.web.test_everybody import press, tab_to

DATA = {"name": "Ann", "tags": ["a", "b"], "more": {"deep": {"deeper": {"n": 1}}}, "none": None}
CALL = {
    "index": 0,
    "id": "c1",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}

AGAIN = "[aria-label='Regenerate with another model']"


@pytest.fixture
def replayed(page: Page) -> Iterator[tuple[Page, Replay]]:
    replay = Replay(page.server.url, [])
    page.open(url=replay.url)
    yield page, replay
    page.driver.get("about:blank")
    replay.stop()


def answer(replayed: tuple[Page, Replay], *pieces: Any) -> Page:
    page, replay = replayed
    replay.pieces = list(pieces)
    page.send("Say it.")
    page.wait_for_end()
    return page


def test_thoughts_are_folded_and_have_their_time(replayed: tuple[Page, Replay]) -> None:
    thoughts = [{"reasoning_content": "I "}, {"reasoning_content": "wonder."}]
    page = answer(replayed, *thoughts, "It ", "is so.")
    eventually(lambda: page.texts(".assistant .thinking summary") == ["Thought for 2.0 s"])
    assert not page.find(".assistant .thinking pre").is_displayed()
    page.find(".assistant .thinking summary").click()
    assert page.find(".assistant .thinking pre").text == "I wonder."
    page.driver.refresh()
    eventually(lambda: page.texts(".assistant .thinking summary") == ["Thought for 2.0 s"])


def test_a_tool_call_is_a_card(replayed: tuple[Page, Replay]) -> None:
    page = answer(replayed, {"tool_calls": [CALL]})
    eventually(lambda: page.texts(".card .tree .leaf") == ['city: "Oslo"'])
    assert page.texts(".card summary strong") == ["get_weather"]


def test_data_is_a_tree_whose_branches_open(replayed: tuple[Page, Replay]) -> None:
    text = json.dumps(DATA)
    page = answer(replayed, *text)
    eventually(lambda: page.texts(".body > .tree"))
    assert page.texts(".tree .hl-attr")[:4] == ["name", "tags", "0", "1"]
    assert "deeper" not in page.texts(".tree .hl-attr")
    page.driver.find_elements("css selector", ".tree details:not([open]) > summary")[0].click()
    eventually(lambda: "deeper" in page.texts(".tree .hl-attr"))
    assert page.answers()[-1]["text"] == text  # which is what is copied


def test_what_only_begins_like_data_is_text(replayed: tuple[Page, Replay]) -> None:
    page = answer(replayed, '{"a', '": 1} is *all*')
    eventually(lambda: page.texts(".body > p em") == ["all"])
    assert not page.texts(".tree")


def test_an_answer_is_made_anew_by_another_model(replayed: tuple[Page, Replay]) -> None:
    page, replay = replayed
    assert not page.texts(AGAIN)
    replay.models = ["ann", "bob"]
    page.driver.refresh()
    eventually(lambda: page.texts(MODELS) == ["ann", "bob"])
    answer(replayed, "It is so.")
    eventually(lambda: page.texts(AGAIN))
    page.find(AGAIN).click()
    assert page.texts(".popup button") == ["bob"]
    click(page, ".popup", "bob")
    eventually(lambda: len(page.answers()) == 2)
    page.wait_for_end()
    asked = [body for body in replay.asked if body.get("stream")]  # others count tokens
    assert [body["model"] for body in asked] == ["ann", "bob"]
    assert asked[0]["messages"] == asked[1]["messages"]
    eventually(lambda: "2 of 2" in page.texts(".message.assistant .foot")[0])
    assert page.find("#model").get_attribute("value") == "ann"


def test_the_tokens_of_an_answer_show_how_sure_the_model_was(page: Page) -> None:
    page.send("Spell the word banana.")
    told = page.wait_for_end()
    eventually(lambda: any("Confidence" in text for text in page.texts(".foot")))
    click(page, ".message.assistant", "Confidence")
    eventually(lambda: page.texts(".tokens"))
    assert page.texts(".tokens") == [told["text"]]
    assert len(page.texts(".tokens span")) == told["timings"]["predicted_n"] - 1  # but its end
    page.find(".tokens").send_keys(Keys.ARROW_RIGHT)
    assert " %" in page.texts(".detail")[0] and page.texts(".tokens .chosen")
    click(page, ".message.assistant", "Confidence")
    assert not page.texts(".tokens") and page.find(".message.assistant .body").is_displayed()


SEEN = """
const first = document.querySelector(".message.assistant .foot");
const last = document.querySelector(".message.assistant:last-child .foot");
return [first, last].map((foot) => getComputedStyle(foot).opacity);
"""


def test_only_the_last_answer_shows_its_figures_and_actions_at_rest(page: Page) -> None:
    for number in range(2):
        page.send("Spell the word banana.")
        eventually(lambda n=number: len(page.answers()) == n + 1 and page.wait_for_end())
        eventually(lambda: "tokens/s" in page.texts(".message:last-child .foot")[0])
    seen = partial(page.driver.execute_script, SEEN)
    pointer = ActionChains(page.driver)
    pointer.move_to_element(page.find("#input")).perform()
    eventually(lambda: seen() == ["0", "1"])
    pointer.move_to_element(page.find(".message.assistant .body")).perform()
    eventually(lambda: seen() == ["1", "1"])
    pointer.move_to_element(page.find("#input")).perform()
    eventually(lambda: seen() == ["0", "1"])
    page.driver.execute_script("document.getElementById('thread').focus()")
    tab_to(page, "Copy message")  # of the question
    press(page, Keys.TAB)
    assert seen() == ["0", "1"]
    tab_to(page, "Copy message")  # of its answer
    assert seen() == ["1", "1"]


@pytest.mark.skipif(os.environ.get("BROWSER") == "firefox", reason="it cannot pretend to touch")
def test_a_tap_on_an_answer_shows_its_actions(server: Server) -> None:
    driver = new_driver()  # of its own: one that touches cannot hover again
    driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        page = Page(driver, server)
        page.open()
        for number in range(2):
            page.send("Spell the word banana.")
            eventually(lambda n=number: len(page.answers()) == n + 1 and page.wait_for_end())
        seen = partial(driver.execute_script, SEEN)
        eventually(lambda: seen() == ["0", "1"])
        tap(page, ".message.assistant .body")
        eventually(lambda: seen() == ["1", "1"])
        tap(page, ".message:last-child .body")
        eventually(lambda: seen() == ["0", "1"])
    finally:
        driver.quit()


def tap(page: Page, css: str) -> None:
    box = page.find(css).rect
    point = {"x": box["x"] + 5, "y": box["y"] + 5}
    for kind, points in (("touchStart", [point]), ("touchEnd", [])):
        given = {"type": kind, "touchPoints": points}
        page.driver.execute_cdp_cmd("Input.dispatchTouchEvent", given)
