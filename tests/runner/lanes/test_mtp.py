"""The MTP layer computes what the formula says, whichever way the tokens before were read."""

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_common.checkpoints.spec import read_spec
from headrace_common.ids import SequenceId, SlotId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import DraftFacts
from headrace_common.plan import DRAFTED, Begin, Chunk, StepPlan
from headrace_common.sampling import Sampling
from headrace_engine.runner.drafter import MtpDrafter
from headrace_engine.runner.lanes.lane import LaneOptions
from headrace_engine.runner.lanes.mtp import MtpLane, mtp_layer
from headrace_engine.runner.lanes.native_text import NativeText
from headrace_engine.runner.runner import Runner
from tools.harness.drive import assert_close, random_prompt, reference_of
from tools.harness.tiny_models import add_mtp_layer, make_tiny_model

CPU = torch.device("cpu")
LAYOUT = MemoryLayout(
    block_size=16, num_blocks=16, num_slots=2, num_snapshots=2, snapshot_every=64, max_positions=256
)
BLOCKS = array("i", range(16))
ID = SequenceId(3)
GREEDY = Sampling(temperature=0, ignore_eos=True)
FAMILIES = ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"]
NUM_GUESSED = 4


class Formula:
    """Predicts with transformers' attention layer, from pairs that this class makes."""

    def __init__(self, folder: Path, scratch: Path, architecture: str) -> None:
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        (scratch / "config.json").write_text(json.dumps(config))
        names = {name: name.replace("mtp.", "model.", 1) for name in tensors if "mtp." in name}
        names |= {name: name for name in ("model.embed_tokens.weight", "lm_head.weight")}
        kept = {own: tensors[name] for name, own in names.items() if "fc" not in name}
        save_file(kept, scratch / "model.safetensors", metadata={"format": "pt"})
        self._model = reference_of(folder, architecture)
        self._layer = reference_of(scratch, architecture)
        self._tensors, self._eps = tensors, config["rms_norm_eps"]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = 1 + self._tensors[f"mtp.pre_fc_norm_{name}.weight"]
        return x * (x.square().mean(-1, keepdim=True) + self._eps).rsqrt() * weight

    def __call__(self, ids: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and hidden states after each token, from the hidden states before it."""
        embedded = self._tensors["model.embed_tokens.weight"][ids]
        pairs = torch.cat((self._norm("embedding", embedded), self._norm("hidden", hidden)), -1)
        x = pairs @ self._tensors["mtp.fc.weight"].T
        out = self._layer.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return self._layer.lm_head(out), out

    def before(self, ids: list[int]) -> torch.Tensor:
        """Return the model's hidden state before each token; zeros before the first."""
        hidden = self._model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        return torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))

    def guess(self, ids: list[int], num: int) -> tuple[int, ...]:
        """Return the next `num` tokens; each one follows from the layer's own hidden states."""
        hidden, guess = self.before(ids), []
        for _ in range(num):
            logits, out = self([*ids, *guess], hidden)
            guess.append(int(logits[-1].argmax()))
            hidden = torch.cat((hidden, out[-1:]))
        return tuple(guess)


def loaded(folder: Path) -> tuple[NativeText, MtpLane, Runner]:
    spec = read_spec(folder)
    served = NativeText(spec, torch.float32, CPU, LaneOptions())
    lane = MtpLane(spec, torch.float32, CPU, LaneOptions(), served)
    drafter = MtpDrafter(lane, DraftFacts("mtp", 0, 0, 0, 256, ""), served)
    served.open(LAYOUT)
    drafter.open(LAYOUT, spec.vocab_size)
    return served, lane, Runner(served, drafter=drafter)


@pytest.mark.parametrize("architecture", FAMILIES)
@torch.inference_mode()
def test_logits_are_those_of_the_formula(architecture: str, tmp_path: Path) -> None:
    folder = add_mtp_layer(make_tiny_model(tmp_path / "model", architecture, pad_token_id=0))
    (tmp_path / "layer").mkdir()
    formula = Formula(folder, tmp_path / "layer", architecture)
    _, lane, _ = loaded(folder)
    prompt = random_prompt(40)
    before = formula.before(prompt)
    chunk = Chunk(ID, 0, 40, 40, (), BLOCKS)
    found = lane.logits(lane.read([chunk], [array("i", prompt)], before))
    assert_close(found, formula(prompt, before)[0])


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Formula]:
    folder, scratch = (tmp_path_factory.mktemp(name) for name in ("model", "layer"))
    add_mtp_layer(make_tiny_model(folder, FAMILIES[0], pad_token_id=0))
    return folder, Formula(folder, scratch, FAMILIES[0])


