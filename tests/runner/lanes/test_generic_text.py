from array import array
from pathlib import Path

import pytest

from headrace.core.errors import ModelError
from headrace.core.ids import SequenceId, SlotId
from headrace.core.plan import Chunk
from headrace.runner.lanes import generic_text
from headrace.runner.lanes.foreign import Signature
from tests.builders import make_tiny_model
from tests.drive import generate, random_prompt, tiny_runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("generic") / "tiny", "LlamaForCausalLM")


def test_the_signature_is_read_once_for_any_number_of_chunks(folder: Path, monkeypatch) -> None:
    reads = []
    read = Signature.of
    monkeypatch.setattr(Signature, "of", lambda f: reads.append(f) or read(f))
    generate(tiny_runner(folder, "generic-text"), random_prompt(40), 3, chunk=4)
    assert len(reads) == 1


def test_a_model_that_returns_no_cache_is_refused_by_lane_and_name(tmp_path: Path) -> None:
    bert = make_tiny_model(tmp_path / "bert", "BertLMHeadModel", head_dim=None)
    with pytest.raises(ModelError, match=r"BertLMHeadModel .* lane generic-text: .* no cache"):
        tiny_runner(bert)


def test_a_model_whose_forward_fails_is_refused_and_no_fault_of_ours(tmp_path: Path) -> None:
    xlstm = make_tiny_model(tmp_path / "xlstm", "xLSTMForCausalLM", head_dim=None)
    with pytest.raises(ModelError, match=r"xLSTMForCausalLM .* its forward ends with Attribute"):
        tiny_runner(xlstm)


def test_slots_shrink_to_the_memory_and_then_the_sequences_do(folder: Path) -> None:
    lane = tiny_runner(folder, "generic-text").lane
    # 3 layers, 2 kv heads of 16, keys and values, float32
    position = 3 * 2 * 16 * 2 * 4
    wide = lane.layout(10 * 100 * position, 4, 100, 16)
    assert (wide.num_slots, wide.max_positions, wide.num_blocks) == (4, 100, 0)
    narrow = lane.layout(2 * 100 * position, 4, 100, 16)
    assert (narrow.num_slots, narrow.max_positions) == (2, 100)
    tight = lane.layout(50 * position, 4, 100, 16)
    assert (tight.num_slots, tight.max_positions) == (1, 50)


def test_a_slot_that_starts_at_zero_forgets_what_was_in_it(folder: Path) -> None:
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
    chunk = Chunk(SequenceId(0), 0, 30, 4, (), array("i"), SlotId(0))
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
