"""Lets a script choose the tokens of a real engine, and kills the engine or server when told to.

`tools.harness.slow_engine` calls `install` if the variable SCRIPTED_ENGINE contains the settings
that `scripted` returns. Template, tokenizer, forward pass, grammar, parser and log are real; only
the logits are replaced. The answer depends on the prompt alone, so that it continues after a kill.
"""

import functools
import importlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from headrace_engine.runner.sampling.state import SequenceState

VARIABLE = "SCRIPTED_ENGINE"
KILL_ENGINE = "kill-engine"
"""The name of a file in the folder of faults. The engine is killed in the middle of the next
answer that contains the text of this file."""
KILL_SERVER = "kill-server"
"""The name of a file in the folder of faults. The server is killed in the middle of the next prompt
with more tokens than the number in this file."""


def scripted(module: str, model: Path, faults: Path) -> dict[str, str]:
    """Return the environment of a server whose answers come from the function `answer` of `module`.

    `answer` takes the rendered prompt. If it returns None, the model answers.
    """
    return {VARIABLE: json.dumps([module, str(model), str(faults)])}


class _Script:
    def __init__(self, module: str, model: str, faults: str) -> None:
        self._answer = importlib.import_module(module).answer
        self._tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
        self._end: int = self._tokenizer.encode("<|im_end|>", add_special_tokens=False).ids[0]
        self._faults = Path(faults)

    def next_token(self, sequence: SequenceState) -> int | None:
        text, answer = self._find(sequence.token_ids[: sequence.num_prompt].tobytes())
        drawn = sequence.token_ids[sequence.num_prompt :].tolist()
        if not answer or drawn != answer[: len(drawn)]:
            return None
        if len(drawn) == len(answer) // 2:
            self._kill(KILL_ENGINE, os.getpid(), lambda needle: needle in text)
        return answer[len(drawn)] if len(drawn) < len(answer) else None

    def read(self, chunk: Any, sequence: SequenceState | None) -> None:
        """Kill the server before it computes this chunk, if a fault says so."""
        if sequence is not None and 0 < chunk.start < sequence.num_prompt - 1:
            is_long = lambda least: sequence.num_prompt > int(least)  # noqa: E731
            self._kill(KILL_SERVER, os.getppid(), is_long)

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def _find(self, prompt: bytes) -> tuple[str, list[int]]:
        token_ids = torch.frombuffer(bytearray(prompt), dtype=torch.int32).tolist()
        text = self._answer(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        if text is None:
            return "", []
        return text, [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._end]

    def _kill(self, fault: str, pid: int, applies: Any) -> None:
        file = self._faults / fault
        if file.exists() and applies(file.read_text()):
            file.unlink()
            os.kill(pid, signal.SIGKILL)


def install() -> None:
    """Replace the choice of tokens in this engine process."""
    from headrace_engine.runner import runner
    from headrace_engine.runner.sampling import sampler

    script = _Script(*json.loads(os.environ[VARIABLE]))
    draw: Any = sampler.draw
    compute: Any = runner.Runner._compute

    def draw_scripted(logits: torch.Tensor, sequences: list[SequenceState]) -> Any:
        logits = logits.clone()
        for row, sequence in zip(logits, sequences, strict=True):
            if (token_id := script.next_token(sequence)) is not None:
                row.fill_(-100.0)
                row[token_id] = 100.0
        return draw(logits, sequences)

    def compute_scripted(self: Any, chunks: Any) -> Any:
        for chunk in chunks:
            script.read(chunk, self._sequences.get(chunk.sequence_id))
        return compute(self, chunks)

    for module in (runner, sampler):
        vars(module)["draw"] = draw_scripted
    runner.Runner._compute = compute_scripted  # type: ignore[method-assign]
