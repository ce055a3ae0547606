"""Restored = computed: an engine that reads a prefix from disk answers as the one that computed it.

To the bit on the native lanes, whose rows depend on nothing beside them.
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from headrace.config.settings import ModelConfig, PrefixCacheConfig, SchedulerConfig
from headrace.core.ids import SequenceId, StreamId
from headrace.core.messages import Message, NewSequence, Outputs, Shutdown, Status, Submit
from headrace.core.sampling import Sampling
from headrace.engine.engine import Engine
from headrace.engine.load import load
from tests.drive import random_prompt
from tests.scheduler.builders import packed
from tools.harness.eventually import eventually
from tools.harness.tiny_models import make_tiny_model

SAMPLING = Sampling(max_tokens=12, temperature=0, ignore_eos=True, num_logprobs=3)
PROMPT = random_prompt(1490)
CASES = {
    "bfloat16": ("Qwen3ForCausalLM", {"dtype": "bfloat16"}),
    "float32": ("LlamaForCausalLM", {}),
    "int8": ("Qwen3ForCausalLM", {"dtype": "bfloat16", "quantize": "int8"}),
    "hybrid": ("Qwen3_5ForCausalLM", {"dtype": "bfloat16"}),
    "generic": ("Olmo2ForCausalLM", {}),
}


class Life:
    """One life of an engine, in a thread; `answer` gives tokens and logprobs with what it cost."""

    def __init__(self, config: ModelConfig) -> None:
        loaded = load(config)
        self.said: list[Message] = []
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._num = 0
        engine = Engine(loaded.scheduler, loaded.runner, self)
        engine.prefixes = loaded.prefixes
        self.thread = threading.Thread(target=engine.run, args=(self.inbox,))
        self.thread.start()

    def put(self, message: Message) -> None:
        self.said.append(message)

    def num_unsent(self) -> int:
        return 0

    def answer(self, prompt: list[int], salt: str = "") -> tuple[list[object], int]:
        """Tokens with their logprobs, and how many of the prompt's tokens were cached."""
        self._num += 1
        new = NewSequence(SequenceId(self._num), 0, 0)
        stream_id, packed_prompt = StreamId(str(self._num)), (packed(prompt),)
        self.inbox.put(Submit(stream_id, packed_prompt, (new,), SAMPLING, 0.0, salt=salt))
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
