"""Answers that go on, messages that are edited, and the versions of both."""

import json
from pathlib import Path

from selenium.webdriver.common.keys import Keys

from tests.web.page import Page, eventually
from tests.web.test_chat import choose_from, click
from tests.web.test_choices import SENT, choose, sent

EXPORTED = """
const done = arguments[arguments.length - 1];
const create = URL.createObjectURL;
URL.createObjectURL = (blob) => (blob.text().then(done), URL.createObjectURL = create, "#");
document.getElementById("others").click();
const items = [...document.querySelectorAll("[role=menuitem]")];
items.find(({ textContent }) => textContent === "Export all").click();
"""


def test_a_stopped_answer_goes_on_where_it_ends(page: Page) -> None:
    page.driver.execute_script(SENT)
    choose(page, "#options", temperature="0")
    page.send("Count from 1 to 150.")
    eventually(lambda: "20," in "".join(page.texts(".message.assistant .body")))
    page.find("#stop").click()
    stopped = page.wait_for_end()
    eventually(lambda: any("Continue" in text for text in page.texts(".foot")))
    click(page, ".message.assistant", "Continue")
    eventually(lambda: page.wait_for_end()["stream"] != stopped["stream"])
    whole = page.wait_for_end()
    assert whole["outcome"] == "done" and whole["earlier"] == [stopped["stream"]]
    assert whole["text"] == stopped["text"] + page.log_text(whole)
    assert whole["text"].rstrip(".").endswith("149, 150")
    eventually(lambda: page.texts(".message.assistant .body") == [whole["text"]])
    body = sent(page)[-1]
    assert body["continue_final_message"] is True
    assert body["messages"][-1] == {"role": "assistant", "content": stopped["text"]}
    assert not any("Continue" in text for text in page.texts(".foot"))


def test_an_answer_that_goes_on_survives_a_reload_and_the_engine(page: Page) -> None:
    choose(page, "#options", temperature="0", max_tokens="150")
    page.send("Count from 1 to 150.")
    cut = page.wait_for_end()
    assert cut["finish"] == "length"
    eventually(lambda: any("Continue" in text for text in page.texts(".foot")))
    click(page, ".message.assistant", "Continue")
    page.server.kill_engine()
    page.driver.refresh()
    whole = page.wait_for_end()
    assert whole["stream"] != cut["stream"]
    assert whole["text"] == cut["text"] + page.log_text(whole)
    eventually(lambda: page.texts(".message.assistant .body") == [whole["text"]])


def test_a_message_is_edited_in_place_and_its_versions_stay(page: Page, tmp_path: Path) -> None:
    page.send("Spell the word banana.")
    first = page.wait_for_end()
    eventually(lambda: any("Edit" in text for text in page.texts(".message.user .foot")))
    click(page, ".message.user", "Edit")
    field = page.find(".editor textarea")
    assert field.get_attribute("value") == "Spell the word banana."
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("Spell the word river.")
    page.driver.refresh()  # what was typed is there again
    eventually(lambda: page.texts(".editor"))
    assert page.find(".editor textarea").get_attribute("value") == "Spell the word river."
    page.find(".editor textarea").send_keys(Keys.ENTER)
    eventually(lambda: len(page.answers()) == 2)
    page.wait_for_end()
    eventually(lambda: "2 of 2" in page.texts(".message.user .foot")[0])
    assert page.texts(".message.user .body") == ["Spell the word river."]
    click(page, ".message.user", "‹")
    eventually(lambda: page.texts(".message.user .body") == ["Spell the word banana."])
    assert page.texts(".message.assistant .body") == [first["text"]]
    page.driver.refresh()  # the version in view is part of the conversation
    eventually(lambda: page.texts(".message.user .body") == ["Spell the word banana."])
    eventually(lambda: "1 of 2" in page.texts(".message.user .foot")[0])
    exported = json.loads(page.driver.execute_async_script(EXPORTED))
    assert len(exported["messages"]) == 4
    choose_from(page, "#menu", "Delete")
    dismiss = ".toast [aria-label=Dismiss]"
    eventually(lambda: page.texts(dismiss))
    page.find(dismiss).click()
    eventually(lambda: page.stored() == [])
    file = tmp_path / "exported.json"
    file.write_text(json.dumps(exported))
    page.find("#file").send_keys(str(file))
    eventually(lambda: len(page.stored()) == 4)
    page.find("#list button").click()
    eventually(lambda: "1 of 2" in "".join(page.texts(".message.user .foot")))


def test_escape_leaves_a_message_as_it_was(page: Page) -> None:
    page.send("Spell the word banana.")
    page.wait_for_end()
    eventually(lambda: any("Edit" in text for text in page.texts(".message.user .foot")))
    click(page, ".message.user", "Edit")
    page.find(".editor textarea").send_keys("more", Keys.ESCAPE)
    assert not page.texts(".editor")
    assert page.texts(".message.user .body") == ["Spell the word banana."]


def test_an_answer_changed_by_hand_is_a_version_that_goes_on(page: Page) -> None:
    choose(page, "#options", temperature="0")
    page.send("Count from 1 to 20.")
    page.wait_for_end()
    eventually(lambda: any("Edit" in text for text in page.texts(".message.assistant .foot")))
    click(page, ".message.assistant", "Edit")
    field = page.find(".editor textarea")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("1, 2, 3, 4, 5,")
    click(page, ".editor", "Save")
    eventually(lambda: "2 of 2" in "".join(page.texts(".message.assistant .foot")))
    assert page.texts(".message.assistant .body") == ["1, 2, 3, 4, 5,"]
    click(page, ".message.assistant", "Continue")
    eventually(lambda: page.answers()[-1].get("stream"))
    whole = page.wait_for_end()
    assert whole["text"] == "1, 2, 3, 4, 5," + page.log_text(whole) and len(whole["text"]) > 20


def test_an_answer_says_what_it_took(page: Page) -> None:
    page.send("Count from 1 to 20.")
    page.wait_for_end()
    words = ("tokens/s", "first after", "longest gap")
    eventually(lambda: all(word in page.texts(".took")[0] for word in words))
