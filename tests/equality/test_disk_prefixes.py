"""Restored = computed: an engine that reads a prefix from disk answers as the one that computed it.

To the bit where our own kernels run, whose rows depend on nothing beside them.
"""

import json
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import pytest
import torch

from headrace_common.config.settings import ModelConfig, PrefixCacheConfig, SchedulerConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import Message, NewSequence, Outputs, Shutdown, Status, Submit
from headrace_common.plan import PromptInputs
from headrace_common.sampling import Sampling
from headrace_engine.load import load
from headrace_engine.prefixes import keeper as keepers
from headrace_engine.prefixes.folder import PrefixFolder
from headrace_engine.runner.images import ImageProcessor, Prepared
from tests.equality.test_lanes_images import picture
from tests.kernels.own_kernels import needs_own_kernels
from tests.scheduler.builders import packed
from tools.harness.drive import random_prompt
from tools.harness.eventually import eventually
from tools.harness.tiny_models import IMAGE_MARKS, make_tiny_image_model, make_tiny_model

SAMPLING = Sampling(max_tokens=12, temperature=0, ignore_eos=True, num_logprobs=3)
PROMPT = random_prompt(1490)
CASES = {
    "bfloat16": ("Qwen3ForCausalLM", {"dtype": "bfloat16"}),
    "float32": ("LlamaForCausalLM", {}),
    "int8": ("Qwen3ForCausalLM", {"dtype": "bfloat16", "quantize": "int8"}),
    "int8 cache": ("Qwen3ForCausalLM", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    "hybrid": ("Qwen3_5ForCausalLM", {"dtype": "bfloat16"}),
    "layers that share keys": ("Gemma4ForCausalLM", {"dtype": "bfloat16"}),
    "generic": ("GPTNeoXForCausalLM", {}),
}


class Life:
    """One life of an engine, in a thread; `answer` gives tokens and logprobs with what it cost."""

    def __init__(self, config: ModelConfig) -> None:
        self.loaded = loaded = load(config)
        self.said: list[Message] = []
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._num = 0
        engine = loaded.engine(self)
        self.thread = threading.Thread(target=engine.run, args=(self.inbox,))
        self.thread.start()

    def put(self, message: Message) -> None:
        self.said.append(message)

    def num_unsent(self) -> int:
        return 0

    def answer(
        self, prompt: list[int], salt: str = "", inputs: tuple[PromptInputs, ...] = ()
    ) -> tuple[list[object], int]:
        """Tokens with their logprobs, and how many of the prompt's tokens were cached."""
        self._num += 1
        new = NewSequence(SequenceId(self._num), 0, 0)
        stream_id, packed_prompt = StreamId(str(self._num)), (packed(prompt),)
        fields = {"salt": salt, "inputs": inputs}
        self.inbox.put(Submit(stream_id, packed_prompt, (new,), SAMPLING, 0.0, **fields))
        eventually(lambda: any(self._finished()), within_s=60)
        outputs = [one for one in self.said if isinstance(one, Outputs)]
        mine = [t for one in outputs for t in one.tokens if t.sequence_id == self._num]
        (started,) = [s for one in outputs for s in one.started if s.sequence_id == self._num]
        return [(token.token_id, token.logprobs) for token in mine], started.cached

    def _finished(self) -> Iterator[bool]:
        for one in self.said:
            if isinstance(one, Outputs):
                yield from (end.sequence_id == self._num for end in one.finished)

    @property
    def status(self) -> Status:
        return [one for one in self.said if isinstance(one, Status)][-1]


@contextmanager
def alive(folder: Path, disk: Path | None, **config: object) -> Iterator[Life]:
    life = Life(
        ModelConfig(
            model=str(folder),
            device="cpu",
            threads=1,
            max_model_len=4096,
            scheduler=SchedulerConfig(max_num_seqs=4),
            prefix_cache=PrefixCacheConfig(prefix_cache_dir=disk and str(disk)),
            **config,  # type: ignore[arg-type]
        )
    )
    try:
        yield life
    finally:
        life.inbox.put(Shutdown())
        life.thread.join()


def model(folder: Path, architecture: str, config: dict[str, object]) -> Path:
    dtype = torch.bfloat16 if config.get("dtype") == "bfloat16" else torch.float32
    return make_tiny_model(folder, architecture, dtype=dtype, max_position_embeddings=8192)


@needs_own_kernels  # torch's products round differently for other numbers of rows
@pytest.mark.parametrize("case", CASES)
def test_what_is_restored_is_what_was_computed(tmp_path: Path, case: str) -> None:
    architecture, config = CASES[case]
    folder, disk = model(tmp_path / "model", architecture, config), tmp_path / "disk"
    with alive(folder, disk, **config) as life:
        computed, cached = life.answer(PROMPT)
        assert cached == 0
    with alive(folder, disk, **config) as life:
        restored, cached = life.answer(PROMPT)
        assert cached == 1472, "all full blocks of the prompt"
        assert restored == computed
        assert life.answer(PROMPT[:1400] + [5] * 40)[1] == (1024 if case == "hybrid" else 1376)
        assert life.answer(PROMPT, salt="another")[1] == 0
    with alive(folder, None, **config) as life:
        assert life.answer(PROMPT) == (computed, 0)


@needs_own_kernels
def test_a_cache_of_another_format_reads_no_prefix(tmp_path: Path) -> None:
    folder, disk = model(tmp_path / "model", *CASES["bfloat16"]), tmp_path / "disk"
    found = []
    for kind in ("auto", "int8", "auto"):
        with alive(folder, disk, dtype="bfloat16", kv_cache_dtype=kind) as life:
            found.append(life.answer(PROMPT))
            eventually(lambda: len(list(disk.glob("*/*-*-*"))) >= 6)
    assert [cached for _, cached in found] == [0, 0, 1472]
    assert found[0][0] == found[2][0]
    assert len(list(disk.glob("*"))) == 2, "a folder for each format"


@needs_own_kernels
def test_images_within_a_prefix_are_restored_with_it(tmp_path: Path) -> None:
    folder, disk = tmp_path / "model", tmp_path / "disk"
    folder.mkdir()
    make_tiny_image_model(folder, "Qwen3.5")
    described = json.loads((folder / "config.json").read_text())
    described["text_config"]["max_position_embeddings"] = 8192
    (folder / "config.json").write_text(json.dumps(described))
    mark, words = IMAGE_MARKS["Qwen3.5"], "".join(chr(97 + i * i % 26) for i in range(600))
    red, blue = picture(1, 64, 48), picture(2, 64, 48)
    one, swapped = (
        _prepared(folder, tmp_path, f"{words}{mark}{words}{mark}{words}", images)
        for images in ([red, blue], [blue, red])
    )

    def ask(life: Life, prompt: Prepared) -> tuple[list[object], int]:
        return life.answer(list(prompt.token_ids), inputs=(prompt.inputs,))

    with alive(folder, disk) as life:
        assert life.loaded.ready.lane == "native-multimodal"
        computed, cached = ask(life, one)
        assert cached == 0
    with alive(folder, disk) as life:
        assert ask(life, one) == (computed, (len(one.token_ids) - 1) // 32 * 32)
        eventually(lambda: life.status.disk["tokens"] == (len(one.token_ids) - 1) // 32 * 32)
    with alive(folder, disk) as life:
        other, cached = ask(life, swapped)
        assert cached == 0, "the first file has an image, which is another one"
        assert other != computed
    with alive(folder, None) as life:
        assert ask(life, swapped) == (other, 0)
        assert ask(life, one) == (computed, 0)


def _prepared(folder: Path, files: Path, text: str, images: list[bytes]) -> Prepared:
    pixels = files / str(crc32(images[0]))
    pixels.touch()
    params = ["messages"] * len(images)
    return ImageProcessor(folder, in_pieces=True).prepare(text, images, params, str(pixels))


def test_damaged_files_cost_misses_and_no_token(tmp_path: Path) -> None:
    folder, disk = model(tmp_path / "model", *CASES["bfloat16"]), tmp_path / "disk"
    with alive(folder, disk, dtype="bfloat16") as life:
        computed, _ = life.answer(PROMPT)
    paths = sorted(disk.glob("*/*-*-*"), key=lambda path: int(path.name.split("-")[1]))
    assert len(paths) == 6
    for number, path in enumerate(paths):
        data = bytearray(path.read_bytes())
        data[-(number + 1) * len(data) // 8] ^= 1
        path.write_bytes(data)
    with alive(folder, disk, dtype="bfloat16") as life:
        assert life.answer(PROMPT) == (computed, 0)
        eventually(lambda: life.status.disk_misses == {"damaged": 6})
        eventually(lambda: len(list(disk.glob("*/*-*-*"))) == 6)  # written anew
    with alive(folder, disk, dtype="bfloat16") as life:
        assert life.answer(PROMPT) == (computed, 1472)


def test_a_disk_that_hangs_while_it_writes_keeps_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, disk = model(tmp_path / "model", *CASES["bfloat16"]), tmp_path / "disk"
    hangs, tries = threading.Event(), []

    def write(self: PrefixFolder, run: object, numbers: memoryview) -> None:
        tries.append(run)
        hangs.wait(60)

    with alive(folder, None, dtype="bfloat16") as life:
        expected = [life.answer(PROMPT[n:])[0] for n in range(4)]
    monkeypatch.setattr(PrefixFolder, "write", write)
    monkeypatch.setattr(keepers, "_CLOSE_S", 0.1)
    with alive(folder, disk, dtype="bfloat16") as life:
        assert [life.answer(PROMPT[n:])[0] for n in range(4)] == expected
        assert len(tries) == 1, "the thread that writes, and nobody else"
    hangs.set()


def test_a_disk_that_hangs_while_it_reads_costs_one_miss(tmp_path: Path) -> None:
    """A pipe without a writer: whoever opens it waits for ever."""
    folder, disk = model(tmp_path / "model", *CASES["bfloat16"]), tmp_path / "disk"
    with alive(folder, disk, dtype="bfloat16") as life:
        computed, _ = life.answer(PROMPT)
    for path in disk.glob("*/*-*-*"):
        path.unlink()
        os.mkfifo(path)
    with alive(folder, disk, dtype="bfloat16") as life:
        assert life.answer(PROMPT) == (computed, 0)
        eventually(lambda: life.status.disk_misses == {"late": 1})
        assert life.answer(PROMPT[:900] + [5] * 40)[1] == 896, "memory has it"
        assert life.answer(PROMPT[1:])[1] == 0
        eventually(lambda: life.status.disk_misses == {"late": 1})
