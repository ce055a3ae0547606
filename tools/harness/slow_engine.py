"""Simulates a server on a slow machine: prompts take a given time.

`python -m tools.harness.slow_engine SECONDS SIGN_S COMMAND serve ...` runs the server of
COMMAND. The steps of its engines sleep SECONDS for each 1,000 tokens of a prompt. SIGN_S
replaces all times in VISIBLE_SIGN_S: such a route sends an event after SIGN_S seconds of
silence. For ServerProcess, pass `prefix=slow(10)`.
"""

import os
import runpy
import sys
import time
from typing import Any

_VARIABLE = "SLOW_ENGINE_S"


def slow(seconds: float, sign_s: str = "20") -> tuple[str, ...]:
    """Return the prefix for a server that takes `seconds` for each 1,000 tokens of a prompt."""
    return (sys.executable, "-m", "tools.harness.slow_engine", str(seconds), sign_s)


def _serve() -> None:
    from headrace.engines import child
    from headrace.protocols import dialect

    os.environ[_VARIABLE] = sys.argv[1]
    child.MODULE = "tools.harness.slow_engine"
    signs: Any = dialect.VISIBLE_SIGN_S
    for route in signs:
        signs[route] = float(sys.argv[2])
    # COMMAND is `python -m headrace`; keep the arguments after COMMAND.
    sys.argv = ["headrace", *sys.argv[6:]]
    runpy.run_module("headrace", run_name="__main__")


def _compute() -> None:
    from headrace_engine import process
    from headrace_engine.runner.runner import Runner
    from tools.harness import scripted_engine

    per_token_s = float(os.environ[_VARIABLE]) / 1000
    launch: Any = Runner.launch

    def launch_late(runner: Runner, plan: Any) -> Any:
        time.sleep(per_token_s * sum(chunk.length - 1 for chunk in plan.chunks))
        return launch(runner, plan)

    Runner.launch = launch_late  # type: ignore[method-assign]
    if scripted_engine.VARIABLE in os.environ:
        scripted_engine.install()
    process.main()


if __name__ == "__main__":
    _compute() if _VARIABLE in os.environ else _serve()
