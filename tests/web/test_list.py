"""The list of conversations: its groups, the search in it, and what is taken out of it."""

import json
import time
from pathlib import Path

from selenium.webdriver.common.keys import Keys

from tests.web.page import Page, eventually
from tests.web.test_chat import choose_from, click
from tests.web.test_choices import VALUES, choose
from tests.web.test_composer import load

GROUPS = """
const done = arguments[arguments.length - 1];
import("/web/list.js").then(({ groupOf }) => {
  const now = new Date(2026, 2, 10, 9).getTime();
  done(arguments[0].map(([day, hour]) => groupOf(new Date(2026, 2, day, hour).getTime(), now)));
});
"""
SAVED = """
window.saved = [];
URL.createObjectURL = (blob) => (blob.text().then((text) => saved.push(text)), "blob:none");
HTMLAnchorElement.prototype.click = function () { saved.name = this.download; };
"""
LONG_AGO = """
const done = arguments[arguments.length - 1];
indexedDB.open("headrace").onsuccess = ({target: {result: database}}) => {
  const all = database.transaction("conversations", "readwrite");
  all.oncomplete = () => { database.close(); done(); };
  const records = all.objectStore("conversations");
  records.openCursor().onsuccess = ({target: {result: cursor}}) =>
    cursor.update({ ...cursor.value, deleted: 1 });
};
"""
FOUND = """
const found = [...(CSS.highlights.get("found") ?? [])];
const { top } = found[0]?.getBoundingClientRect() ?? {};
return [found.map(String), top > 0 && top < innerHeight];
"""


DOTTED = """
return ["#title", "#list .name"].map((css) => document.querySelector(css)).map((node) =>
  node.scrollWidth > node.clientWidth && getComputedStyle(node).textOverflow === "ellipsis");
"""
"""Whether the browser cuts each title, and ends it with dots."""


def test_days_are_named_as_people_name_them(page: Page) -> None:
    days = [[10, 0], [9, 23], [9, 0], [8, 23], [3, 0], [2, 23], [-22, 12]]
    names = ["Today", "Yesterday", "Yesterday", "Last 7 days", "Last 7 days", "Last 30 days"]
    assert page.driver.execute_async_script(GROUPS, days) == [*names, "February 2026"]


def test_the_list_is_grouped(page: Page, tmp_path: Path) -> None:
    now = 1000 * int(time.time())
    load(page, tmp_path, {"title": "Old"}, {"title": "New", "updated": now})
    eventually(lambda: page.texts("#list .name") == ["New", "Old"])
    assert page.texts("#list h3") == ["Today", "January 1970"]


def test_a_long_title_ends_with_dots_and_is_whole_as_a_tooltip(page: Page) -> None:
    whole = "Count from 1 to 5. " + "Please. " * 20
    page.send(whole)
    page.wait_for_end()
    eventually(lambda: page.texts("#list .name") == [whole.strip()])
    titles = "return ['#title', '#list .open'].map((css) => document.querySelector(css).title)"
    assert page.driver.execute_script(titles) == [whole.strip()] * 2
    assert page.driver.execute_script(DOTTED) == [True, True]
    page.find("#new").click()
    eventually(lambda: not page.texts(".message"))
    page.send("Count from 1 to 5.\n" + "Please. " * 40)
    eventually(lambda: len(page.answers()) == 2 and page.wait_for_end())
    (title, _) = page.texts("#list .name")
    assert (
        len(title) <= 200
        and title.endswith("Please. Plea…")
        and title.startswith("Count from 1 to 5. P")
    )


def test_what_is_found_is_marked_at_its_place(page: Page, tmp_path: Path) -> None:
    text = "a mill\n\n" * 80 + "then a Banana, and\n\n" + "a mill\n\n" * 80
    load(page, tmp_path, {"title": "Fruit"}, {"title": "Mills"}, text=text)
    eventually(lambda: len(page.texts("#list .name")) == 2)
    page.find("#search").send_keys("banana")
    eventually(lambda: page.texts("#list mark") == ["Banana"] * 2)
    assert "then a Banana, and" in page.texts("#list .piece-found")[0]
    page.find("#search").send_keys(Keys.ARROW_DOWN)
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    eventually(lambda: page.driver.execute_script(FOUND) == [["Banana"], True])
    page.find("#search").send_keys(Keys.ESCAPE)
    eventually(lambda: page.driver.execute_script(FOUND)[0] == [])
    eventually(lambda: page.texts("#list mark") == [])


