"""Greedy texts of a trained model: transformers' own, and the same however they were computed."""

from array import array
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from headrace.text.encoder import Encoder
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_probes import hard_texts
from headrace_common.checkpoints.find import find_model
from headrace_common.config.settings import ModelConfig, SchedulerConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import NewSequence, Submit
from headrace_common.sampling import Sampling
from headrace_engine.load import load
from headrace_engine.runner.runner import Runner
from tests.equality.test_pressure import RealEngine
from tests.text.test_known_pieces import SMALL, encoded
from tests.trained.conftest import ROOT, TEXT
from tools.harness.drive import Drive, assert_greedy, generate, tiny_runner
from tools.harness.servers import running_server
from tools.harness.sse import data_of

QUESTIONS = (
    "What is a mill race?",
    "Write a haiku about rivers.",
    "Explain in one sentence why the sky is blue.",
    "List three uses of a water wheel.",
)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
LONG = 7_984


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = Tokenizer.load(smollm2)
    return [list(tokenizer.encode(CHAT.format(one), False)) for one in QUESTIONS]


@pytest.fixture(scope="module")
def runner(smollm2_file: Path) -> Runner:
    """The file as it is, by our kernels."""
    return tiny_runner(find_model(str(smollm2_file)))


@pytest.mark.parametrize("lane", ["native-text", "generic-text"])
def test_greedy_texts_are_transformers_own(
    smollm2: Path, smollm2_reference: Any, prompts: list[list[int]], lane: str
) -> None:
    runner = tiny_runner(smollm2, lane, dtype="float32")
    for prompt in prompts[:2]:
        assert_greedy(prompt + generate(runner, prompt, 48), len(prompt), smollm2_reference)


@pytest.mark.slow
def test_the_same_tokens_follow_8000(smollm2: Path, smollm2_reference: Any) -> None:
    """In chunks of 512; transformers reads all of it at once."""
    words = "\n".join(file.read_text() for file in (TEXT, *sorted((ROOT / "docs").rglob("*.md"))))
    ids = list(Tokenizer.load(smollm2).encode(words, False))[:LONG]
    assert len(ids) == LONG
    one = {"max_model_len": 8192, "scheduler": SchedulerConfig(max_num_seqs=1)}
    runner = tiny_runner(smollm2, "native-text", dtype="float32", **one)
    drive = Drive(runner, room=8192)
    drive.begin(0, ids)
    drive.prefill(0, chunk=512)
    drive.decode([0], 15)
    tokens = drive.tokens[0]
    with torch.inference_mode():
        logits = smollm2_reference(torch.tensor([tokens[:-1]]), logits_to_keep=16).logits[0]
    assert tokens[LONG:] == logits.argmax(dim=-1).tolist()


def test_a_text_is_the_same_alone_in_a_batch_and_in_chunks(
    runner: Runner, prompts: list[list[int]]
) -> None:
    alone = [generate(runner, prompt, 40) for prompt in prompts]
    assert [generate(runner, prompt, 40, chunk=7) for prompt in prompts] == alone
    drive = Drive(runner, room=128)
    for number, prompt in enumerate(prompts):
        drive.begin(number, prompt)
    drive.step(*((number, 0, len(prompt)) for number, prompt in enumerate(prompts)))
    drive.decode(range(len(prompts)), 39)
    assert [drive.tokens[n][len(prompt) :] for n, prompt in enumerate(prompts)] == alone


def engine_with(file: Path, prompts: list[list[int]], num_blocks: int) -> RealEngine:
    """Greedy texts of 100 tokens, side by side in so many blocks of 32 positions."""
    config = ModelConfig(
        model=str(find_model(str(file))),
        device="cpu",
        threads=1,
        max_model_len=160,
        block_size=32,
        kv_cache_memory_bytes=num_blocks * 32 * 30 * 2 * 3 * 64 * 2,  # layers, heads, bfloat16
        scheduler=SchedulerConfig(max_num_seqs=8),
    )
    runner, scheduler, *_ = load(config)
    engine = RealEngine(scheduler, runner, seconds=0.01)
    sampling = Sampling(temperature=0, max_tokens=100, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        packed = (array("i", prompt).tobytes(),)
        sequence = NewSequence(SequenceId(number), 0, 0)
        engine.add(Submit(StreamId(str(number)), packed, (sequence,), sampling, arrival=0.0))
    engine.run()
    return engine


def test_a_preempted_text_is_the_undisturbed_one(
    smollm2_file: Path, prompts: list[list[int]]
) -> None:
    """Eight of up to four blocks each, in six."""
    eight = prompts + [prompt[1:] for prompt in prompts]
    calm = engine_with(smollm2_file, eight, num_blocks=40)
    pressed = engine_with(smollm2_file, eight, num_blocks=6)
    print("preempted:", sum(pressed.num_begun.values()) - len(eight))
    assert sum(pressed.num_begun.values()) > len(eight) == sum(calm.num_begun.values())
    assert pressed.tokens == calm.tokens and set(map(len, calm.tokens.values())) == {100}


def test_a_killed_engine_changes_no_word(smollm2_file: Path) -> None:
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 0}
    body |= {"max_tokens": 120, "ignore_eos": True, "return_progress": True}
    with running_server(str(smollm2_file), "--threads", "1") as server:
        url = f"{server.url}/v1/chat/completions"
        whole = httpx.post(url, json=body, timeout=300).json()["choices"][0]["message"]["content"]
        texts, was_told = list[str](), False
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=300) as answer:
            for frame in data_of(answer.iter_lines()):
                was_told = was_told or "recovering" in frame
                texts += [one["delta"].get("content") or "" for one in frame["choices"]]
                if len(texts) == 20:
                    server.kill_engine()
    assert was_told and "".join(texts) == whole


def test_texts_with_special_tokens_keep_their_ids_in_pieces(smollm2_file: Path) -> None:
    tokenizer = Tokenizer.load(find_model(str(smollm2_file)))
    encoder = Encoder(tokenizer, SMALL)
    assert "<|im_start|>" in tokenizer.cut_marks
    for text in islice(hard_texts(9, sorted(tokenizer.cut_marks)), 200):
        for _ in ("new", "known"):
            assert encoded(encoder, text) == list(tokenizer.encode(text, False)), repr(text)
