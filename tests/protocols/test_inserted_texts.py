import json
import time
from typing import Any

import pytest

from headrace.protocols.inserted_texts import client_of, remove_inserted
from headrace.protocols.worker import Jobs
from headrace_common.worker_jobs import CheckedBody, CountTokens, ReadBody
from tests.gateway.builders import FakeModel

ROUTE = "/v1/messages"
CLIENT = client_of("claude-cli/2.1.331 (external, sdk-cli)")
BILLING = "x-anthropic-billing-header: cc_version=2.1.331.709; cch=36ee5;"
LEFT = "<total_tokens>976141 tokens left</total_tokens>"


def sent(system: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"{LEFT} hi"}]
    return {"model": "headrace-mini", "max_tokens": 5, "messages": turns, "system": system}


def blocks(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    "system", [f"{BILLING}\nBe brief.\n\n{LEFT}", blocks(BILLING, f"Be brief.\n\n{LEFT}")]
)
def test_text_that_changes_with_each_request_is_removed_from_the_prompt(system: Any) -> None:
    body = sent(system)
    assert remove_inserted(body, ROUTE, CLIENT) == {
        "the billing header": BILLING,
        "the tokens left": LEFT,
    }
    shown = body["system"] if isinstance(system, str) else "".join(b["text"] for b in system)
    assert shown == "Be brief."
    assert body["messages"] == sent("")["messages"]  # text after the system prompt is not removed


@pytest.mark.parametrize(
    ("route", "client"), [(ROUTE, ""), ("/v1/chat/completions", CLIENT), (ROUTE, "another")]
)
def test_other_routes_and_clients_keep_the_text(route: str, client: str) -> None:
    body = sent(f"{BILLING}\nBe brief.\n\n{LEFT}")
    assert not remove_inserted(body, route, client)
    assert body == sent(f"{BILLING}\nBe brief.\n\n{LEFT}")


@pytest.mark.parametrize(
    "system", [f"Say {LEFT} at the end.", "a\nx-anthropic-billing-header: b", 7, [None, 7], [{}]]
)
def test_text_in_other_places_and_invalid_types_stays_unchanged(system: Any) -> None:
    body = sent(system)
    assert not remove_inserted(body, ROUTE, CLIENT) and body == sent(system)


def test_other_user_agents_match_no_client_of_the_table() -> None:
    assert (CLIENT, client_of("curl/8"), client_of("")) == ("Claude Code", "", "")


def test_a_worker_removes_inserted_text_from_prompt_and_count() -> None:
    jobs, body = Jobs(FakeModel()), json.dumps(sent(f"Be brief.\n\n{LEFT}")).encode()  # type: ignore[arg-type]
    plain = json.dumps(sent("Be brief.")).encode()
    checked = jobs.do(ReadBody(ROUTE, client=CLIENT), body)
    assert isinstance(checked, CheckedBody) and checked.inserted == {"the tokens left": LEFT}
    kept = jobs.do(ReadBody(ROUTE), body)
    assert isinstance(kept, CheckedBody) and not kept.inserted
    assert checked.packed == jobs.read(plain, ROUTE).packed != kept.packed
    assert jobs.do(CountTokens(CLIENT), body) == jobs.do(CountTokens(), plain)


def test_a_million_line_breaks_take_linear_time() -> None:
    body = {"system": "\n" * 1_000_000 + "Be brief."}
    started = time.thread_time()
    assert not remove_inserted(body, "/v1/messages", "Claude Code")
    assert time.thread_time() - started < 3.0  # was minutes
