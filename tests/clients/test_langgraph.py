"""LangGraph with ChatOpenAI: agents, and nodes that are tried again after a cut connection."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import RetryPolicy

COUNTED = ", ".join(map(str, range(1, 61)))


@tool
def get_weather(city: str) -> str:
    """Tells the weather in a city."""
    return '{"weather": "sunny"}'


class CutStream(httpx.SyncByteStream):
    """Ends with an error after a number of bytes."""

    def __init__(self, stream: Any, num_bytes: float) -> None:
        self._stream = stream
        self._left = num_bytes

    def __iter__(self) -> Iterator[bytes]:
        for data in self._stream:
            yield data
            self._left -= len(data)
            if self._left <= 0:
                raise httpx.ReadError("The connection was cut.")

    def close(self) -> None:
        self._stream.close()


class CuttingTransport(httpx.HTTPTransport):
    """Cuts the connection of each answer after the next number of bytes in `cuts`."""

    def __init__(self, *cuts: int) -> None:
        super().__init__()
        self.cuts = list(cuts)
        self.stream_ids: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = super().handle_request(request)
        self.stream_ids.append(answer.headers["x-stream-id"])
        stream = CutStream(answer.stream, self.cuts.pop(0) if self.cuts else float("inf"))
        return httpx.Response(answer.status_code, headers=answer.headers, stream=stream)


def kill_engine() -> None:
    tasks = Path(f"/proc/{os.environ['HEADRACE_TEST_PID']}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    is_engine = [b"_engine" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    os.kill(int(children[is_engine.index(True)]), signal.SIGKILL)


@pytest.fixture
def transport() -> CuttingTransport:
    return CuttingTransport()


@pytest.fixture
def model(url: str, transport: CuttingTransport) -> ChatOpenAI:
    return ChatOpenAI(
        model="headrace-mini",
        base_url=url,
        api_key="unused",
        temperature=0,
        max_retries=0,
        streaming=True,
        http_client=httpx.Client(transport=transport, timeout=60),
    )


def graph_of(model: Any, tools: Any = ()) -> Any:
    def ask(state: MessagesState) -> dict[str, Any]:
        messages = state["messages"]
        # The id of the newest message is the same for each try.
        key = {"Idempotency-Key": messages[-1].id}
        return {"messages": [model.invoke(messages, extra_headers=key)]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask, retry_policy=RetryPolicy(initial_interval=0.1))
    graph.add_edge(START, "ask")
    if tools:
        graph.add_node("tools", ToolNode(tools))
        graph.add_conditional_edges("ask", tools_condition)
        graph.add_edge("tools", "ask")
    return graph.compile()


def test_an_agent_calls_a_tool(model: ChatOpenAI) -> None:
    agent = graph_of(model.bind_tools([get_weather]), [get_weather])
    state = agent.invoke({"messages": [("user", "What is the weather in Paris?")]})
    assert state["messages"][-1].content == "The weather in Paris is sunny."


def test_a_node_that_is_tried_again_gets_the_same_stream(
    model: ChatOpenAI, transport: CuttingTransport
) -> None:
    transport.cuts = [6000, 3000]
    parts = graph_of(model).stream(
        {"messages": [("user", "Count from 1 to 60.")]}, stream_mode=["messages", "values"]
    )
    num_pieces, state = 0, {}
    for mode, part in parts:
        num_pieces += mode == "messages"
        if mode == "messages" and num_pieces == 10:
            kill_engine()
        if mode == "values":
            state = part
    assert state["messages"][-1].content == COUNTED
    assert len(transport.stream_ids) == 3 and len(set(transport.stream_ids)) == 1
