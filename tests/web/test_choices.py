"""A person's choices for one conversation: prompt, sampling, tools, model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver

from tests.web.page import MODELS, SAID, Page, eventually
from tests.web.server import Server
from tests.web.test_chat import click

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SENT = """
window.sent = [];
const send = window.fetch;
window.fetch = (path, options) => {
  if (String(path).includes("/chat/completions")) window.sent.push(options.body);
  return send(path, options);
};
"""
OTHER_TAB = """
const done = arguments[arguments.length - 1];
const fields = { title: "Mills", choices: { system: "Be brief.", max_tokens: "5" } };
import("/web/store.js?another").then(({ changeConversation }) =>
  changeConversation(location.hash.slice(1), fields)).then(done);
"""

ADVANCED = ["top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"]
CURRENT = "#list li:nth-child(2) [aria-current]"
CUT = """
const pen = document.createElement("canvas").getContext("2d");
const ROOM_FOR_ARROWS = 20;
return [...document.querySelectorAll("#numbers input")].filter((field) => {
  const { font, paddingLeft, paddingRight } = getComputedStyle(field);
  pen.font = font;
  const padding = parseFloat(paddingLeft) + parseFloat(paddingRight);
  const room = field.clientWidth - padding - ROOM_FOR_ARROWS;
  return pen.measureText(field.placeholder).width > room;
}).map(({ name }) => name);
"""
"""Fields whose placeholder is cut."""
VALUES = """
const value = (name) => document.querySelector(`#choices [name=${name}]`).value;
return [value("system"), value("max_tokens")];
"""


def choose(page: Page, button: str, **values: str) -> None:
    page.find(button).click()
    for name, value in values.items():
        field = page.find(f"#choices [name={name}]")
        script = "arguments[0].value = arguments[1]"
        page.driver.execute_script(script, field, value)
    click(page, "#choices", "Save")


def sent(page: Page) -> list[dict[str, Any]]:
    return [json.loads(body) for body in page.driver.execute_script("return window.sent")]


def test_a_tool_call_is_answered_by_hand(page: Page) -> None:
    page.driver.execute_script(SENT)
    choose(page, "#options", tools=json.dumps([WEATHER]), temperature="0")
    page.send("What is the weather in Oslo?")
    first = page.wait_for_end()
    assert [call["name"] for call in first["calls"]] == ["get_weather"]
    eventually(lambda: page.texts(".results button") == ["Send result"])
    page.find(".results textarea").send_keys("rain, 7 degrees")
    typed = "return document.querySelector('.results textarea')?.value"
    page.find("#new").click()
    eventually(lambda: not page.texts(".message"))
    page.find("#list button").click()
    eventually(lambda: page.driver.execute_script(typed) == "rain, 7 degrees")
    page.find(".results button").click()
    eventually(lambda: len(page.answers()) == 2)
    last = page.wait_for_end()
    assert last["outcome"] == "done" and last["text"] == page.log_text(last)
    eventually(lambda: page.texts(".message.assistant .body")[-1:] == [last["text"]])
    assert not page.texts(".results")
    kept = "return Object.keys(localStorage).filter(name => name.startsWith('headrace-typed'))"
    assert page.driver.execute_script(kept) == []
    eventually(lambda: page.texts(".message.tool .calls pre") == ["rain, 7 degrees"])
    _, turn, call, result = [("", ""), *((m["role"], m) for m in sent(page)[-1]["messages"])]
    assert (turn[0], call[0], result[0]) == ("user", "assistant", "tool")
    assert result[1]["content"] == "rain, 7 degrees"
    assert result[1]["tool_call_id"] == call[1]["tool_calls"][0]["id"]


def test_a_conversation_keeps_its_own_choices(page: Page) -> None:
    page.driver.execute_script(SENT)
    choose(page, "#settings", system="Default.", max_tokens="9")
    choose(page, "#options", system="Be brief.", max_tokens="5")
    page.send("Count from 1 to 150.")
    assert page.wait_for_end()["finish"] == "length"
    page.find("#new").click()
    eventually(lambda: not page.texts(".message"))
    page.send("Count from 1 to 150.")
    eventually(lambda: len(page.answers()) == 2)
    page.wait_for_end()
    page.driver.refresh()
    page.driver.execute_script(SENT)
    eventually(lambda: page.texts("#list li"))
    page.driver.find_elements("css selector", "#list .open")[1].click()
    eventually(lambda: page.driver.find_elements("css selector", CURRENT))
    page.find("#options").click()
    assert page.driver.execute_script(VALUES) == ["Be brief.", "5"]
    shown = "return document.querySelector('#numbers input[name=top_p]').placeholder"
    eventually(lambda: page.driver.execute_script(shown) == "1")
    page.find("#advanced summary").click()
    assert page.driver.execute_script(CUT) == []
    click(page, "#choices", "Cancel")
    page.send("Count from 1 to 150.")
    eventually(lambda: len(page.answers()) == 3)
    assert page.wait_for_end()["finish"] == "length"
    (body,) = sent(page)
    assert body["max_tokens"] == 5
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


LOOK = """
const { fontSize, backgroundColor } = getComputedStyle(document.body);
return [fontSize, backgroundColor];
"""
FIELDS = """
const fields = [...document.querySelectorAll("#choices [name]")];
return fields.filter((field) => field.checkVisibility()).map((field) => field.name);
"""


def test_settings_begin_with_the_look_and_fold_what_is_rarely_changed(page: Page) -> None:
    page.find("#settings").click()
    assert page.driver.execute_script(FIELDS) == ["theme", "size", "system", "temperature"]
    page.find("#advanced summary").click()
    assert page.driver.execute_script(FIELDS)[4:] == [*ADVANCED, "tools", "key"]
    click(page, "#choices", "Cancel")
    assert page.driver.execute_script(LOOK) == ["16px", "rgb(255, 255, 255)"]
    choose(page, "#settings", theme="dark", size="125%")
    assert page.driver.execute_script(LOOK) == ["20px", "rgb(18, 24, 29)"]
    page.driver.refresh()
    eventually(lambda: page.texts("#model option"))
    assert page.driver.execute_script(LOOK) == ["20px", "rgb(18, 24, 29)"]
    page.find("#options").click()
    assert page.driver.execute_script(FIELDS) == ["system", "temperature"]
    page.find("#advanced summary").click()
    page.find("#choices [name=tools]").send_keys("no list")
    page.find("#advanced summary").click()
    click(page, "#choices", "Save")
    eventually(lambda: "tools" in page.driver.execute_script(FIELDS))
    click(page, "#choices", "Cancel")


def test_what_another_tab_changes_is_taken_while_an_answer_comes(page: Page) -> None:
    page.send("Count from 1 to 150.")
    page.wait_for_text()
    page.driver.execute_async_script(OTHER_TAB)
    eventually(lambda: page.texts("#title") == ["Mills"])
    page.find("#options").click()
    assert page.driver.execute_script(VALUES) == ["Be brief.", "5"]
    click(page, "#choices", "Cancel")
    page.find("#stop").click()
    page.wait_for_end()


def test_a_conversation_remembers_its_model(page: Page) -> None:
    page.driver.execute_script(SENT)
    eventually(lambda: page.texts(MODELS) == ["headrace-mini"])
    page.send("Spell the word banana.")
    page.wait_for_end()
    assert sent(page)[0]["model"] == "headrace-mini"
    page.driver.execute_script("localStorage['headrace-settings'] = arguments[0]", '{"model":"x"}')
    page.find("#new").click()
    eventually(lambda: page.texts(MODELS) == ["headrace-mini", "x (not served)"])
    page.send("Spell the word banana.")
    eventually(lambda: len(page.answers()) == 2)
    refused = page.wait_for_end()
    assert refused["outcome"] == "failed" and "x" in refused["error"]
    select = page.find("#model")
    select.find_elements("css selector", "option")[0].click()
    eventually(lambda: any("Regenerate" in text for text in page.texts(".foot")))
    click(page, ".message.assistant", "Regenerate")
    eventually(lambda: len(page.answers()) == 3)
    assert page.wait_for_end()["outcome"] == "done"
    assert sent(page)[-1]["model"] == "headrace-mini"


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "config.json").write_text("{}")
    models = ("ann=headrace-mini", "bob=headrace-mini", f"carl={tmp_path}")
    running = Server(*(flag for model in models for flag in ("--model", model)))
    yield running
    running.stop()


def test_a_model_is_loaded_when_it_is_chosen(several: Server, driver: webdriver.Chrome) -> None:
    page = Page(driver, several)
    page.open()
    page.driver.execute_script(SAID)
    eventually(lambda: "bob (not loaded)" in page.texts("#model option"))
    page.driver.find_element("css selector", "#model option[value=bob]").click()
    page.send("Spell the word banana.")
    answer = page.wait_for_end(120)
    assert answer["model"] == "bob" and answer["text"] == page.log_text(answer)
    eventually(lambda: "bob" in page.texts("#model option"))
    said = page.driver.execute_script("return [...window.said]")
    assert any(text.startswith("Loading the model bob") for text in said), said
    page.driver.find_element("css selector", "#model option[value=carl]").click()
    page.send("Spell the word banana.")
    eventually(lambda: len(page.answers()) == 2)
    refused = page.wait_for_end()
    assert refused["outcome"] == "failed" and "carl" in refused["error"]
    page.open("/dashboard")
    eventually(lambda: {"ann", "bob"} <= set(page.texts("#models td")))
