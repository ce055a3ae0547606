"""The states that people see the page in, by name; each function brings an open page into one."""

import base64
import time
from collections.abc import Callable
from typing import Any

from selenium.webdriver.common.keys import Keys

from tests.web.page import Page, eventually
from tests.web.test_chat import choose_from, click
from tests.web.test_everybody import EVERYTHING
from tests.web.test_files import give, make_pdf
from tests.web.test_first_minutes import REFUSE, hold
from tests.web.test_images import DOT
from tests.web.test_loading import LOADS, WARM

PUT = """
const [conversations, messages] = arguments;
const done = arguments[arguments.length - 1];
indexedDB.open("headrace").onsuccess = ({target: {result: database}}) => {
  const all = database.transaction(["conversations", "messages"], "readwrite");
  all.oncomplete = () => { database.close(); done(); };
  for (const one of conversations) all.objectStore("conversations").put(one);
  for (const one of messages) all.objectStore("messages").put(one);
};
"""
STREAM = """
const [frames] = arguments;
const send = window.fetch;
const encoded = (text) => new TextEncoder().encode(text);
window.fetch = async (url, options) => {
  if (!/chat.completions|v1.streams/.test(String(url))) return send(url, options);
  const body = new ReadableStream({ start(out) {
    for (const one of frames) out.enqueue(encoded(`data: ${JSON.stringify(one)}\\n\\n`));
    setInterval(() => out.enqueue(encoded(":\\n\\n")), 500);
  }});
  return new Response(body, { headers: { "X-Stream-Id": "held" } });
};
"""
"""An answer that comes as far as it is given, and then no further."""

MODELS = """
const send = window.fetch;
window.fetch = async (url, options) => {
  if (!String(url).endsWith("/v1/models")) return send(url, options);
  const of = (id, value, more) => ({ id, status: { value, ...more }, max_model_len: 131072,
    architecture: { input_modalities: ["text", "image"] } });
  const data = [of("headrace-mini", "loaded"), of("a-model-with-a-rather-long-name", "unloaded"),
    of("large", "loading", { stage: "reading weights", progress: 0.42 }),
    of("broken", "loaded", { failed: true })];
  return Response.json({ data });
};
document.getElementById("model").dispatchEvent(new Event("focus"));
"""
LOCKED = """
window.fetch = async () => Response.json({ error: { code: "401", message: "" } }, { status: 401 });
document.getElementById("model").dispatchEvent(new Event("focus"));
"""
PULLS = """
const send = window.fetch;
window.fetch = async (url, options) => {
  if (!/[0-9]\\/models$/.test(String(url))) return send(url, options);
  const of = (id, status) => ({ id, status, pulled: true });
  const half = { bytes_done: 1.23e9, bytes_total: 4.7e9 };
  const pace = { bytes_per_s: 11.4e6, seconds_left: 304 };
  const error = { message: "The disk has room for 1.2 GB, and the model needs 4.7 GB." };
  const long = "unsloth/Qwen3-4B-Instruct-GGUF:Q4_K_M";
  const data = [of(long, { value: "downloading", ...half, ...pace }),
    of("Qwen/Qwen3-0.6B", { value: "stopped", ...half }), of("a/b", { value: "downloading" }),
    of("someone/large", { failed: true, error }), of("someone/small", { value: "unloaded" })];
  return Response.json({ data });
};
"""
WHOLE = {
    "predicted_n": 214,
    "predicted_per_second": 31.4,
    "queue_ms": 2,
    "prompt_ms": 410,
    "prompt_n": 90,
    "cache_n": 30,
    "max_gap_ms": 64,
}
CALL = {"id": "c1", "name": "get_weather", "arguments": '{"city":"Oslo","days":[1,2]}'}
RESULT = {"id": "c1", "name": "get_weather", "text": '{"sky":"rain","degrees":7}'}
PICTURE = "data:image/png;base64," + base64.b64encode(DOT).decode()
FILE = {"name": "mill.py", "text": "def turn():\n    pass\n", "size": 21}
WIDE = "| " + " | ".join(f"column {k}" for k in range(12)) + " |\n|" + "---|" * 12
LONG = f"{WIDE}\n{'| some words ' * 12}|\n\n```js\n{'let x = 1; ' * 30}\n```\n\n{'banana' * 60}"
TURNS: list[dict[str, Any]] = [
    {"role": "user", "text": "Hello", "images": [PICTURE], "files": [FILE]},
    {"role": "assistant", "calls": [CALL], "reasoning": "I wonder.", "thoughtMs": 1900},
    {"role": "tool", "results": [RESULT]},
    {"role": "assistant", "text": EVERYTHING, "timings": WHOLE},
    {"role": "user", "text": "And as data? " + "Please. " * 30},
    {"role": "assistant", "text": '{"name":"Ann","tags":["a","b"],"more":{"n":1,"none":null}}'},
    {"role": "user", "text": "Something wide"},
    {"role": "assistant", "text": LONG, "timings": WHOLE},
]
BROKEN: list[dict[str, Any]] = [
    {"role": "user", "text": "Count from 1 to 150."},
    {"role": "assistant", "text": "1, 2, 3, 4, 5, 6", "outcome": "stopped", "timings": WHOLE},
    {"role": "user", "text": "All of it"},
    {"role": "assistant", "outcome": "failed", "code": "context_length_exceeded"}
    | {"error": "5,210 tokens are more than the model's context of 4,096."},
    {"role": "user", "text": "Then less"},
    {"role": "assistant", "text": "1, 2, 3, 4", "finish": "length", "timings": WHOLE},
]


