"""Writes the tour of the code with quotations from src: `python -m tools.make_tour`."""

import ast
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "contribute" / "tour.md"
WIDTH = 116

INTRODUCTION = """
This page follows a request into the engine in five stops, and a token out of the engine in ten.
Each stop quotes one function without its docstring; `# ...` marks where a quotation is cut. The
[architecture](../concepts/architecture.md) has the overview. This page is written by
`python -m tools.make_tour`, which quotes the code as it is now.
"""


class Stop(NamedTuple):
    """A function to quote, and the text above the quotation. `num_lines` 0 quotes all lines."""

    title: str
    path: str
    name: str
    text: str
    num_lines: int = 0


WAY_IN = (
    Stop(
        "The route",
        "headrace/gateway/generation_routes.py",
        "GenerationRoutes.generate",
        "The row of `/v1/chat/completions` in "
        "[gateway/routes.py](../../src/headrace/gateway/routes.py) "
        "leads to this method. The gateway counts the bytes of the body without parsing them, and "
        "passes the body to the intake. WebSockets and batches use the same intake.",
        13,
    ),
    Stop(
        "The worker",
        "headrace/protocols/worker.py",
        "Jobs.read",
        "A client can make a body expensive to read, so a separate process reads the body. This "
        "process can be killed. The dialect, which is the code for one API, checks the fields. The "
        "result is a `CheckedBody`. If the model is already loaded, the result includes the "
        "prompt's tokens.",
        10,
    ),
    Stop(
        "Admission",
        "headrace/generation/generation.py",
        "Generation._admit",
        "Limits of the queue, of the key and of the prompt's length are checked here. Afterwards "
        "the request enters the queue and becomes a stream with a log.",
        21,
    ),
    Stop(
        "Submission",
        "headrace/generation/stream.py",
        "LiveStream._submit",
        "The stream submits its request to the engine. The same method runs again after the death "
        "of an engine, with the tokens that were generated so far.",
        16,
    ),
    Stop(
        "The engine's inbox",
        "headrace_engine/engine.py",
        "Engine._dispatch",
        "In the engine's process, a thread has read the message from a socket. The loop handles "
        "all messages before it plans. A request with a grammar or an adapter waits until another "
        "thread has compiled the grammar or read the adapter.",
        13,
    ),
)

WAY_OUT = (
    Stop(
        "The step",
        "headrace_engine/engine.py",
        "Engine.step",
        "The engine runs this method in a loop: plan, execute, commit, send.",
    ),
    Stop(
        "The kinds of steps",
        "headrace_engine/scheduler/plan.py",
        "Planner._first_step",
        "There are several kinds of steps, but prefill and decoding are not separate kinds. Each "
        "sequence gets a chunk, and a decoding sequence gets a chunk of one token.",
    ),
    Stop(
        "The size of a chunk",
        "headrace_engine/scheduler/cost.py",
        "Coefficients.largest_chunk",
        "A step has a budget of time. The cost model is fitted to earlier steps, and this method "
        "returns the length of the largest chunk of a prompt that fits into the budget.",
    ),
    Stop(
        "Memory",
        "headrace_engine/memory/memory.py",
        "Memory.reserve",
        "`memory` assigns block numbers: blocks that the sequence shares with earlier "
        "sequences, and new blocks. The tensors of the blocks belong to the runner.",
    ),
    Stop(
        "The forward pass",
        "headrace_engine/runner/runner.py",
        "Runner.launch",
        "The lane, which is the code for one kind of model, processes all chunks of the plan in "
        "one forward pass. The chunks can belong to different sequences.",
        25,
    ),
    Stop(
        "Sampling",
        "headrace_engine/runner/sampling/sampler.py",
        "draw",
        "One token is drawn for each row. The random numbers depend only on the seed, the token's "
        "index and the choice, so batches, chunk borders and crashes cannot change the numbers.",
        14,
    ),
    Stop(
        "Back in the gateway",
        "headrace/fleet/engine_users.py",
        "EngineUsers.deliver",
        "The outputs of a step arrive in the gateway as one message. Each stream gets its own "
        "part.",
    ),
    Stop(
        "Text",
        "headrace/generation/choice.py",
        "ChoiceWriter.feed",
        "A token id becomes text as soon as its bytes form whole characters. Stop strings, "
        "reasoning and tool calls are recognized here.",
    ),
    Stop(
        "The log",
        "headrace/generation/stream.py",
        "LiveStream.run",
        "The stream's writer appends events to the log. `append` returns when the events are "
        "durable. Readers see the events only after that.",
        15,
    ),
    Stop(
        "Readers",
        "headrace/gateway/delivery.py",
        "LiveAnswer._follow",
        "The first client is a reader like all later clients. The same code runs for a client "
        "that resumes the stream tomorrow, with a cursor.",
        22,
    ),
)


def page() -> str:
    """Return the whole page."""
    parts = ["# A tour of the code", _filled(INTRODUCTION)]
    for title, stops in (
        ("A request, on its way in", WAY_IN),
        ("A token, on its way out", WAY_OUT),
    ):
        parts.append(f"## {title}")
        for number, stop in enumerate(stops, 1):
            parts.append(f"### {number}. {stop.title}")
            parts.append(_filled(stop.text))
            shown = stop.path.removeprefix("headrace/")
            parts.append(f"[{shown}](../../src/{stop.path}), `{stop.name}`")
            parts.append(f"```python\n{quoted(stop)}\n```")
    return "\n\n".join(parts) + "\n"


def quoted(stop: Stop) -> str:
    """Return a function's source without its docstring, or its first lines."""
    source = (ROOT / "src" / stop.path).read_text()
    scope: ast.AST = ast.parse(source)
    for part in stop.name.split("."):
        children = ast.iter_child_nodes(scope)
        scope = next(it for it in children if getattr(it, "name", "") == part)
    assert isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
    lines = source.splitlines()[scope.lineno - 1 : scope.end_lineno]
    if ast.get_docstring(scope) is not None:
        first, last = scope.body[0].lineno, scope.body[0].end_lineno
        assert last is not None
        del lines[first - scope.lineno : last - scope.lineno + 1]
    if 0 < stop.num_lines < len(lines):
        lines = [*lines[: stop.num_lines], f"{lines[0][: scope.col_offset]}    # ..."]
    return textwrap.dedent("\n".join(lines))


def _filled(text: str) -> str:
    return textwrap.fill(
        " ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    PAGE.write_text(page())
