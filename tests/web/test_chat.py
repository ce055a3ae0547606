"""The chat as a person uses it."""

import json
import random
from typing import Any
from urllib.error import HTTPError

import pytest
from selenium.common.exceptions import JavascriptException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.web.page import Page, eventually


def click(page: Page, css: str, words: str) -> None:
    """The last button of these words, once there is one; the pointer passes its message first."""

    def found() -> list[Any]:
        buttons = page.driver.find_elements(By.CSS_SELECTOR, f"{css} button")
        return [one for one in buttons if one.get_property("textContent") == words]

    button = eventually(found)[-1]
    ActionChains(page.driver).move_to_element(button).perform()
    button.click()


def choose_from(page: Page, menu: str, words: str) -> None:
    """An item of the menu that the button opens."""
    page.find(menu).click()
    items = page.driver.find_elements(By.CSS_SELECTOR, "[role=menuitem]")
    next(item for item in items if item.text == words).click()


def test_a_message_is_answered(page: Page) -> None:
    page.send("Count from 1 to 20.")
    answer = page.wait_for_end()
    assert answer["outcome"] == "done"
    assert answer["text"] == page.log_text(answer)
    eventually(lambda: page.texts(".message.assistant .body") == [answer["text"]])
    assert page.texts("#list li") == ["Count from 1 to 20."]
    assert "tokens/s" in page.texts(".message.assistant .foot")[0]


def test_an_answer_can_be_stopped(page: Page) -> None:
    page.send("Count from 1 to 150.")
    page.wait_for_text()
    page.find("#stop").click()
    answer = page.wait_for_end()
    assert answer["outcome"] == "stopped"
    assert page.server.get(f"/v1/streams/{answer['stream']}")["state"] == "cancelled"


def test_regenerating_adds_a_branch(page: Page) -> None:
    page.send("Spell the word banana.")
    first = page.wait_for_end()
    eventually(lambda: any("Regenerate" in text for text in page.texts(".foot")))
    click(page, ".message.assistant", "Regenerate")
    eventually(lambda: len(page.answers()) == 2)
    page.wait_for_end()
    eventually(lambda: "2 of 2" in page.texts(".message.assistant .foot")[0])
    click(page, ".message.assistant", "‹")
    eventually(lambda: "1 of 2" in page.texts(".message.assistant .foot")[0])
    assert page.find(".message.assistant").get_attribute("data-id") == first["id"]


def test_a_conversation_can_be_renamed_found_and_deleted(page: Page) -> None:
    page.send("Spell the word banana.")
    stream = page.wait_for_end()["stream"]
    choose_from(page, "#menu", "Rename")
    page.find(".rename").send_keys("Fruit", Keys.ENTER)
    eventually(lambda: page.texts("#list .name") == ["Fruit"])
    page.find("#search").send_keys("nothing like it")
    eventually(lambda: page.texts("#list li") == [])
    page.find("#search").clear()
    page.find("#search").send_keys("banana")
    eventually(lambda: page.texts("#list .name") == ["Fruit"])
    assert page.texts("#list mark") == ["banana"]
    choose_from(page, "#menu", "Delete")
    eventually(lambda: page.texts("#list .name") == [])
    click(page, ".toast", "Undo")
    eventually(lambda: page.texts("#list .name") == ["Fruit"])
    assert page.server.get(f"/v1/streams/{stream}")["state"] == "finished"
    choose_from(page, "#menu", "Delete")
    dismiss = ".toast [aria-label=Dismiss]"
    eventually(lambda: page.texts(dismiss))
    page.find(dismiss).click()
    eventually(lambda: page.stored() == [])
    with pytest.raises(HTTPError, match="404"):
        eventually(lambda: not page.server.get(f"/v1/streams/{stream}"))


