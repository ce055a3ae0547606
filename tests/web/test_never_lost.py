"""The page comes back to its answers, whatever happens to it, the network and the engine."""

import contextlib
import os
import random
import time

import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.keys import Keys

from tests.web.page import SAID, Page, eventually
from tests.web.test_composer import field
from tests.web.test_files import CHIPS, give

SLOW_UPLOAD = """
const done = arguments[arguments.length - 1];
import("/web/follow.js").then(async ({ Follower }) => {
  const [send, now] = [window.fetch, Date.now];
  const ends = [];
  let late = 0;
  Date.now = () => now() + late;
  window.fetch = (url, options) => !String(url).includes("/chat/") ? send(url, options) :
    new Promise((_, end) => options.signal.addEventListener("abort", () =>
      (ends.push(late), end(options.signal.reason))));
  const told = [];
  const answer = { id: "a", live: 1, stream: null, key: "k", body: "x".repeat(5_000_000) };
  const note = ({ status }) => told.push(status.trouble.code);
  const follower = new Follower(answer, note, () => true);
  follower.run();
  for (late of [30_000, 250_000, 400_000]) await new Promise((next) => setTimeout(next, 600));
  follower.close();
  [window.fetch, Date.now] = [send, now];
  done([ends.slice(0, 1), told.slice(0, 1)]);
});
"""
"""How late the sending of 5 MB was given up, and what was told then."""

FULL = """
window.put = IDBObjectStore.prototype.put;
IDBObjectStore.prototype.put = function () { try { this.transaction.abort(); } catch {} };
"""
ROOM = "IDBObjectStore.prototype.put = window.put"

SEED = int(os.environ.get("SEED", "0")) or random.randrange(1 << 30)
RUNS = int(os.environ.get("RUNS", "2"))


def disturb(page: Page, what: str, dice: random.Random) -> None:
    match what:
        case "reload":
            page.open(page.driver.execute_script("return '/' + location.hash"))
            page.driver.refresh()
        case "offline":
            page.offline(True)
            time.sleep(dice.uniform(0.2, 1.5))
            page.offline(False)
        case "engine":
            page.server.kill_engine()
        case "server":
            page.server.restart()


@pytest.mark.parametrize("run", range(RUNS))
def test_an_answer_survives_all_of_it(page: Page, run: int) -> None:
    dice = random.Random(SEED + run)
    print("seed", SEED + run)
    page.send("Count from 1 to 150.")
    if run:
        page.wait_for_text()
    kinds = ["reload", "offline", "engine", "server"]
    dice.shuffle(kinds)
    for what in kinds:
        time.sleep(dice.uniform(0, 0.5))
        disturb(page, what, dice)
    answer = page.wait_for_end(120)
    assert answer["outcome"] == "done"
    assert answer["text"] == page.log_text(answer)
    assert len(page.answers()) == 1
    eventually(lambda: page.texts(".message.assistant .body") == [answer["text"]])


def test_the_page_says_that_the_engine_restarts(page: Page) -> None:
    page.driver.execute_script(SAID)
    page.send("Count from 1 to 150.")
    page.wait_for_text()
    page.server.kill_engine()
    answer = page.wait_for_end(120)
    assert answer["outcome"] == "done" and answer["text"] == page.log_text(answer)
    said = page.driver.execute_script("return [...window.said]")
    assert any(text.startswith("The engine is restarting (attempt 1, ") for text in said), said


def test_an_answer_survives_the_server(page: Page) -> None:
    page.send("Count from 1 to 150.")
    page.wait_for_text()
    page.server.restart()
    answer = page.wait_for_end(120)
    assert answer["text"] == page.log_text(answer)


