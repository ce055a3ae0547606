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
from tests.web.test_everybody import focus, violations

NAME = "someone/a-model"
ROW = "#pulled li:last-child > .soft"
FAILED = "#pulled li:last-child > .trouble"
OFFERS = """
const send = window.fetch;
window.fetch = async (url, options) => {
  if (!String(url).endsWith("/models/available")) return send(url, options);
  const of = (id, parameters, fits, more) => ({ id, about: "short answers", kind: "dense",
    parameters, bytes: 639e6, license: "Apache-2.0", memory_bytes: 1.9e9, fits, ...more });
  const data = [of("huge", 30.5, false, { active: 3.3 }), of("smollm2", 0.135, true),
    of("someone/a-model", 0.6, true)];
  return Response.json({ data, memory_bytes: 8.6e9, usable_bytes: 6.4e9 });
};
"""
CATALOG = """
const done = arguments[arguments.length - 1];
fetch("/models/available").then((answer) => answer.json()).then(({ data }) => done(data));
"""


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
    eventually(lambda: page.texts("#pulled li"))
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
    click(page, "#pulled", "Continue")
    eventually(lambda: " of " in page.texts(ROW)[0])
    page.server.restart()
    hub.flows.set()
    eventually(lambda: page.texts(ROW) == ["Downloaded"], 90)
    click(page, "#pulled", "Use")
    eventually(lambda: page.find("#model").get_attribute("value") == NAME)
    page.send("Hello")
    answer = page.wait_for_end(120)
    assert answer["model"] == NAME and answer["text"] == page.log_text(answer)


def test_the_picker_offers_models_and_each_row_shows_its_download(
    page: Page, hub: SmallHub
) -> None:
    hub.flows.clear()
    eventually(lambda: page.texts("#model option"))
    page.driver.execute_script(OFFERS)
    page.find("#model option:last-child").click()
    eventually(lambda: page.texts("#pulled strong") == ["smollm2", NAME])
    assert page.find("#model").get_attribute("value") == "headrace-mini"
    facts = "0.6 billion parameters · 639.0 MB · 1.9 GB of memory · Apache-2.0"
    assert page.texts("#pulled li:last-child .what") == [f"short answers{facts}"]
    memory = "The server's machine has 8.6 GB of memory; a model may use 6.4 GB of it."
    assert page.texts("#memory") == [memory]
    assert page.texts("#too-large summary") == ["1 model needs more memory than that"]
    assert not page.find("#too-large li").is_displayed()
    assert "30.5 billion parameters, 3.3 active" in page.texts("#too-large li")[0]
    assert violations(page) == []
    repo = hub.repos.pop(NAME)
    page.find(f"[aria-label='Get {NAME}']").click()
    eventually(lambda: "smollm2" in "".join(page.texts(FAILED)))
    assert page.texts("#pull-fault") == [""] and violations(page) == []
    hub.repos[NAME] = repo
    page.find(f"[aria-label='Try again {NAME}']").send_keys(Keys.ENTER)
    eventually(lambda: " of " in page.texts(ROW)[0])
    assert focus(page) == f"Stop {NAME}" and len(page.texts("#pulled li")) == 2
    hub.flows.set()
    eventually(lambda: page.texts(ROW) == ["Downloaded"], 90)
    page.find(f"[aria-label='Remove {NAME}']").click()
    eventually(lambda: page.texts("#pulled li:last-child button") == ["Get"], 60)


def test_all_models_of_the_catalog_are_listed(page: Page) -> None:
    eventually(lambda: page.texts("#model option"))
    choose_from(page, "#others", "Get a model")
    catalog = page.driver.execute_async_script(CATALOG)
    fitting = [one["id"] for one in catalog if one["fits"]]
    eventually(lambda: page.texts("#pulled strong") == fitting)
    assert page.texts("#too-large strong") == [it["id"] for it in catalog if not it["fits"]]


def test_a_name_that_the_hub_does_not_have_is_said_and_removed(page: Page) -> None:
    ask_for(page, "no name")
    eventually(lambda: "owner/name" in page.find("#pull-fault").text)
    field = page.find("#pulls input")
    field.clear()
    field.send_keys("someone/nothing", Keys.ENTER)
    eventually(lambda: "someone/nothing" in "".join(page.texts(FAILED)))
    assert page.texts("#pull-fault") == [""]
    assert violations(page) == []
    click(page, "#pulled", "Remove")
    eventually(lambda: "someone/nothing" not in page.texts("#pulled strong"))