def test_a_conversation_is_exported_and_known_again(page: Page, tmp_path: Path) -> None:
    load(page, tmp_path, {"title": "On Fruit!"}, text="a **banana**")
    eventually(lambda: page.texts("#list .name"))
    page.driver.execute_script(SAVED)
    choose_from(page, "#list .more", "Export as Markdown")
    saved = "return window.saved"
    eventually(lambda: len(page.driver.execute_script(saved)) == 1)
    assert page.driver.execute_script("return saved.name") == "on-fruit.md"
    choose_from(page, "#list .more", "Export as JSON")
    eventually(lambda: len(page.driver.execute_script(saved)) == 2)
    markdown, whole = page.driver.execute_script(saved)
    assert markdown == "# On Fruit!\n\n## Answer\n\na **banana**\n"
    (conversation,) = json.loads(whole)["conversations"]
    load(page, tmp_path, conversation, text="a **banana**")
    eventually(lambda: page.texts(".toast span") == ["Imported: 1 already here."])


def test_messages_in_a_circle_are_shown(page: Page, tmp_path: Path) -> None:
    load(page, tmp_path, {"title": "Fruit"}, {"title": "Mills"}, text="a banana", parent="m0")
    eventually(lambda: len(page.texts("#list .name")) == 2)
    page.find("#list .open").click()
    eventually(lambda: page.texts(".message .body") == ["a banana"])


def test_what_is_deleted_goes_though_the_page_is_lost(page: Page, tmp_path: Path) -> None:
    load(page, tmp_path, {"title": "Fruit"})
    eventually(lambda: page.texts("#list .name"))
    choose_from(page, "#list .more", "Delete")
    eventually(lambda: page.texts(".toast span") == ["Deleted “Fruit”."])
    page.open()
    assert page.texts("#list .name") == [] and len(page.stored()) == 1
    page.driver.execute_async_script(LONG_AGO)
    page.driver.refresh()
    eventually(lambda: page.stored() == [])


def test_the_menu_of_a_row_leaves_the_options_as_they_are(page: Page, tmp_path: Path) -> None:
    load(page, tmp_path, {"title": "Fruit"})
    eventually(lambda: page.texts("#list .name"))
    page.find("#list .open").click()
    eventually(lambda: page.texts("#title") == ["Fruit"])
    choose(page, "#options", system="Be brief.", max_tokens="5")
    choose_from(page, "#list .more", "Rename")
    page.find("#list .rename").send_keys("Mills", Keys.ENTER)
    eventually(lambda: page.texts("#title") == ["Mills"])
    choose_from(page, "#list .more", "Delete")
    click(page, ".toast", "Undo")
    eventually(lambda: page.texts("#title") == ["Mills"])
    page.find("#options").click()
    assert page.driver.execute_script(VALUES) == ["Be brief.", "5"]


AT = "return document.getElementById('thread').scrollTop"
COPIED = """
Object.defineProperty(navigator, "clipboard", { value: undefined });
document.execCommand = () => arguments[0];
const button = document.querySelector(".message button");
button.focus();
button.click();
"""
"""Copies a message without the clipboard, as on a page without https."""


def test_what_is_done_in_the_list_leaves_the_text_in_its_place(page: Page, tmp_path: Path) -> None:
    load(
        page, tmp_path, {"title": "Fruit"}, {"title": "Mills", "updated": -1e300}, text="a\n\n" * 99
    )
    eventually(lambda: len(page.texts("#list .name")) == 2)
    page.find("#list li:nth-child(2) .open").click()
    eventually(lambda: page.texts("#title") == ["Mills"] and page.driver.execute_script(AT) > 0)
    page.driver.execute_script("document.getElementById('thread').scrollTop = 100")
    page.find("#title").click()
    page.find(".rename").send_keys("Water", Keys.ENTER)
    eventually(lambda: page.texts("#title") == ["Water"] == page.texts("#list [aria-current]"))
    choose_from(page, "#list .more", "Delete")
    eventually(lambda: page.texts("#list .name") == ["Water"])
    assert page.driver.execute_script(AT) == 100
    for is_allowed, words in ((True, "Copied"), (False, "Not allowed")):
        page.driver.execute_script(COPIED, is_allowed)
        eventually(lambda words=words: page.driver.switch_to.active_element.text == words)


def test_back_and_a_new_conversation_work_during_a_renaming(page: Page, tmp_path: Path) -> None:
    load(page, tmp_path, {"title": "Fruit"}, {"title": "Mills"}, text="a banana")
    eventually(lambda: len(page.texts("#list .name")) == 2)
    for row, title in ((1, "Fruit"), (2, "Mills")):
        page.find(f"#list li:nth-child({row}) .open").click()
        eventually(lambda title=title: page.texts("#title") == [title])
    page.find("#title").click()
    page.find(".rename").send_keys("Water", Keys.CONTROL + Keys.SHIFT + "o")
    eventually(lambda: page.texts("#title") == ["New conversation"])
    eventually(lambda: page.texts("#list .name") == ["Fruit", "Water"])
    page.driver.back()
    eventually(lambda: page.texts("#title") == ["Water"])
    page.driver.back()
    eventually(lambda: page.texts("#title") == ["Fruit"])
