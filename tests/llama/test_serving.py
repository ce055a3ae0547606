"""Tests of lane llama-cpp with the scheduler and over HTTP: preemption, choices and kills."""

import os
import signal
import subprocess
import sys
from array import array
from pathlib import Path

import httpx
import msgspec
import pytest

from headrace_common.checkpoints.find import find_model
from headrace_common.config.settings import ModelConfig, SchedulerConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import NewSequence, Submit
from headrace_common.sampling import Sampling
from headrace_engine.load import load
from tests.equality.test_pressure import RealEngine
from tests.llama.models import ARCHITECTURES, VOCAB, write_model
from tools.harness.drive import random_prompt
from tools.harness.llama_alone import Alone
from tools.harness.llama_server import greedy, llama_server
from tools.harness.servers import running_server
from tools.harness.sse import data_of
from tools.harness.tiny_models import make_tiny_model

GREEDY = Sampling(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny-F32.gguf", request.param)


def engine(file: Path, cache_bytes: int, num_seqs: int = 12) -> RealEngine:
    config = ModelConfig(
        model=str(find_model(str(file))),
        device="cpu",
        dtype="float32",
        lane="llama-cpp",
        threads=1,
        max_model_len=128,
        block_size=16,
        kv_cache_memory_bytes=cache_bytes,
        scheduler=SchedulerConfig(max_num_seqs=num_seqs, max_step_tokens=40),
    )
    runner, scheduler, *_ = load(config)
    return RealEngine(scheduler, runner, seconds=0.01)


def submit(number: int, prompt: list[int], *sequences: int, sampling: Sampling = GREEDY) -> Submit:
    new = tuple(NewSequence(SequenceId(n), 0, choice) for choice, n in enumerate(sequences))
    packed = array("i", prompt).tobytes()
    return Submit(StreamId(str(number)), (packed,), new, sampling, arrival=0.0)


def test_preempted_streams_get_the_tokens_of_single_ones(file: Path) -> None:
    per_position = 1600  # bytes, about: 3 layers of keys and values, float32
    pressed = engine(file, 220 * per_position)
    prompts = [random_prompt(12 + 9 * (n % 5), VOCAB, seed=n) for n in range(12)]
    pressed.add(*(submit(n, prompt, n) for n, prompt in enumerate(prompts)))
    pressed.run()
    alone = Alone(file)
    for number, prompt in enumerate(prompts):
        assert len(pressed.tokens[number]) == 40
        alone.assert_greedy(prompt, pressed.tokens[number])
    if pressed.scheduler.memory.layout.num_blocks:
        assert sum(pressed.num_begun.values()) > 12  # some were preempted and restarted


def test_choices_and_later_turns_reuse_the_cached_prompt(file: Path) -> None:
    made, alone = engine(file, 1 << 24), Alone(file)
    prompt = random_prompt(50, VOCAB)
    made.add(submit(0, prompt, 0, 1))
    made.run()
    for number in (0, 1):
        alone.assert_greedy(prompt, made.tokens[number])
    turn = [*prompt, *made.tokens[0], *random_prompt(20, VOCAB, seed=1)][:80]
    made.add(submit(1, turn, 2))
    made.run()
    alone.assert_greedy(turn, made.tokens[2])
    cached = made.progress[2][0]
    assert cached == (64 if made.scheduler.memory.layout.num_blocks else 0)


def test_least_recently_used_prompts_are_evicted_for_new_ones(tmp_path: Path) -> None:
    """Send more prompts than llama.cpp has sequences, each of which caches one prompt."""
    file = write_model(tmp_path / "tiny-F32.gguf", "gemma2")
    made, alone = engine(file, 1 << 24), Alone(file)
    few = msgspec.structs.replace(GREEDY, max_tokens=3)
    prompts = [random_prompt(12, VOCAB, seed=n) for n in range(70)]
    made.add(*(submit(n, prompt, n, sampling=few) for n, prompt in enumerate(prompts)))
    made.run()
    for number, prompt in enumerate(prompts):
        assert len(made.tokens[number]) == 3
        alone.assert_greedy(prompt, made.tokens[number])


def completed(url: str, body: dict[str, object], kill: int | None = None) -> tuple[str, list]:
    """Return the text and the extra fields of a stream; kill the engine `kill` after 10 chunks."""
    texts, others = [], []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        for frame in data_of(answer.iter_lines()):
            others.append({k: frame[k] for k in frame.keys() & {"recovering", "prompt_progress"}})
            texts += [choice["text"] for choice in frame["choices"]]
            if kill is not None and len(texts) == 10:
                os.kill(kill, signal.SIGKILL)
                kill = None
    return "".join(texts), [other for other in others if other]


@pytest.mark.parametrize("architecture, margin", [("gemma2", 1e-2), ("mamba", 1e-3)])
def test_a_stream_loses_no_token_when_its_engine_is_killed(
    tmp_path: Path, architecture: str, margin: float
) -> None:
    file = write_model(tmp_path / "tiny-F32.gguf", architecture)
    prompt, _ = Alone(file).clear_prompt(400, margin)
    flags = ("--lane", "llama-cpp", "--threads", "1", "--max-model-len", "512")
    flags += ("--dtype", "float32")
    body = {"prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    with running_server(str(file), *flags, environment={"XDG_CACHE_HOME": str(tmp_path)}) as server:
        undisturbed, _ = completed(server.url, body | {"stream": True})
        text, others = completed(
            server.url, body | {"stream": True, "return_progress": True}, server.engine_pid
        )
        assert text == undisturbed
        assert any("recovering" in other for other in others)
        assert any("prompt_progress" in other for other in others)


def test_a_native_model_does_not_import_llama_cpp(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    program = (
        "import sys; from headrace import LLM\n"
        f"with LLM.load({str(folder)!r}, threads=1) as llm: llm.generate('x', max_tokens=2)\n"
        "assert 'llama_cpp' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_answers_equal_those_of_llama_server(tmp_path: Path, architecture: str) -> None:
    """Use a prompt whose tokens have clear margins, since the builds of llama.cpp differ."""
    file = write_model(tmp_path / "tiny-F32.gguf", architecture)
    prompt, expected = Alone(file).clear_prompt(48, 5e-3)
    with llama_server(file) as url:
        assert greedy(url, prompt, 48) == expected
    flags = ("--lane", "llama-cpp", "--threads", "1", "--max-model-len", "512")
    body = {"prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    with running_server(str(file), *flags, environment={"XDG_CACHE_HOME": str(tmp_path)}) as server:
        asked = body | {"return_token_ids": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=120)
    assert answer.json()["choices"][0]["token_ids"] == expected