@pytest.mark.skipif(
    os.environ.get("BROWSER") == "firefox", reason="its driver goes with a page that crashes"
)
def test_a_page_that_crashes_has_lost_nothing(page: Page) -> None:
    """Neither what was typed, nor what was attached, nor what was running."""
    driver = page.driver
    page.send("Count from 1 to 150.")
    page.wait_for_text()
    give(page, "paste", "notes.txt", b"the wheel turns")
    page.find("#input").send_keys("And then?")
    eventually(lambda: page.texts(CHIPS) == ["notes.txt"])
    first, url = driver.current_window_handle, driver.current_url
    driver.switch_to.new_window("tab")
    other = driver.current_window_handle
    driver.switch_to.window(first)
    with contextlib.suppress(WebDriverException):
        driver.execute_cdp_cmd("Page.crash", {})
    driver.switch_to.window(other)
    page.open(url=url, path="")
    assert field(page) == "And then?"
    eventually(lambda: page.texts(CHIPS) == ["notes.txt"])
    answer = page.wait_for_end(120)
    assert answer["outcome"] == "done" and answer["text"] == page.log_text(answer)


def test_two_tabs_show_the_same(page: Page) -> None:
    driver = page.driver
    page.send("Count from 1 to 150.")
    page.wait_for_text()
    first, url = driver.current_window_handle, driver.current_url
    driver.switch_to.new_window("tab")
    page.open(url=url, path="")
    page.wait_for_text()
    answer = page.wait_for_end(120)
    assert answer["text"] == page.log_text(answer)
    eventually(lambda: page.texts(".message.assistant .body") == [answer["text"]])
    driver.close()
    driver.switch_to.window(first)
    eventually(lambda: page.texts(".message.assistant .body") == [answer["text"]])


def test_a_page_that_is_opened_anew_comes_back_to_the_running_answer(page: Page) -> None:
    page.send("Count from 1 to 150.")
    page.wait_for_text()
    page.open()
    page.wait_for_text()
    answer = page.wait_for_end(120)
    assert answer["text"] == page.log_text(answer)
    eventually(lambda: page.texts(".message.assistant .body") == [answer["text"]])
    page.driver.get("about:blank")
    page.open()
    assert page.texts(".message.assistant .body") == []


def test_conversations_run_at_once_and_are_never_mixed(page: Page) -> None:
    asked = ["Count from 1 to 100.", "Spell the word banana.", "Count from 1 to 60."]
    for text in asked:
        page.find("#new").click()
        eventually(lambda: not page.texts(".message"))
        page.send(text)
        eventually(lambda: page.texts(".message"))
    assert page.driver.execute_script("return document.querySelectorAll('.mark').length") >= 1
    page.driver.refresh()
    page.wait_for_end(120)
    by_id = {one["id"]: one for one in page.stored()}
    answers = page.answers()
    assert [by_id[one["parent"]]["text"] for one in answers] == asked
    for answer in answers:
        assert answer["text"] == page.log_text(answer)
    eventually(lambda: not page.texts(".mark"))


def test_a_large_message_has_its_time_to_be_sent(page: Page) -> None:
    found = page.driver.execute_async_script(SLOW_UPLOAD)
    assert found == [[400_000], ["unreachable"]]


def test_what_the_browser_does_not_keep_stays_in_the_field(page: Page) -> None:
    def is_told() -> bool:
        return page.find("#notice").text.startswith("This browser cannot save messages")

    page.driver.execute_script(FULL)
    page.send("Count from 1 to 60.")
    eventually(is_told)
    eventually(lambda: field(page) == "Count from 1 to 60.")
    assert page.find("#send").is_displayed() and not page.texts(".message")
    page.driver.execute_script(ROOM + SAID)
    page.find("#input").send_keys(Keys.ENTER)
    page.wait_for_text()
    assert not is_told()
    page.driver.execute_script(FULL)
    eventually(lambda: page.texts("#news") == ["The answer is complete."])
    assert is_told() and not page.stored()[-1].get("outcome")
    said = page.driver.execute_script("return [...window.said]")
    assert not any("cannot be reached" in text for text in said), said
    page.driver.refresh()
    answer = page.wait_for_end()
    assert answer["outcome"] == "done" and answer["text"] == page.log_text(answer)
