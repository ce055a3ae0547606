"""The message that is being written, and the keys that a person expects to work."""

import json
from pathlib import Path
from typing import Any

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.web.page import Page, eventually
from tests.web.test_everybody import press
from tests.web.test_files import give

DEAF = """
const send = window.fetch;
let number = 0;
window.fetch = (url, options) => String(url).endsWith("/cancel") && ++number < 3 ?
  Promise.resolve(new Response("", { status: 502 })) : send(url, options);
"""
"""A proxy that has no server for the first two stops."""


def field(page: Page, name: str = "value") -> Any:
    return page.driver.execute_script(f"return document.getElementById('input').{name}")


def load(page: Page, tmp_path: Path, *conversations: dict[str, Any], **message: Any) -> None:
    """Imports conversations `c0`, `c1` and so on, of one message each."""
    every = {"created": 1, "updated": 1, "title": "Fruit"}
    whole = {"conversations": [], "messages": []}
    for number, one in enumerate(conversations):
        names = {"id": f"c{number}", "leaf": f"m{number}"}
        whole["conversations"].append(every | names | one)
        said = {"id": f"m{number}", "conversation": f"c{number}", "parent": None}
        whole["messages"].append(said | {"role": "assistant", "text": "", "created": 1} | message)
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps(whole))
    page.find("#file").send_keys(str(file))
    eventually(lambda: page.find("#file").get_attribute("value") == "")


def test_each_conversation_keeps_its_draft(page: Page, tmp_path: Path) -> None:
    page.find("#input").send_keys("a new one")
    load(page, tmp_path, {"title": "Fruit"})
    eventually(lambda: page.texts("#list li") == ["Fruit"])
    page.find("#list button").click()
    eventually(lambda: page.texts("#title") == ["Fruit"] and field(page) == "")
    page.find("#input").send_keys("more fruit")
    page.driver.refresh()
    eventually(lambda: field(page) == "more fruit")
    page.find("#new").click()
    eventually(lambda: field(page) == "a new one")
    page.find("#input").send_keys(Keys.ENTER)
    page.wait_for_end()
    page.find("#input").send_keys("and then")
    page.find("#new").click()
    eventually(lambda: page.texts("#title") == ["New conversation"])
    assert field(page) == ""
    page.find("#list button").click()
    eventually(lambda: field(page) == "and then")


def test_the_field_grows_with_its_text_up_to_a_limit(page: Page) -> None:
    heights = [field(page, "offsetHeight")]
    line = Keys.SHIFT + Keys.ENTER + Keys.SHIFT
    for num_lines in (4, 40):
        page.find("#input").send_keys(line * num_lines)
        heights.append(field(page, "offsetHeight"))
    assert heights[0] + 60 < heights[1] < heights[2] < 400
    assert field(page, "scrollHeight") > 900
    page.find("#input").send_keys("Spell the word banana.", Keys.ENTER)
    eventually(lambda: field(page, "offsetHeight") == heights[0])
    page.wait_for_end()


def test_escape_stops_the_answer(page: Page) -> None:
    page.send("Count from 1 to 150.")
    page.wait_for_text()
    page.find("#options").click()
    press(page, Keys.ESCAPE)  # closes the dialog alone
    eventually(lambda: not page.driver.find_elements(By.CSS_SELECTOR, "dialog[open]"))
    assert page.answers()[-1].get("live") and not page.answers()[-1].get("stopping")
    page.find("#input").send_keys(Keys.ESCAPE)
    assert page.wait_for_end()["outcome"] == "stopped"


NO_MODEL = """
window.fetch = async () => Response.json({ data: [] });
document.getElementById("model").dispatchEvent(new Event("focus"));
"""
OBSTACLE = "const { disabled, title } = document.getElementById('send'); return disabled && title"


def test_send_is_disabled_with_the_reason_while_it_cannot_work(page: Page) -> None:
    def obstacle() -> Any:
        return page.driver.execute_script(OBSTACLE)

    eventually(lambda: page.texts("#model option") and page.texts("#presence") == ["Connected"])
    assert obstacle() == "The message is empty."
    page.find("#input").send_keys("  ", Keys.ENTER)
    assert page.texts("#news") == ["The message is empty."] and page.stored() == []
    page.find("#input").send_keys("Hello")
    assert obstacle() is False
    page.offline(True)
    eventually(lambda: obstacle() == "The server cannot be reached.")
    page.find("#input").send_keys(Keys.ENTER)
    assert field(page) == "  Hello"
    page.offline(False)
    eventually(lambda: obstacle() is False)
    give(page, "paste", "long.txt", b"mill " * 9000)
    eventually(lambda: obstacle() == "The message is too long for the model.")
    page.find("#input").send_keys(Keys.ENTER)
    assert field(page) == "  Hello" and page.stored() == []
    page.find("#attached button").click()
    eventually(lambda: obstacle() is False)
    page.driver.execute_script(NO_MODEL)
    eventually(lambda: obstacle() == "The server has no model.")


def test_a_stop_is_asked_for_until_it_is_heard(page: Page) -> None:
    page.driver.execute_script(DEAF)
    page.send("Count from 1 to 150.")
    page.wait_for_text()
    page.find("#stop").click()
    assert page.wait_for_end()["outcome"] == "stopped"


def test_enter_renames_where_the_name_stands(page: Page, tmp_path: Path) -> None:
    load(page, tmp_path, {"title": "Fruit"})
    eventually(lambda: page.texts("#list li"))
    page.find("#list button").click()
    eventually(lambda: page.texts("#title") == ["Fruit"])
    page.find("#title").click()
    page.find(".rename").send_keys("Bananas", Keys.ENTER)
    eventually(lambda: page.texts("#list li") == ["Bananas"])
    assert page.texts("#title") == ["Bananas"]


def test_a_file_that_comes_again_is_merged(page: Page, tmp_path: Path) -> None:
    load(page, tmp_path, {"title": "Fruit"}, {"title": "Mills"}, text="a ban")
    eventually(lambda: len(page.texts("#list li")) == 2)
    page.find("#list button").click()
    eventually(lambda: page.texts(".message .body") == ["a ban"])
    load(page, tmp_path, {"title": "Old", "updated": 0}, {"title": "New", "updated": 2}, text="a")
    eventually(lambda: page.texts("#list .name") == ["New", "Fruit"])
    told = "Imported: 1 updated, 1 already here."
    eventually(lambda: page.texts(".toast span")[-1:] == [told])
    load(page, tmp_path, {"title": "Fruit"}, text="a banana")
    eventually(lambda: "a banana" in [one["text"] for one in page.stored()])
    assert sorted(one["text"] for one in page.stored()) == ["a ban", "a banana"]
    eventually(lambda: page.texts(".message .body") == ["a banana"])
    assert page.texts("#list li") == ["New", "Fruit"]