def put(page: Page, turns: list[dict[str, Any]], title: str = "What a mill does") -> None:
    """A conversation as the page itself keeps it, in view."""
    now = time.time() * 1000
    messages = []
    for number, turn in enumerate(turns):
        parent = f"m{number - 1}" if number else None
        every = {"id": f"m{number}", "conversation": "c", "parent": parent, "created": now + number}
        rest = {"text": "", "reasoning": "", "calls": [], "outcome": "done"}
        messages.append(rest | every | turn)
    whole = {"id": "c", "title": title, "created": now, "updated": now, "leaf": messages[-1]["id"]}
    page.driver.execute_async_script(PUT, [whole], messages)
    page.open("/#c")
    page.driver.refresh()
    eventually(lambda: len(page.texts(".message")) == len(turns))
    eventually(lambda: page.texts(".message:last-child .foot button"))


def list_of(page: Page) -> None:
    """Conversations of several days; on a phone their list is opened."""
    now = time.time() * 1000
    titles = ["Fruit and how to spell it", "Mills", "A title that is longer than its place allows"]
    ages = [0, 0.1, 1, 1.2, 4, 20, 90, 400]
    every = [(f"c{k}", titles[k % 3], now - age * 86_400_000) for k, age in enumerate(ages)]
    conversations = [{"id": i, "title": t, "created": u, "updated": u} for i, t, u in every]
    said = {"role": "user", "text": "How is banana spelled? " * 9, "reasoning": "", "calls": []}
    messages = [
        {"id": f"m{k}", "conversation": i, "parent": None, "created": u} | said
        for k, (i, _, u) in enumerate(every)
    ]
    leaves = [one | {"leaf": f"m{k}"} for k, one in enumerate(conversations)]
    page.driver.execute_async_script(PUT, leaves, messages)
    page.open("/#c0")
    page.driver.refresh()
    eventually(lambda: len(page.texts("#list li")) == len(ages))
    open_list(page)


def open_list(page: Page) -> None:
    if page.find("#open-side").is_displayed():
        page.find("#open-side").click()


def held(page: Page, text: str, *frames: dict[str, Any]) -> None:
    """An answer that has come so far."""
    eventually(lambda: page.texts("#model option"))
    page.driver.execute_script(STREAM, frames)
    page.send("Count from 1 to 150.")
    eventually(lambda: text in "".join(page.texts(".message.assistant")))


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}], "timings": WHOLE}


