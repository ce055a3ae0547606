"""Takes the pictures of the page in docs/images, from a real server with headrace-mini."""

import json
import re
import tempfile
import time
from pathlib import Path

from tests.web.page import Page, eventually, new_driver
from tests.web.server import Server
from tests.web.test_files import give, make_pdf

MANY = re.compile(r"had \d{3,} prompt tokens")
IMAGES = Path(__file__).parents[2] / "docs" / "images"

TEXT = r"""A headrace carries water from the *weir* to the wheel, whose power[^1] is

$$
P = \eta \, \rho \, g \, Q \, h
$$

```python
def power(flow: float, head: float, losses: float = 0.2) -> float:
    return 1000 * 9.81 * flow * head * (1 - losses)  # in watts
```

| Head | Flow | Power |
|:-----|-----:|------:|
| 2.0 m | 0.3 m³/s | 4.7 kW |
| 2.5 m | 0.5 m³/s | 9.8 kW |

- [x] Measure the head
- [ ] Measure the flow

[^1]: Without what the gears lose.
"""


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    server = Server()
    driver = new_driver(1100, 850)
    page = Page(driver, server)
    try:
        page.open()
        eventually(lambda: page.texts(".can li"))
        driver.save_screenshot(str(IMAGES / "chat-start.png"))
        give(page, "paste", "mill.py", b"def turn(wheel):\n    return wheel + 1\n")
        give(page, "paste", "paper.pdf", make_pdf("When the water comes", "the wheel turns"))
        eventually(lambda: "".join(page.texts("#attached .about")).count("tokens") == 2)
        set_scheme(page, "dark", 390, 800)
        page.find("#input").send_keys("What do these two say?")
        time.sleep(2)  # of counting
        driver.save_screenshot(str(IMAGES / "chat-files.png"))
        page.find("#input").clear()
        for _ in range(2):
            page.find("#attached button").click()
        set_scheme(page, "light", 1100, 850)
        page.send("Spell the word banana.")
        page.wait_for_end()
        page.send("Count from 1 to 150.")
        eventually(lambda: "40," in page.texts(".message.assistant .body")[-1])
        server.kill_engine()
        driver.refresh()
        eventually(lambda: "100," in "".join(page.texts(".message.assistant .body")[-1:]))
        driver.save_screenshot(str(IMAGES / "chat.png"))
        page.wait_for_end()
        set_scheme(page, "dark", 390, 800)
        time.sleep(0.5)
        driver.save_screenshot(str(IMAGES / "chat-phone.png"))
        set_scheme(page, "light", 1100, 1600)
        page.open("/dashboard")
        eventually(lambda: page.texts('[data-name="State"]') == ["ok"])
        eventually(lambda: "not measured yet" not in page.texts("#live .soft"))
        page.start_load_test()
        eventually(lambda: len(page.texts("#rows strong")) == 5)
        eventually(lambda: MANY.search(page.find("#steps-text").text))
        time.sleep(0.5)
        driver.save_screenshot(str(IMAGES / "dashboard.png"))
        take_answer(page)
    finally:
        driver.quit()
        server.stop()


def take_answer(page: Page) -> None:
    """An answer with what Markdown has, imported."""
    asked = {"id": "a", "conversation": "c", "role": "user", "text": "How strong is a mill?"}
    told = {"id": "b", "conversation": "c", "parent": "a", "text": TEXT, "created": 1}
    told |= {"role": "assistant", "reasoning": "Head and flow decide."}
    conversation = {"id": "c", "title": asked["text"], "leaf": "b", "updated": time.time() * 1000}
    set_scheme(page, "light", 1100, 1000)
    page.open()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"conversations": [conversation], "messages": [asked, told]}, file)
        file.flush()
        page.find("#file").send_keys(file.name)
        eventually(lambda: asked["text"] in page.texts("#list li button"))
    page.find("#list button").click()
    eventually(lambda: page.texts("math"))
    eventually(lambda: not page.texts(".toast"))
    page.driver.save_screenshot(str(IMAGES / "answer.png"))


def set_scheme(page: Page, scheme: str, width: int, height: int) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


if __name__ == "__main__":
    main()
