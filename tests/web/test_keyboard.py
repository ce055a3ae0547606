"""A visit by the keyboard alone, from the first message to the dashboard."""

from selenium.webdriver.common.keys import Keys

from tests.web.page import Page, eventually
from tests.web.test_everybody import focus, press, tab_to
from tests.web.test_first_minutes import hold


def test_a_whole_visit_by_the_keyboard(page: Page) -> None:
    eventually(lambda: focus(page) == "input" and page.texts("#model option"))
    press(page, "Count from 1 to 150.", Keys.ENTER)
    eventually(lambda: "20," in "".join(page.texts(".message.assistant .body")))
    press(page, Keys.ESCAPE)
    stopped = page.wait_for_end()
    assert stopped["outcome"] != "done" and focus(page) == "input"
    tab_to(page, "Continue")
    press(page, Keys.ENTER)
    eventually(lambda: page.wait_for_end()["outcome"] == "done")
    hold(page, Keys.SHIFT, Keys.ESCAPE)
    assert focus(page) == "input"
    press(page, Keys.ARROW_UP)
    eventually(lambda: focus(page) == "Edit the message")
    hold(page, Keys.CONTROL, "a")
    press(page, "Spell the word banana.", Keys.ENTER)
    eventually(lambda: len(page.answers()) == 2 and page.wait_for_end()["text"] != stopped["text"])
    eventually(lambda: "2 of 2" in page.texts(".message.user .foot span"))
    tab_to(page, "Earlier version")
    press(page, Keys.ENTER)
    eventually(lambda: page.texts(".message.user .body") == ["Count from 1 to 150."])


def test_the_list_settings_and_dashboard_by_the_keyboard(page: Page) -> None:
    eventually(lambda: focus(page) == "input" and page.texts("#model option"))
    press(page, "Spell the word banana.", Keys.ENTER)
    page.wait_for_end()
    hold(page, Keys.CONTROL, Keys.SHIFT, "o")
    eventually(lambda: not page.texts(".message") and focus(page) == "input")
    hold(page, Keys.CONTROL, "k")
    press(page, "banana")
    eventually(lambda: page.texts("#list mark"))
    press(page, Keys.ARROW_DOWN, Keys.ENTER)
    eventually(lambda: page.texts(".message.user .body"))
    hold(page, Keys.CONTROL, "k")
    press(page, Keys.ESCAPE)
    (name,) = page.texts("#list .name")
    tab_to(page, f"Menu of {name}")
    press(page, Keys.ENTER)
    assert focus(page) == "Rename"
    press(page, Keys.ENTER, "Fruit", Keys.ENTER)
    eventually(lambda: page.texts("#list .name") == ["Fruit"])
    tab_to(page, "Menu of Fruit")
    press(page, Keys.ENTER, Keys.ARROW_UP)
    assert focus(page) == "Delete"
    press(page, Keys.ENTER)
    eventually(lambda: not page.texts("#list .name"))
    tab_to(page, "Undo")
    press(page, Keys.ENTER)
    eventually(lambda: page.texts("#list .name") == ["Fruit"])
    tab_to(page, "settings")
    press(page, Keys.ENTER)
    eventually(lambda: page.driver.execute_script("return document.activeElement.name") == "theme")
    press(page, Keys.ESCAPE)
    tab_to(page, "Dashboard")
    press(page, Keys.ENTER)
    eventually(lambda: page.texts("#live dd") and page.find("#try").is_enabled())
    tab_to(page, "try")
    press(page, Keys.ENTER)
    assert focus(page) == "Cancel"
    press(page, Keys.ESCAPE, Keys.ENTER)
    tab_to(page, "Run the load test")
    press(page, Keys.ENTER)
    eventually(lambda: len(page.texts("#rows strong")) == 5)
