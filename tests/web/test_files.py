"""Files in messages: text, code and PDF, with what they cost, and that none is lost."""

import base64
from pathlib import Path

from selenium.webdriver.common.keys import Keys

from tests.web.page import Page, eventually
from tests.web.test_chat import click
from tests.web.test_choices import SENT, sent

GIVE = """
const [kind, name, data, texts] = arguments;
const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
const given = new DataTransfer();
given.items.add(new File([bytes], name));
for (const [type, text] of Object.entries(texts)) given.setData(type, text);
const where = kind === "paste" ? "clipboardData" : "dataTransfer";
const event = new Event(kind, { bubbles: true, cancelable: true });
Object.defineProperty(event, where, { value: given });
document.getElementById("input").dispatchEvent(event);
"""
DRAGGED = """
const dataTransfer = new DataTransfer();
dataTransfer.setData("text/plain", "the wheel turns");
return ["dragover", "drop"].map((kind) => document.querySelector(arguments[0])
  .dispatchEvent(new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true })));
"""
"""Whether the browser does with a text what it does of itself."""

UNCOUNTED = """
const send = window.fetch;
window.fetch = async (url, options) =>
  String(url).endsWith("/tokenize") ? new Response("", { status: 503 }) : send(url, options);
"""
"""A server that cannot count tokens now, so that a message is sent although it is too long."""

CHIPS = "#attached .chip .name"
FIELD = "return document.getElementById('input').value"


def give(page: Page, kind: str, name: str, data: bytes, **texts: str) -> None:
    """With `texts` of the types `text/NAME` beside the file."""
    typed = {f"text/{one}": text for one, text in texts.items()}
    page.driver.execute_script(GIVE, kind, name, base64.b64encode(data).decode(), typed)