def start(page: Page) -> None:
    eventually(lambda: page.texts(".can li"))


def models(page: Page) -> None:
    start(page)
    page.driver.execute_script(MODELS)
    eventually(lambda: len(page.texts("#model option")) == 5)
    eventually(lambda: "sees images" in page.texts(".can li"))


def key(page: Page) -> None:
    start(page)
    page.driver.execute_script(LOCKED)
    page.find("#key input").send_keys("wrong", Keys.ENTER)
    eventually(lambda: "does not accept this key" in page.find("#key-fault").text)


def files(page: Page) -> None:
    start(page)
    give(page, "paste", "mill.py", b"def turn(wheel):\n    return wheel + 1\n")
    give(page, "drop", "a-paper-of-a-very-long-name.pdf", make_pdf("When the water", "comes"))
    eventually(lambda: "".join(page.texts("#attached .about")).count("tokens") == 2)
    page.find("#input").send_keys("What do these two say?")
    eventually(lambda: "of 4,096 tokens" in page.find("#room").text)


def refused_file(page: Page) -> None:
    start(page)
    give(page, "paste", "tool.exe", b"MZ\x00\x01\x02")
    eventually(lambda: page.find("#notice").text)


def too_much(page: Page) -> None:
    start(page)
    give(page, "paste", "long.txt", b"water wheel mill " * 3000)
    eventually(lambda: "too long" in page.find("#room").text)


def dropping(page: Page) -> None:
    start(page)
    page.driver.execute_script("document.body.classList.add('dropping')")


def loading(page: Page) -> None:
    start(page)
    page.driver.execute_script(LOADS)
    page.send("Spell the word banana.")
    eventually(lambda: "compiling" in page.find("#loading").text)
    page.driver.execute_script(WARM)
    eventually(lambda: "warming up" in page.find("#loading").text)


def away(page: Page) -> None:
    start(page)
    page.offline(True)
    eventually(lambda: "cannot be reached" in page.find("#away").text)


def reconnected(page: Page) -> None:
    away(page)
    page.offline(False)
    eventually(lambda: page.texts(".toast"))


def busy(page: Page) -> None:
    start(page)
    page.driver.execute_script(REFUSE)
    page.send("Spell the word banana.")
    eventually(lambda: "The server is busy" in "".join(page.texts(".mends")))


def queued(page: Page) -> None:
    held(page, "Position 3", {"queue": {"position": 3, "waiting": 7, "eta_ms": 64_000}})


def prompt(page: Page) -> None:
    told = {"total": 20_480, "cache": 5120, "processed": 12_288, "time_ms": 31_000}
    held(page, "Processing the prompt", {"prompt_progress": told})


def recovering(page: Page) -> None:
    held(page, "restarting", delta(content="1, 2, 3"), {"recovering": {"attempt": 1}})


def answering(page: Page) -> None:
    held(page, "tokens/s", delta(content="# A mill\n\nThe *water*\n\n```py\ndef turn():\n    ret"))


def thinking(page: Page) -> None:
    held(page, "Thinking", delta(reasoning_content="The person wants numbers."))
    page.find(".assistant .thinking summary").click()


def conversation(page: Page) -> None:
    put(page, TURNS)


def first_messages(page: Page) -> None:
    put(page, TURNS)
    page.find(".assistant .thinking summary").click()
    page.find(".file summary").click()
    page.driver.execute_script("document.getElementById('thread').scrollTop = 0")


def broken(page: Page) -> None:
    put(page, BROKEN)


def editing(page: Page) -> None:
    put(page, TURNS[:2] + TURNS[3:6])
    click(page, ".message.user:nth-child(4)", "Edit")


def results(page: Page) -> None:
    put(page, TURNS[:2])
    eventually(lambda: page.texts(".results textarea"))


