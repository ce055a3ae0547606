import logging
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace_common.errors import ModelError
from headrace_common.ids import SequenceId, SlotId
from headrace_common.plan import Chunk
from headrace_engine.runner.lanes import generic_blocks, generic_text
from headrace_engine.runner.lanes.foreign import Signature
from tools.harness.drive import (
    Drive,
    assert_close,
    generate,
    random_prompt,
    row_logits,
    tiny_runner,
)
from tools.harness.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("generic") / "tiny", "LlamaForCausalLM")


@pytest.fixture
def on_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_supports_attention_backend", False)


def test_the_signature_is_read_once_for_any_number_of_chunks(folder: Path, monkeypatch) -> None:
    reads = []
    read = Signature.of
    monkeypatch.setattr(Signature, "of", lambda f: reads.append(f) or read(f))
    generate(tiny_runner(folder, "generic-text"), random_prompt(40), 3, chunk=4)
    assert len(reads) == 1


def test_a_model_that_returns_no_cache_is_refused_by_lane_and_name(tmp_path: Path) -> None:
    bert = make_tiny_model(tmp_path / "bert", "BertLMHeadModel", head_dim=None)
    with pytest.raises(ModelError, match=r"Lane generic-text .* BertLMHeadModel .* no cache"):
        tiny_runner(bert)


def test_a_model_whose_forward_fails_is_refused_and_no_fault_of_ours(tmp_path: Path) -> None:
    xlstm = make_tiny_model(tmp_path / "xlstm", "xLSTMForCausalLM", head_dim=None)
    with pytest.raises(ModelError, match=r"xLSTMForCausalLM .* its forward fails with Attribute"):
        tiny_runner(xlstm)


def test_slots_shrink_to_the_memory_and_then_the_sequences_do(folder: Path, on_slots) -> None:
    lane = tiny_runner(folder, "generic-text").lane
    # 3 layers, 2 kv heads of 16, keys and values, float32
    position = 3 * 2 * 16 * 2 * 4
    wide = lane.layout(10 * 100 * position, 4, 100, 16)
    assert (wide.num_slots, wide.max_positions, wide.num_blocks) == (4, 100, 0)
    narrow = lane.layout(2 * 100 * position, 4, 100, 16)
    assert (narrow.num_slots, narrow.max_positions) == (2, 100)
    tight = lane.layout(50 * position, 4, 100, 16)
    assert (tight.num_slots, tight.max_positions) == (1, 50)


def test_a_slot_that_starts_at_zero_forgets_what_was_in_it(folder: Path, on_slots) -> None:
    runner = tiny_runner(folder, "generic-text")
    prompt = random_prompt(20)
    first = generate(runner, prompt, 5)
    generate(runner, random_prompt(33, seed=1), 5)
    assert generate(runner, prompt, 5) == first


def test_rows_beyond_those_asked_for_never_reach_the_head(folder: Path) -> None:
    lane = tiny_runner(folder, "generic-text").lane
    head_rows: list[int] = []
    head = lane._model.lm_head
    head.register_forward_hook(lambda _, inputs, __: head_rows.append(inputs[0].shape[1]))
    chunk = Chunk(SequenceId(0), 0, 30, 4, (), array("i", [1, 2]), SlotId(0))
    assert len(lane.forward([chunk], [array("i", range(30))])) == 4
    assert head_rows == [4]


def test_a_missing_tensor_is_not_made_up(tmp_path: Path, monkeypatch) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "LlamaForCausalLM")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight") as caught:
        tiny_runner(folder, "generic-text")
    assert caught.value.code == "model_corrupt"


def test_remote_code_and_the_network_are_off(folder: Path, monkeypatch) -> None:
    given = {}
    original = generic_text.AutoModelForCausalLM.from_pretrained

    def watch(path, **options):
        given.update(options)
        return original(path, **options)

    monkeypatch.setattr(generic_text.AutoModelForCausalLM, "from_pretrained", watch)
    tiny_runner(folder, "generic-text")
    assert given["local_files_only"] and given["use_safetensors"]
    assert given["trust_remote_code"] is False


# on blocks


def forwards_of(runner: Any) -> list[tuple[int, ...]]:
    """The sizes of what each forward of the model is given, from now on."""
    sizes: list[tuple[int, ...]] = []
    runner.lane._model.register_forward_hook(
        lambda _, args, options, output: sizes.append(tuple(options["input_ids"].shape)),
        with_kwargs=True,
    )
    return sizes


def eight_decoding(runner: Any) -> Drive:
    drive = Drive(runner, room=64)
    for number in range(8):
        drive.begin(number, random_prompt(5 + number, seed=number))
        drive.prefill(number)
    return drive


