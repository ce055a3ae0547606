"""Gemma 3 270M, trained: ids and texts beside llama.cpp, logits beside transformers."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import gguf
import httpx
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize
from tokenizers import Tokenizer

from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.gguf_names import original_name
from headrace_engine.runner.runner import Runner
from tests.trained.conftest import PROMPTS, TEXT
from tools.harness.drive import Drive, assert_close, generate, row_logits, tiny_runner
from tools.harness.llama_server import drawn, greedy, llama_server

HARD = (
    *("", " ", "Hello  world", "   leading", "ends with spaces   ", " " * 37 + "x", "\n" * 45),
    *("tabs\t\tand\n\n\nnewlines\n \n  x", "mixed\r\nCRLF\r\n\r\nend", "\u0000 nul \u0001\u0007"),
    *("<start_of_turn>user\nHi<end_of_turn>\n", "<unused5> <mask> [multimodal]<0x0A><bos>"),
    *("<h1>T</h1><table><tr>", "<code> x </code>\t</body>", "</ html>", "<<<table>>>"),
    *(
        "naïve café Ünïcödé \ufb01 \ufdfa",
        "日本語のテキスト、中文。한국어",
        "𝔘𝔫𝔦𝔠 ½ ①",
        "E\u0301 vs É",
    ),
    *(
        "🙂👨‍👩‍👧‍👦🇩🇪",
        "हिन्दी में العربية עברית ไทย",
        "zero\u200bwidth\u00a0nbsp\u3000wide",
        "\ud7ff\ue000\uffff",
    ),
    *("1234567890 3.14159 0x1F", "a" * 40, "\u2581under\u2581score \u2581 x", "don't I'll we've"),
    *(
        '{"a": [1, 2, {"b": null}]}',
        "def f(x):\n    return x  # why\n\tpass",
        "http://x.org/?a=b&c=%20d",
    ),
)
pytestmark = pytest.mark.timeout(1500)  # seconds, on cores that others use too
WINDOW = 512


@pytest.fixture(scope="module")
def runner(gemma3_file: Path) -> Runner:
    return tiny_runner(find_model(str(gemma3_file)), threads=2)


@pytest.fixture(scope="module")
def exact(gemma3_file: Path) -> Runner:
    """The same values in float32."""
    return tiny_runner(find_model(str(gemma3_file)), dtype="float32", threads=2)


@pytest.fixture(scope="module")
def tokenizer(gemma3_file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(find_model(str(gemma3_file)) / "tokenizer.json"))


@pytest.fixture(scope="module")
def theirs(gemma3_file: Path) -> Iterator[str]:
    """The URL of llama.cpp's server with the same file."""
    with llama_server(gemma3_file, threads=2, positions=1024) as url:
        yield url


@pytest.fixture(scope="module")
def text(tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = tokenizer.encode(TEXT.read_text()).ids
    return ids[: WINDOW + 128]


def test_ids_are_llama_cpps_on_hard_texts(theirs: str, tokenizer: Tokenizer) -> None:
    for text in HARD:
        body = {"content": text, "add_special": True, "parse_special": True}
        expected = httpx.post(f"{theirs}/tokenize", json=body, timeout=60).json()["tokens"]
        assert tokenizer.encode(text).ids == expected, repr(text)


@pytest.mark.slow
def test_twenty_texts_part_from_llama_cpps_only_where_two_tokens_are_as_good(
    theirs: str, runner: Runner, exact: Runner, tokenizer: Tokenizer
) -> None:
    """By float32 or by llama.cpp, whose inputs are rounded to 8 bits and ours to bfloat16.

    Where nobody rounds, they part nowhere else (test_beside_llama_cpp.py).
    """
    num_same = num_close = 0
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        ours, other = generate(runner, ids, 64), greedy(theirs, ids, 64)
        if ours == other:
            num_same += 1
            continue
        place = next(n for n in range(64) if ours[n] != other[n])
        pair, known = (ours[place], other[place]), ids + ours[:place]
        shares = row_logits(exact, known)[-1].log_softmax(-1)
        best = drawn(theirs, known, n_probs=8)["top_logprobs"]
        their_shares = {one["id"]: one["logprob"] for one in best}
        gaps = [float(shares.max() - min(shares[id] for id in pair))]
        gaps.append(best[0]["logprob"] - min(their_shares.get(id, -math.inf) for id in pair))
        print(f"{prompt!r} parts at {place}: {gaps[0]:.3f} nat exactly, {gaps[1]:.3f} by llama.cpp")
        assert min(gaps) < 0.3, prompt
        num_close += min(gaps) < 0.1
    print("same to the end:", num_same, "within .1 nat:", num_close, "of", len(PROMPTS))
    assert num_same + num_close >= 16  # 18 on one processor; others round otherwise


def test_cuts_and_neighbours_change_no_token(runner: Runner, text: list[int]) -> None:
    prompt = text[: WINDOW + 20]
    whole = generate(runner, prompt, 24)
    for cut in (1 << 20, 100, 7):
        assert generate(runner, prompt, 24, chunk=cut) == whole
    drive = Drive(runner)
    for number in range(4):
        drive.begin(number, prompt if number == 2 else text[number : number + 30])
        drive.prefill(number, chunk=64)
    drive.decode(range(4), 23)
    assert drive.tokens[2][len(prompt) :] == whole


@torch.inference_mode()
def test_float32_gives_the_logits_of_transformers_beyond_the_window(
    gemma3_file: Path, exact: Runner, text: list[int]
) -> None:
    """The model of the file's values unpacked, its norms less the 1 that transformers adds."""
    folder = find_model(str(gemma3_file))
    config = json.loads((folder / "config.json").read_text())
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**config)).eval()
    model.load_state_dict(_unpacked(gemma3_file), strict=False)
    model.tie_weights()
    model.set_attn_implementation("eager")
    expected = model(torch.tensor([text])).logits[0]
    assert_close(row_logits(exact, text), expected)


def _unpacked(file: Path) -> dict[str, torch.Tensor]:
    found = {}
    for tensor in gguf.GGUFReader(file).tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        shift = 1 if "norm" in tensor.name else 0
        name = original_name(tensor.name, "Gemma3ForCausalLM")
        found[name] = torch.from_numpy(values - shift)
    return found
