"""A server that asks for keys: the pages open, ask for the one they need, and use it."""

from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.web.page import Page, eventually
from tests.web.server import Server
from tests.web.test_everybody import violations


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    running = Server("--api-key", "secret", "--admin-key", "master")
    running.key = "master"
    yield running
    running.stop()


@pytest.fixture
def page(locked: Server, driver: webdriver.Chrome) -> Page:
    driver.get("about:blank")
    origin = {"origin": locked.url, "storageTypes": "all"}
    driver.execute_cdp_cmd("Storage.clearDataForOrigin", origin)
    shown = Page(driver, locked)
    shown.open()
    return shown


def is_shown(page: Page, css: str) -> bool:
    return any(one.is_displayed() for one in page.driver.find_elements(By.CSS_SELECTOR, css))


def test_a_key_is_asked_for_once(page: Page, locked: Server) -> None:
    eventually(lambda: is_shown(page, "#key"))
    assert "needs a key" in page.find("#key").text
    assert violations(page) == []
    page.find("#key input").send_keys("wrong", Keys.ENTER)
    eventually(lambda: "does not accept this key" in page.find("#key-fault").text)
    page.find("#key input").clear()
    page.find("#key input").send_keys("secret", Keys.ENTER)
    eventually(lambda: not is_shown(page, "#key"))
    assert not is_shown(page, "#notice")
    page.driver.refresh()
    eventually(lambda: page.texts("#model option"))
    page.send("Spell the word banana.")
    answer = page.wait_for_end()
    locked.key = "secret"  # whose stream it is
    assert answer["outcome"] == "done" and answer["text"] == page.log_text(answer)


def test_enter_keeps_a_key_that_was_typed_in_the_settings(page: Page) -> None:
    eventually(lambda: is_shown(page, "#key"))
    page.find("#key .cancel").click()
    eventually(lambda: "needs a key" in page.find("#notice").text)
    page.find("#settings").click()
    page.find("#choices [name=key]").send_keys("secret", Keys.ENTER)
    eventually(lambda: page.texts("#model option"))
    eventually(lambda: not is_shown(page, "#notice"))
    assert not is_shown(page, "dialog")


def test_the_dashboard_asks_a_client_for_the_admin_key(page: Page) -> None:
    script = "localStorage['headrace-settings'] = JSON.stringify({ key: 'secret' })"
    page.driver.execute_script(script)
    page.open("/dashboard")
    eventually(lambda: "needs the admin key" in page.find("main").text)
    assert not is_shown(page, ".chart") and not is_shown(page, "#try")
    assert violations(page) == []
    page.find("#key input").send_keys("master", Keys.ENTER)
    eventually(lambda: is_shown(page, ".chart") and page.texts("dd"))
    assert is_shown(page, "#try") and not is_shown(page, "#key")
    page.open()
    key = page.driver.execute_script("return JSON.parse(localStorage['headrace-settings']).key")
    assert key == "secret"  # the chat's streams are those of its own key
    assert not page.complaints()