def test_hostile_text_does_nothing(page: Page, tmp_path: object) -> None:
    attack = (
        "<img src=x onerror=window.hit=1><script>window.hit=1</script> "
        "[a](javascript:window.hit=1) [b](data:text/html,x) ![c](https://e.example/x.png) "
        "<svg onload=window.hit=1> `<b>` **<iframe src=javascript:window.hit=1>** "
        '[d](https://e.example/"onmouseover="window.hit=1)\n\n'
        "| <img src=x onerror=window.hit=1> |\n|---|\n| <svg onload=window.hit=1> |"
    )
    message = {"id": "m", "conversation": "c", "role": "assistant", "text": attack, "created": 1}
    message |= {"calls": [{"id": attack, "name": attack, "arguments": attack}], "parent": "t"}
    message |= {"reasoning": attack}
    result = {"id": attack, "name": attack, "text": attack}
    before = {"id": "t", "conversation": "c", "role": "tool", "results": [result], "created": 0}
    before |= {"images": [attack, "https://e.example/x.png", "data:image/svg+xml;base64,PHN2Zz4="]}
    conversation = {"id": "c", "title": attack, "created": 1, "updated": 1, "leaf": "m"}
    whole = {"conversations": [conversation], "messages": [before, message]}
    file = f"{tmp_path}/hostile.json"
    with open(file, "w") as out:
        json.dump(whole, out)
    page.find("#file").send_keys(file)
    eventually(lambda: page.texts("#list li"))
    page.find("#list button").click()
    eventually(lambda: page.texts(".message.assistant .body"))
    script = (
        "return [window.hit, document.querySelectorAll('#thread img,#thread script,#thread iframe,"
        "#thread svg').length, [...document.querySelectorAll('#thread a')].map(a => a.protocol)]"
    )
    hit, elements, protocols = page.driver.execute_script(script)
    assert (hit, elements) == (None, 0)
    assert protocols and set(protocols) == {"https:"}
    # the policy itself: not even a script of the page can make one of a string
    body = "document.body"
    for attempt in (f"{body}.setAttribute('onclick', 'x')", f"{body}.innerHTML = '<b>'"):
        with pytest.raises(JavascriptException, match=r"Trusted|blocked by CSP"):
            page.driver.execute_script(attempt)
    page.driver.get_log("browser")  # which names what the policy forbade


GROW = """
const done = arguments[arguments.length - 1];
import("/web/markdown.js").then(({MarkdownView}) => {
  const [text, sizes] = arguments;
  const [root, whole] = [document.createElement("div"), document.createElement("div")];
  const view = new MarkdownView(root);
  const differ = [];
  for (let n = 0, k = 0; n < text.length; k++) {
    n = Math.min(n + sizes[k % sizes.length], text.length);
    while (!view.update(text.slice(0, n), k % 2 ? Infinity : 0));
    if (k % 10 && n < text.length) continue;
    const now = document.createElement("div");
    new MarkdownView(now).update(text.slice(0, n));
    if (!root.isEqualNode(now)) differ.push(text.slice(0, n));
  }
  new MarkdownView(whole).update(text);
  done([differ, [...whole.querySelectorAll("*")].map(n => n.localName)]);
});
"""
"""A text that grows by pieces of `sizes`, half of the time with no time to show it at once."""


def test_markdown_is_shown(page: Page) -> None:
    text = (
        "# Title\n\nSome *text* and **more** `code`, 2 * 3 * 4, snake_case_name.\n\n"
        "- one\n- two\n  1. nested\n\n> said\n\n```py\nx = 'a' # b\n```\n\n---\nhttps://e.example."
        "\n\na line\n| a | b \\| c |\n|---|:-:|\n| *1* | 2 | 3 |\n| 4\n\nafter"
    )
    differ, tags = page.driver.execute_async_script(GROW, text, [1])
    assert differ == []  # shown piece by piece as at once
    for tag in ("h3", "em", "strong", "code", "ul", "ol", "blockquote", "pre", "span", "hr", "a"):
        assert tag in tags
    assert tags.count("em") == 2
    assert [tags.count(tag) for tag in ("table", "tr", "th", "td")] == [1, 3, 2, 4]


def test_markdown_that_grows_is_shown_as_at_once(page: Page) -> None:
    lines = ["", "", "a line", "*more*", "- one", "  two", "- [ ] three", "    - deep", "1. first"]
    lines += ["> said", "> - one", ">   two", "> ```", "```js", "let x; /* open", "end */ y", "```"]
    lines += ["| a | b |", "|---|---|", "| 1 | 2 |", "---", "## Part", "- > a", "  > b", "-", "   "]
    for seed in range(40):
        dice = random.Random(seed)
        text = "\n".join(dice.choices(lines, k=dice.choice((8, 30, 90))))
        sizes = dice.choices((1, 3, 9, 40), k=20)
        differ, _ = page.driver.execute_async_script(GROW, text, sizes)
        assert differ == [], seed


def test_long_code_is_coloured_and_whole(page: Page) -> None:
    lines = [f"let x{number} = 1;" for number in range(100)]
    lines[5], lines[70] = "/* from here", "to here */ let y;"
    script = """
    const done = arguments[arguments.length - 1];
    import("/web/markdown.js").then(({MarkdownView}) => {
      const root = document.createElement("div");
      new MarkdownView(root).update(arguments[0]);
      const comments = [...root.querySelectorAll(".hl-comment")].map(n => n.textContent);
      done([root.querySelector("code").textContent, comments.join("")]);
    });
    """
    fenced = "\n".join(["```js", *lines, "```", ""])
    code, comment = page.driver.execute_async_script(script, fenced)
    assert code == "\n".join(lines)
    assert comment == "\n".join([*lines[5:70], "to here */"])
