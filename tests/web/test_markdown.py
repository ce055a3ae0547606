"""Markdown as it is shown: tasks, footnotes, math, and what is longer than a window."""

from typing import Any

import pytest

from tests.web.page import Page, eventually

SHOW = """
const done = arguments[arguments.length - 1];
import("/web/markdown.js").then(({MarkdownView}) => {
  document.querySelector("#shown")?.remove();
  const root = document.createElement("div");
  [root.id, root.className] = ["shown", "body"];
  document.querySelector("main").append(root);
  new MarkdownView(root).update(arguments[0]);
  done();
});
"""
MATHML = "http://www.w3.org/1998/Math/MathML"


def show(page: Page, text: str) -> None:
    page.driver.execute_async_script(SHOW, text)


def of_shown(page: Page, what: str) -> Any:
    return page.driver.execute_script(f"return document.querySelector('#shown').{what}")


def test_tasks_have_boxes(page: Page) -> None:
    show(page, "- [ ] one\n- [x] *two*\n- [link] three\n\n[ ] four")
    boxes = "querySelectorAll('li > p > input:disabled')"
    assert of_shown(page, boxes + ".length") == 2
    assert page.texts("#shown li") == [" one", " two", "[link] three"]
    assert of_shown(page, "querySelectorAll('input')[1].checked") is True


def test_a_footnote_is_found_from_its_number(page: Page) -> None:
    show(page, "It is so[^1], and `[^2]` is not.\n\n[^1]: as *somebody* said\n")
    assert page.texts("#shown .to-note") == ["1"]
    assert page.texts("#shown .note") == ["1as somebody said"]
    page.find("#shown .to-note").click()
    assert page.driver.switch_to.active_element.get_attribute("class") == "note"


def test_math_becomes_mathml(page: Page) -> None:
    text = "Of $a^2$ and \\(b\\), for $5 and $6:\n\n$$\n\\frac{1}{2}\n$$\n\n\\[ x_1 \\] `$c$`"
    show(page, text)
    eventually(lambda: len(page.texts("#shown math")) == 4)
    assert of_shown(page, "querySelector('mfrac').namespaceURI") == MATHML
    assert page.texts("#shown .math.block math").__len__() == 2
    assert page.texts("#shown p")[0].endswith("for $5 and $6:")
    assert not [line for line in page.complaints() if "style" in line]  # the policy


def test_math_that_cannot_be_read_stays_as_it_was_written(page: Page) -> None:
    show(page, "$\\frac{1}$ $\\href{javascript:alert(1)}{x}$ $\\def\\a{\\a\\a}\\a$ $x$")
    eventually(lambda: len(page.texts("#shown .raw")) == 3)
    assert page.texts("#shown .raw")[1] == "\\href{javascript:alert(1)}{x}"
    assert of_shown(page, "querySelectorAll('a').length") == 0


LONG = 300
ITEMS = "\n".join(f"{k}. item *{k}*\n   more" for k in range(1, LONG + 1))
DEEP = "- one\n" + "\n".join(f"  - deep {k}" for k in range(LONG)) + "\n- two"
ROWS = "| a | b |\n|---|---|\n" + "\n".join(f"| {k} | *x* |" for k in range(LONG))
QUOTE = "\n".join(f"> said {k}\n>\n> - so\n>" for k in range(LONG))
LINES = "\n".join(f"line {k}" for k in range(LONG))


@pytest.mark.parametrize(
    "text, css, number",
    [
        (ITEMS, "ol > li", LONG),
        (DEEP, "ul > li > ul > li", LONG),
        (ROWS, "table > tbody > tr", LONG),
        (QUOTE, "blockquote > ul", LONG),
        (LINES, "p", 2),
        (f"```js\n{LINES}\n```", ".code", 1),
    ],
    ids=["items", "deep", "rows", "quote", "lines", "code"],
)
def test_what_is_longer_than_a_window_is_one_thing(
    page: Page, text: str, css: str, number: int
) -> None:
    show(page, f"{text}\n\nafter")
    assert of_shown(page, f"querySelectorAll(':scope > {css}, .table > {css}').length") == number
    assert of_shown(page, "children.length") == 2 and page.texts("#shown > p")[-1] == "after"