def test_eight_streams_decode_in_one_forward(folder: Path) -> None:
    runner = tiny_runner(folder, "generic-text", block_size=16)
    drive = eight_decoding(runner)
    sizes = forwards_of(runner)
    drive.decode(range(8), 3)
    drive.step(*((n, len(drive.tokens[n]) - 1, 1) for n in range(7)))
    assert sizes == [(1, 8)] * 3 + [(1, 7)]


def test_on_slots_each_has_a_forward_and_the_same_tokens(folder: Path, on_slots) -> None:
    runner = tiny_runner(folder, "generic-text")
    drive = eight_decoding(runner)
    sizes = forwards_of(runner)
    drive.decode(range(8), 3)
    assert sizes == [(1, 1)] * 24
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.LlamaForCausalLM, "_supports_attention_backend", True)
        packed = eight_decoding(tiny_runner(folder, "generic-text", block_size=16))
    packed.decode(range(8), 3)
    assert packed.tokens == drive.tokens


def why(folder: Path, architecture: str, **config: Any) -> str:
    """Why a model lives where it does."""
    lane = tiny_runner(make_tiny_model(folder / "tiny", architecture, **config)).lane
    return f"{lane.traits.facts.memory}: {lane.traits.facts.why}"


def test_layers_that_do_not_attend_lead_to_a_slot_whatever_the_model_declares(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert transformers.Lfm2ForCausalLM._supports_attention_backend
    with caplog.at_level(logging.INFO):
        reason = why(tmp_path, "Lfm2ForCausalLM", layer_types=["conv", "full_attention", "conv"])
    assert reason == "slot: Lfm2ForCausalLM can use blocks in only 1 of its 3 layers"
    assert "Lfm2ForCausalLM can use blocks in only 1" in caplog.text


def test_an_argument_that_our_attention_does_not_know_leads_to_a_slot(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    given = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda *args, **options: given(*args, **options, slope=0.5)
    )
    lane = tiny_runner(folder, "generic-text").lane
    expected = "passes the unsupported argument slope to its attention"
    assert (lane.traits.facts.memory, lane.traits.facts.why) == (
        "slot",
        f"LlamaForCausalLM {expected}",
    )


def test_a_mask_by_chunks_is_no_window_however_long_the_chunks(tmp_path: Path) -> None:
    experts = {"num_local_experts": 2, "interleave_moe_layer_step": 1}
    reason = why(tmp_path, "Llama4ForCausalLM", attention_chunk_size=512, pad_token_id=0, **experts)
    assert reason == (
        "slot: Llama4ForCausalLM has a mask that is neither causal nor a sliding window"
    )


def test_rope_that_changes_with_its_neighbours_leads_to_a_slot(tmp_path: Path) -> None:
    factors = [1.0 + i for i in range(8)]
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    config = {"rope_parameters": rope | {"rope_theta": 1e4}, "pad_token_id": 0}
    assert "longrope rope" in why(
        tmp_path, "Phi3ForCausalLM", **config, original_max_position_embeddings=64
    )


def test_an_attention_that_is_wrong_is_found_at_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = generic_blocks.PackedAttention.attend
    monkeypatch.setattr(
        generic_blocks.PackedAttention,
        "attend",
        lambda self, module, q, k, v: attend(self, module, q * 1.01, k, v),
    )
    lane = tiny_runner(folder, "generic-text").lane
    assert "computes different logits when sequences are packed" in lane.traits.facts.why
    assert len(generate(tiny_runner(folder, "generic-text"), random_prompt(9), 3)) == 3


@torch.inference_mode()
def test_bfloat16_on_blocks_stays_near_the_model_itself(tmp_path: Path) -> None:
    tiny = make_tiny_model(tmp_path / "tiny", "Gemma3ForCausalLM", pad_token_id=0)
    prompt = random_prompt(50)
    exact = tiny_runner(tiny, "generic-text")
    coarse = tiny_runner(tiny, "generic-text", dtype="bfloat16")
    assert coarse.lane.traits.facts.memory == "blocks"
    assert_close(row_logits(coarse, prompt, 7), row_logits(exact, prompt), 0.2)


def test_blocks_shrink_to_the_memory(folder: Path) -> None:
    lane = tiny_runner(folder, "generic-text").lane
    block = 16 * 3 * 2 * 16 * 2 * 4
    layout = lane.layout(5 * block + 1, 4, 100, 16)
    assert (layout.num_blocks, layout.num_slots, layout.max_positions) == (5, 0, 80)
    assert not layout.forward_per_chunk
