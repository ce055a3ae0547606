"""Models that the page gets from a hub: how far they are, stopped, gone on with, used."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from tests.checkpoints.small_hub import SmallHub, small_hub
from tests.web.page import Page, eventually
from tests.web.server import ROOT, Server
from tests.web.test_chat import choose_from, click
from tests.web.test_everybody import violations

NAME = "someone/a-model"
ROW = "#pulled .soft"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    with small_hub({NAME: ROOT / "src/headrace_common/checkpoints/mini"}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        yield hub


@pytest.fixture
def page(driver: webdriver.Chrome, hub: SmallHub) -> Iterator[Page]:
    server = Server()
    page = Page(driver, server)
    page.open()
    yield page
    driver.get("about:blank")
    server.stop()


def ask_for(page: Page, name: str) -> None:
    eventually(lambda: page.texts("#model option"))
    choose_from(page, "#others", "Get a model")
    page.find("#pulls input").send_keys(name, Keys.ENTER)


def test_a_model_comes_is_stopped_goes_on_over_a_restart_and_answers(
    page: Page, hub: SmallHub
) -> None:
    hub.flows.clear()  # half of the weights, and then no more
    ask_for(page, NAME)
    eventually(lambda: " of " in "".join(page.texts(ROW)))
    assert violations(page) == []
    click(page, "#pulled", "Stop")
    eventually(lambda: page.texts(ROW)[0].startswith("Stopped"))
    click(page, "#pulled", "Go on")
    eventually(lambda: " of " in page.texts(ROW)[0])
    page.server.restart()
    hub.flows.set()
    eventually(lambda: page.texts(ROW) == ["Here"], 90)
    click(page, "#pulled", "Use")
    eventually(lambda: page.find("#model").get_attribute("value") == NAME)
    page.send("Hello")
    answer = page.wait_for_end(120)
    assert answer["model"] == NAME and answer["text"] == page.log_text(answer)


def test_a_name_that_the_hub_does_not_have_is_said_and_removed(page: Page) -> None:
    ask_for(page, "no name")
    eventually(lambda: "owner/name" in page.find("#pull-fault").text)
    field = page.find("#pulls input")
    field.clear()
    field.send_keys("someone/nothing", Keys.ENTER)
    eventually(lambda: "someone/nothing" in page.find("#pull-fault").text)
    assert violations(page) == []
    click(page, "#pulled", "Remove")
    eventually(lambda: page.texts("#pulled li") == [])