class Draft:
    """One sequence, whose tokens the MTP layer reads as in a server."""

    def __init__(self, folder: Path, prompt: list[int], chunks: list[int]) -> None:
        _, _, self.runner = loaded(folder)
        begin = Begin(ID, array("i", prompt), len(prompt), 0, GREEDY)
        self.runner.launch(StepPlan(begun=(begin,))).result()
        start = 0
        for length in chunks:
            end = start + length
            self.step(start, length, draft_start=start, draft_end=end)
            start = end
        self.num_read = start

    @property
    def ids(self) -> list[int]:
        return list(self.runner._sequences[ID].token_ids)

    def step(self, start: int, length: int, **fields: Any) -> None:
        draws = (ID,) if start + length == len(self.ids) else ()
        chunk = Chunk(ID, start, length, len(draws), draws, BLOCKS, SlotId(0), **fields)
        self.runner.launch(StepPlan(chunks=(chunk,))).result()

    def guess(self) -> tuple[int, ...]:
        """Let the layer choose a guess, which the model does not see."""
        num = len(self.ids)
        chunk = Chunk(
            *(ID, num - 1, 1 + NUM_GUESSED, 1 + NUM_GUESSED, (ID,), BLOCKS, SlotId(0)),
            guess=(DRAFTED,) * NUM_GUESSED,
            draft_start=self.num_read,
            draft_end=num,
        )
        assert self.runner.drafter is not None
        with torch.inference_mode():
            (chosen,) = self.runner.drafter.run((chunk,), self.runner._sequences)
        self.num_read = num
        return chosen.guess


@pytest.mark.parametrize("chunks", [[150], [1, 149], [16, 33, 101]])
@torch.inference_mode()
def test_guesses_follow_from_all_tokens_before(
    chunks: list[int], hybrid: tuple[Path, Formula]
) -> None:
    folder, formula = hybrid
    draft = Draft(folder, random_prompt(150), chunks)
    assert draft.guess() == formula.guess(draft.ids, NUM_GUESSED)
    # The scheduler counts a right guess as read. The layer reads the tokens again, because only
    # now the model's own hidden states are known.
    for num_right in (0, 1, 3):
        for _ in range(1 + num_right):
            draft.step(len(draft.ids) - 1, 1)
        draft.num_read += num_right
        assert draft.guess() == formula.guess(draft.ids, NUM_GUESSED)


@torch.inference_mode()
def test_tokens_can_be_read_without_a_guess(hybrid: tuple[Path, Formula]) -> None:
    folder, formula = hybrid
    draft = Draft(folder, random_prompt(40), [40])
    for number in range(6):
        # As for a stream whose guesses do not pay. The layer reads two of the tokens at once.
        read = {"draft_start": 40, "draft_end": 42} if number == 3 else {}
        draft.step(len(draft.ids) - 1, 1, **read)
    draft.num_read = 42
    assert draft.guess() == formula.guess(draft.ids, NUM_GUESSED)


@torch.inference_mode()
def test_a_prefix_without_hidden_states_only_loses_one_of_them(
    hybrid: tuple[Path, Formula],
) -> None:
    folder, formula = hybrid
    draft = Draft(folder, random_prompt(64), [64])
    assert draft.runner.drafter is not None
    draft.runner.drafter.end(ID)  # as if another sequence had computed the prompt
    ids, before = draft.ids, formula.before(draft.ids)
    before[64] = 0
    assert draft.guess()[0] == int(formula(ids, before)[0][-1].argmax())


def test_only_one_layer_in_the_known_form_is_used(tmp_path: Path) -> None:
    without = make_tiny_model(tmp_path / "without", FAMILIES[0], pad_token_id=0)
    assert mtp_layer(read_spec(without)) is None
    folder = add_mtp_layer(make_tiny_model(tmp_path / "with", FAMILIES[0], pad_token_id=0))
    spec = read_spec(folder)
    assert mtp_layer(spec) is not None
    assert mtp_layer(msgspec.structs.replace(spec, architecture="Qwen3ForCausalLM")) is None
    tensors = load_file(folder / "model.safetensors")
    more = tensors | {"mtp.layers.1.input_layernorm.weight": tensors["mtp.norm.weight"].clone()}
    save_file(more, folder / "model.safetensors", metadata={"format": "pt"})
    assert mtp_layer(read_spec(folder)) is None