def make_pdf(*pages: str) -> bytes:
    """A PDF of one line of text a page."""
    kids = " ".join(f"{4 + 2 * k} 0 R" for k in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for k, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 40 700 Td ({text}) Tj ET"
        objects += [
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800]"
            f" /Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * k} 0 R >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        ]
    out = b"%PDF-1.4\n"
    places = []
    for number, one in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{one}\nendobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    head = f"xref\n0 {len(places) + 1}\n0000000000 65535 f \n"
    tail = f"trailer << /Size {len(places) + 1} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n"
    return out + (head + table + tail).encode()


def test_files_are_attached_counted_sent_and_kept(page: Page, tmp_path: Path) -> None:
    page.driver.execute_script(SENT)
    eventually(lambda: page.texts("#model option"))
    file = tmp_path / "mill.py"
    file.write_text("def turn():\n    return '```'\n")
    page.find("#given").send_keys(str(file))
    give(page, "paste", "notes.txt", b"a caf\xe9")
    eventually(lambda: page.texts(CHIPS) == ["mill.py", "notes.txt"])
    give(page, "drop", "two.pdf", make_pdf("When the water comes", "the wheel turns"))
    eventually(lambda: "2 pages" in "".join(page.texts("#attached .about .soft")))
    assert page.texts(CHIPS) == ["mill.py", "notes.txt", "two.pdf"]
    eventually(lambda: all("tokens" in text for text in page.texts("#attached .about .soft")))
    assert "2 pages" in page.texts("#attached .about .soft")[2]
    page.find("#attached [aria-label='Remove notes.txt']").click()
    page.find("#input").send_keys("Which file?")
    page.driver.refresh()  # a lost page costs nothing
    eventually(lambda: page.texts(CHIPS) == ["mill.py", "two.pdf"])
    eventually(lambda: "of 4,096 tokens" in page.find("#room").text)
    page.driver.execute_script(SENT)
    page.find("#input").send_keys(Keys.ENTER)
    assert page.wait_for_end()["outcome"] == "done"
    ((said,),) = [body["messages"] for body in sent(page)]
    code = "File mill.py:\n````py\ndef turn():\n    return '```'\n````"
    pdf = "File two.pdf (2 pages):\n```\nWhen the water comes\n\nthe wheel turns\n```"
    assert said == {"role": "user", "content": f"{code}\n\n{pdf}\n\nWhich file?"}
    page.driver.refresh()
    eventually(lambda: page.texts(".file .name") == ["mill.py", "two.pdf"])
    page.find(".file summary").click()
    eventually(lambda: page.texts(".file pre")[0] == file.read_text())
    assert page.texts(".message.user .body") == ["Which file?"]
    assert page.texts(CHIPS) == []


def test_a_message_waits_for_the_files_that_are_being_read(page: Page) -> None:
    page.driver.execute_script(SENT)
    eventually(lambda: page.texts("#model option"))
    give(page, "drop", "one.pdf", make_pdf("the wheel turns"))
    page.find("#input").send_keys("So?", Keys.ENTER)
    page.wait_for_end()
    assert "the wheel turns" in sent(page)[0]["messages"][0]["content"]
    page.find("#new").click()
    eventually(lambda: not page.texts(".message"))
    assert page.texts(CHIPS) == []


def test_a_text_can_be_dragged_into_the_field_and_nowhere_else(page: Page) -> None:
    assert page.driver.execute_script(DRAGGED, "#input") == [True, True]
    assert page.driver.execute_script(DRAGGED, "#thread") == [False, False]


def test_cells_of_a_table_are_pasted_as_their_text(page: Page) -> None:
    eventually(lambda: page.texts("#model option"))
    give(page, "paste", "cells.txt", b"a picture", plain="1\t2", html="<td>1<td>2")
    give(page, "paste", "notes.txt", b"the wheel turns", plain="notes.txt")
    eventually(lambda: page.texts(CHIPS) == ["notes.txt"])


def test_what_is_no_text_is_refused_in_words(page: Page) -> None:
    eventually(lambda: page.texts("#model option"))
    give(page, "paste", "tool.exe", b"MZ\x00\x01\x02")
    wanted = "tool.exe is neither text, PDF nor image. Save it as one of these."
    eventually(lambda: page.texts("#notice.fails span") == [wanted])
    give(page, "drop", "bad.pdf", b"%PDF-1.4 and no more")
    eventually(lambda: page.texts("#notice span") == ["bad.pdf cannot be read as a PDF."])
    assert page.texts(CHIPS) == []


def test_too_much_for_the_context_is_said_before_it_is_sent(page: Page) -> None:
    eventually(lambda: page.texts("#model option"))
    give(page, "paste", "long.txt", b"water wheel mill " * 3000)
    eventually(lambda: "of 4,096 tokens · too long" in page.find("#room").text)
    page.find("#input").send_keys("So?", Keys.ENTER)
    assert page.stored() == [] and not page.find("#send").is_enabled()
    page.find("#attached button").click()
    eventually(lambda: page.find("#send").is_enabled())


def test_a_message_that_was_too_long_is_put_back_with_its_files(page: Page) -> None:
    eventually(lambda: page.texts("#model option"))
    page.send("Spell the word banana.")
    page.wait_for_end()
    page.driver.execute_script(UNCOUNTED)
    give(page, "paste", "long.txt", b"water wheel mill " * 3000)
    give(page, "paste", "short.txt", b"water")
    eventually(lambda: page.texts(CHIPS) == ["long.txt", "short.txt"])
    page.find("#input").send_keys("So?", Keys.ENTER)
    eventually(lambda: len(page.answers()) == 2)
    assert page.wait_for_end()["code"] == "context_length_exceeded"
    told = ["With this message, the conversation is too long for the model."]
    eventually(lambda: page.texts(".message.assistant:last-child .status span") == told)
    page.find("#input").send_keys("now")
    assert page.find("main").text.count("too long") == 1 and not page.find("#send").is_enabled()
    click(page, ".message.assistant", "Take your message back to shorten it")
    eventually(lambda: page.texts(CHIPS) == ["long.txt", "short.txt"])
    assert page.driver.execute_script(FIELD) == "So?\n\nnow" and len(page.texts(".message")) == 2
    page.driver.refresh()
    eventually(lambda: "too long" in page.find("#room").text and len(page.texts(".message")) == 2)
    assert page.find("main").text.count("too long") == 1
    page.find("#attached [aria-label='Remove long.txt']").click()
    eventually(lambda: page.find("#send").is_enabled())
    page.find("#send").click()
    eventually(lambda: len(page.answers()) == 3)
    assert page.wait_for_end()["outcome"] == "done"


def test_a_first_message_that_was_too_long_is_put_back_too(page: Page) -> None:
    eventually(lambda: page.texts("#model option"))
    page.driver.execute_script(UNCOUNTED)
    give(page, "paste", "long.txt", b"water wheel mill " * 3000)
    eventually(lambda: page.texts(CHIPS) == ["long.txt"])
    page.find("#send").click()
    page.wait_for_end()
    click(page, ".message.assistant", "Take your message back to shorten it")
    eventually(lambda: page.texts(CHIPS) == ["long.txt"] and page.texts(".welcome h2"))
    assert not page.texts(".message")