def versions(page: Page) -> None:
    page.send("Spell the word banana.")
    page.wait_for_end()
    eventually(lambda: any("Regenerate" in text for text in page.texts(".foot")))
    click(page, ".message.assistant", "Regenerate")
    eventually(lambda: len(page.answers()) == 2 and page.wait_for_end())
    eventually(lambda: "2 of 2" in page.texts(".message.assistant .foot")[0])


def confidence(page: Page) -> None:
    page.send("Count from 1 to 20.")
    page.wait_for_end()
    eventually(lambda: any("Confidence" in text for text in page.texts(".foot")))
    click(page, ".message.assistant", "Confidence")
    eventually(lambda: page.texts(".tokens"))
    page.find(".tokens").send_keys(Keys.ARROW_RIGHT)


def other_models(page: Page) -> None:
    put(page, TURNS)
    page.driver.execute_script(MODELS)
    again = "[aria-label='Regenerate with another model']"
    eventually(lambda: page.texts(again))
    page.driver.find_elements("css selector", again)[-1].click()


def searching(page: Page) -> None:
    list_of(page)
    page.find("#search").send_keys("banana")
    eventually(lambda: page.texts("#list mark"))


def found_nothing(page: Page) -> None:
    list_of(page)
    page.find("#search").send_keys("nothing like it")
    eventually(lambda: not page.texts("#list li"))


def row_menu(page: Page) -> None:
    list_of(page)
    page.find("#list .more").click()


def renaming(page: Page) -> None:
    list_of(page)
    choose_from(page, "#list .more", "Rename")


def deleted(page: Page) -> None:
    put(page, TURNS, "A title that is longer than its place in a line allows")
    choose_from(page, "#menu", "Delete")
    eventually(lambda: page.texts(".toast"))


def list_menu(page: Page) -> None:
    list_of(page)
    page.find("#others").click()


def settings(page: Page) -> None:
    start(page)
    open_list(page)
    page.find("#settings").click()
    eventually(lambda: page.find("#numbers input").get_attribute("placeholder") == "1")


def options(page: Page) -> None:
    put(page, TURNS[:1])
    page.find("#options").click()
    page.find("#advanced summary").click()
    page.find("#choices [name=tools]").send_keys("no list")
    click(page, "#choices", "Save")
    eventually(lambda: page.find("#fault").text)


def shortcuts(page: Page) -> None:
    start(page)
    hold(page, Keys.CONTROL, "/")
    eventually(lambda: page.find("#shortcuts").is_displayed())


def downloads(page: Page) -> None:
    start(page)
    page.driver.execute_script(PULLS)
    open_list(page)
    choose_from(page, "#others", "Get a model")
    eventually(lambda: "someone/small" in page.texts("#pulled strong"))


def missing(page: Page) -> None:
    page.open("/nosuch/page")
    assert page.texts("h1") == ["There is no page at this address"]


def batches(page: Page) -> None:
    page.open("/batches")
    # other tests on this server may have left some
    eventually(lambda: page.find("#none").is_displayed() or page.texts("#batches tbody tr"))


def dashboard(page: Page) -> None:
    page.open("/dashboard")
    eventually(lambda: "not measured yet" not in page.texts("#live .soft") and page.texts("dd"))


def dashboard_busy(page: Page) -> None:
    dashboard(page)
    page.start_load_test()
    eventually(lambda: len(page.texts("#requests tbody tr")) >= 4)


def dashboard_question(page: Page) -> None:
    dashboard(page)
    eventually(lambda: page.find("#try").is_enabled())
    page.find("#try").click()
    assert page.find("#ask").is_displayed()


STATES: dict[str, Callable[[Page], None]] = {
    act.__name__.replace("_", "-"): act
    for act in (
        *(start, models, key, files, refused_file, too_much, dropping, loading, away, reconnected),
        *(busy, queued, prompt, recovering, answering, thinking, conversation, first_messages),
        *(broken, editing, results, versions, confidence, other_models, list_of, searching),
        *(found_nothing, row_menu, renaming, deleted, list_menu, settings, options, shortcuts),
        *(downloads, missing, batches, dashboard, dashboard_busy, dashboard_question),
    )
}
