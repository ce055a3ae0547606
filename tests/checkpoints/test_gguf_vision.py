"""GGUF models with a vision part in a second file: the same logits, and clear errors."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.text.text_model import TextModel
from headrace_common.checkpoints.find import find_here, find_model, may_have_images
from headrace_common.checkpoints.gguf_header import read_gguf
from headrace_common.checkpoints.gguf_vision import MMPROJ, add_vision, best_mmproj
from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import ModelConfig
from headrace_common.config.sources import folder_models
from headrace_common.errors import ModelError
from headrace_engine.runner.images import ImageProcessor
from headrace_engine.runner.lanes import choose
from headrace_engine.runner.lanes.vision_tower import VisionTower
from headrace_engine.weights.weights import unpacked_weights
from tests.equality.test_lanes_images import BLUE, RED, Talk, borders, logits_of, prepare
from tools.harness.drive import assert_close, tiny_runner
from tools.harness.gguf_vision import NAMES, to_gguf_pair
from tools.harness.tiny_models import make_tiny_image_model

KIND = "Qwen3.5"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make(folder: Path, kind: str = KIND, stored: str = "F32", **fields: Any) -> tuple[Path, ...]:
    """Return a model folder, and the GGUF files of its text side and of its vision part."""
    (folder / "model").mkdir(parents=True)
    model = make_tiny_image_model(folder / "model", kind)
    if kind == "Gemma3":
        # GGUF files do not state this number. It is the size of a head in all models but one.
        config = json.loads((model / "config.json").read_text())
        config["text_config"]["query_pre_attn_scalar"] = config["text_config"]["head_dim"]
        (model / "config.json").write_text(json.dumps(config))
    return model, *to_gguf_pair(model, folder / "files", stored, **fields)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    return make(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    return make(tmp_path_factory.mktemp("gemma3"), "Gemma3")


def copy_of(pair: tuple[Path, ...], folder: Path, name: str = "mmproj-x.gguf") -> tuple[Path, Path]:
    """Return copies of both files in a new folder, with this name for the vision part."""
    folder.mkdir()
    text = Path(shutil.copy(pair[1], folder / "model.gguf"))
    return text, Path(shutil.copy(pair[2], folder / name))


@pytest.mark.parametrize(
    ("kind", "stored"),
    [*((KIND, it) for it in ("F32", "Q8_0")), *((it, "F32") for it in ("Qwen3.5-MoE", "Gemma3"))],
)
@torch.inference_mode()
def test_a_pair_of_files_has_the_logits_of_transformers_at_all_cuts(
    kind: str, stored: str, tmp_path: Path
) -> None:
    original, text, vision = make(tmp_path, kind, stored)
    folder, is_native = find_model(str(text), mmproj=str(vision)), kind != "Gemma3"
    runner = tiny_runner(folder, dtype="float32", quantize="none", max_model_len=256, block_size=8)
    lane = "native-multimodal" if is_native else "generic-multimodal"
    assert runner.lane.traits.id == lane
    processor = ImageProcessor(folder, in_pieces=is_native)
    (tmp_path / "pixels").mkdir()
    prepared = prepare(processor, kind, [RED, BLUE], tmp_path / "pixels")
    reference = transformers.AutoModelForImageTextToText.from_pretrained(
        original, attn_implementation="eager"
    ).eval()
    tokens = prepared.token_ids.tolist()
    expected = logits_of(reference, ImageProcessor(original, is_native), kind, tokens)
    for number, ends in enumerate(borders(kind, prepared)):
        talk, start, rows = Talk(runner, prepared, number), 0, []
        for end in ends:
            rows.append(talk.chunk(start, end, rows=end - start))
            start = end
        assert_close(torch.cat(rows), expected, 5e-4)


def test_the_file_beside_a_model_is_used_unless_there_are_several(pair, tmp_path):
    text, vision = copy_of(pair, tmp_path / "own")
    assert may_have_images(str(text)) and may_have_images(str(text.parent))
    spec = read_spec(find_model(str(text)))
    assert spec.weight_files == ("model.gguf", MMPROJ) and spec.config["mmproj"] == vision.name
    assert find_model(str(text.parent)) == find_here(str(text)) == spec.folder
    # Workers find the model by the folder that was made.
    assert find_model(str(spec.folder)) == spec.folder
    for setting, has_vision in (("none", False), ("auto", True)):
        model = TextModel(ModelConfig(model=str(text), mmproj=setting))
        assert model.has_vision is has_vision
    shutil.copy(vision, vision.with_name("mmproj-y.gguf"))
    assert read_spec(find_model(str(text))).architecture == "Qwen3_5ForCausalLM"
    assert not may_have_images(str(text))
    assert may_have_images(str(text), mmproj=str(vision))
    assert read_spec(find_model(str(text), mmproj=str(vision))).architecture == spec.architecture
    (offered,) = folder_models(text.parent, "--models-dir")
    assert offered["model"] == str(text)


@pytest.mark.parametrize(
    ("names", "best"),
    [
        ([], None),
        (["mmproj-any.gguf"], "mmproj-any.gguf"),
        (["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], "mmproj-F16.gguf"),
        (["mmproj-model-f16.gguf", "mmproj-model-Q8_0.gguf"], "mmproj-model-f16.gguf"),
        (["mmproj-F32.gguf", "mmproj-Q8_0.gguf", "mmproj-BF16.gguf"], "mmproj-Q8_0.gguf"),
        (["mmproj-a-F16.gguf", "mmproj-b-F16.gguf"], None),
        (["mmproj-Tiny-4B-F16.gguf", "mmproj-Tiny-9B-F16.gguf"], "mmproj-Tiny-9B-F16.gguf"),
    ],
)
def test_of_several_formats_of_a_vision_part_f16_is_best_and_then_the_smallest(
    names: list[str], best: str | None
) -> None:
    sizes = {name: 1 if "Q8_0" in name else 2 for name in names}
    assert best_mmproj(sizes, "tiny-9b-Q4_K_M.gguf") == best


def test_a_named_vision_part_may_be_beside_the_model(pair, tmp_path):
    text, vision = copy_of(pair, tmp_path / "own")
    assert find_model(str(text), mmproj=vision.name) == find_model(str(text), mmproj=str(vision))


def test_a_link_to_a_model_uses_the_vision_part_beside_the_link(pair, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    for name, file in (("model.gguf", pair[1]), ("mmproj-model.gguf", pair[2])):
        blob = tmp_path / f"blob-{name}"
        shutil.copy(file, blob)
        (links / name).symlink_to(blob)
    assert "vision_config" in read_spec(find_model(str(links / "model.gguf"))).config


def test_the_text_of_a_pair_runs_alone_in_the_other_lanes(pair, monkeypatch):
    spec = read_spec(find_model(str(pair[1])))
    monkeypatch.setattr(choose, "has_llama_cpp", lambda: True)
    for lane in ("native-text", "llama-cpp"):
        assert choose.choose_lane(spec, lane).traits.id == lane
        assert not TextModel(ModelConfig(model=str(pair[1]), lane=lane)).has_vision
    with pytest.raises(ModelError, match="only native-text, native-multimodal and llama-cpp run"):
        choose.choose_lane(spec, "generic-multimodal")


def test_gemma_3_reads_images_only_if_its_vision_part_is_named(gemma3):
    _, text, vision = gemma3
    spec = read_spec(find_model(str(text)))
    assert spec.architecture == "Gemma3ForCausalLM"
    assert f"add --mmproj {vision.name}." in spec.config["mmproj_unused"]
    named = read_spec(find_model(str(text), mmproj=str(vision)))
    assert choose.choose_lane(named, "auto").traits.id == "generic-multimodal"
    with pytest.raises(ModelError, match="only generic-multimodal and llama-cpp run GGUF"):
        choose.choose_lane(named, "native-text")


def test_swapped_names_of_older_converters_are_swapped_back(gemma3, tmp_path, monkeypatch):
    for own, stored in (("mlp.fc1", "ffn_down"), ("mlp.fc2", "ffn_up")):
        monkeypatch.setitem(NAMES, own, stored)
    _, text, vision = make(tmp_path, "Gemma3")
    assert read_gguf(vision).tensors["v.blk.0.ffn_down.weight"].shape == (48, 32)
    assert read_gguf(gemma3[2]).tensors["v.blk.0.ffn_down.weight"].shape == (32, 48)
    found, expected = (
        unpacked_weights(read_spec(find_model(str(it), mmproj=str(own))), torch.float32)
        for it, own in ((text, vision), gemma3[1:])
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_an_unused_token_stands_for_an_image_in_older_files_of_gemma_3(gemma3, tmp_path):
    text, vision = copy_of((*gemma3[:2], gemma3[2]), tmp_path / "own")
    spelled = b"<image_soft_token>"
    # A token of the same length, as in files without the token.
    changed = text.read_bytes().replace(spelled, b"<another_token___>")
    text.write_bytes(changed)
    with pytest.raises(ModelError, match="has no token <image_soft_token>"):
        find_model(str(text), mmproj=str(vision))
    header, vocabulary = read_gguf(text), read_gguf(gemma3[1]).fields["tokenizer.ggml.tokens"]
    header.fields["tokenizer.ggml.tokens"][7] = "<unused99>"
    sizes = {"hidden_size": 64, "query_pre_attn_scalar": 16}
    config = sizes | {"dtype": "float32", "tie_word_embeddings": True}
    made = add_vision(config, header, vision, is_named=True)
    assert made.config["image_token_index"] == 7
    assert made.files["tokenizer_config.json"]["image_token"] == "<unused99>"
    assert made.config["boi_token_index"] == vocabulary.index("<start_of_image>")


OTHER_PROJECTOR = {"clip.projector_type": "pixtral"}


def test_files_of_different_models_are_refused_with_both_lengths(pair, tmp_path):
    (tmp_path / "other").mkdir()
    other = make_tiny_image_model(tmp_path / "other", KIND)
    model = transformers.AutoModelForImageTextToText.from_pretrained(other)
    vision = model.config.vision_config
    vision.out_hidden_size = 96
    model.model.visual = type(model.model.visual)(vision)
    model.save_pretrained(other)
    wide = to_gguf_pair(other, tmp_path / "wide")[1]
    with pytest.raises(ModelError, match=r"embeddings of 96 numbers.* have 64.*published"):
        find_model(str(pair[1]), mmproj=str(wide))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (OTHER_PROJECTOR, r"projector pixtral.*supported: Qwen3.5 \(qwen3vl_merger\) and Gemma 3"),
        ({"clip.vision.is_deepstack_layers": [True, False, False]}, "deepstack"),
        ({"clip.vision.patch_size": 1 << 30}, r"v.patch_embd.weight has the shape \[32, 3, 8, 8\]"),
        ({"clip.vision.block_count": 1 << 30}, "fewer tensors than layers"),
        ({"clip.vision.spatial_merge_size": 0}, "spatial_merge_size"),
        ({"clip.vision.image_std": [0.0, 0.5, 0.5]}, "image_std"),
        ({"clip.vision.image_max_pixels": 1 << 31}, "pixels"),
        ({"clip.vision.embedding_length": None}, "embedding_length is missing"),
    ],
)
def test_an_unusable_vision_part_is_an_error_if_named_and_else_a_note(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, text, vision = make(tmp_path, **fields)
    with pytest.raises(ModelError, match=message) as refused:
        find_model(str(text), mmproj=str(vision))
    spec = read_spec(find_model(str(text)))
    assert spec.config["mmproj_unused"] == str(refused.value)
    assert choose.choose_lane(spec, "auto").traits.id == "native-text"
    # The note does not hide the error.
    with pytest.raises(ModelError, match=message):
        find_model(str(text), mmproj=str(vision))
    # The folder that was made is found again with the same note.
    assert find_model(str(spec.folder)) == spec.folder


def test_a_missing_vision_part_or_one_in_place_of_a_model_is_named(pair, tmp_path):
    text, vision = copy_of(pair, tmp_path / "own")
    with pytest.raises(ModelError, match=r"no file '/nowhere/x.gguf'"):
        find_model(str(text), mmproj="/nowhere/x.gguf")
    with pytest.raises(ModelError, match=f"Serve the model's own GGUF.*--mmproj {vision.name}"):
        find_model(str(vision))
    with pytest.raises(ModelError, match="architecture is qwen35 instead of clip"):
        find_model(str(text), mmproj=str(text))
    with pytest.raises(ModelError, match="--mmproj is for GGUF files"):
        find_model(str(pair[0]), mmproj=str(vision))


def test_tensors_that_do_not_fit_are_found_at_the_load(pair, tmp_path):
    text, vision = copy_of(pair, tmp_path / "own")
    for old, new in ((b"v.blk.2.ln1.bias", b"v.blk.7.ln1.bias"), (b"v.post_ln", b"v.past_ln")):
        vision.write_bytes(pair[2].read_bytes().replace(old, new))
        spec = read_spec(find_model(str(text)))
        with pytest.raises(ModelError, match=r"is missing|is unknown"):
            VisionTower(spec, torch.float32, torch.device("cpu"))


FIELDS = (
    *("projector_type", "embedding_length", "feed_forward_length", "attention.head_count"),
    *("block_count", "patch_size", "spatial_merge_size", "is_deepstack_layers", "image_mean"),
    *("image_std", "image_min_pixels", "image_max_pixels", "projector.scale_factor"),
)
VALUES = (0, -1, 1, 2, 4, 32, 2**31, 2**63, "x", "gemma3", True, [], [1], ["x"] * 3)
ANY = st.sampled_from((*VALUES, [float("nan")] * 3, float("nan"), 1e308))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=5),
    has_text=st.booleans(),
    is_gemma=st.booleans(),
)
def test_fields_of_any_values_are_taken_or_refused_and_are_never_a_bug(
    pair: tuple[Path, ...],
    gemma3: tuple[Path, ...],
    fields: dict[str, Any],
    has_text: bool,
    is_gemma: bool,
) -> None:
    pair = gemma3 if is_gemma else pair
    header, text = read_gguf(pair[2]), read_gguf(pair[1])
    header.fields.update({f"clip.vision.{key}": value for key, value in fields.items()})
    if not has_text:
        text.fields["qwen35.rope.dimension_sections"] = fields.get("image_mean", [])
    config = {"hidden_size": 64, "dtype": "float32", "tie_word_embeddings": False}
    config |= {"query_pre_attn_scalar": 16}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace_common.checkpoints.gguf_vision.read_gguf", lambda *_: header)
        try:
            add_vision(config, text, pair[2], is_named=True)
        except ModelError as error:
            assert "\n" not in str(error)
        assert add_vision(config, text, pair[2], is_named=False).config["mmproj"] == pair[2].name


@settings(
    max_examples=int(os.environ.get("MUTATIONS", "40")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_a_damaged_vision_part_is_one_line_and_no_crash(
    tmp_path: Path, pair: tuple[Path, ...], data: st.DataObject
) -> None:
    changed = bytearray(pair[2].read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 4_000))
        size = data.draw(st.sampled_from([1, 4, 8]))
        changed[place : place + size] = data.draw(st.binary(min_size=size, max_size=size))
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(0, len(changed))) :]
    path = tmp_path / "changed.gguf"
    path.write_bytes(changed)
    try:
        spec = read_spec(find_model(str(pair[1]), mmproj=str(path)))
        VisionTower(spec, torch.float32, torch.device("cpu"))
    except ModelError as error:
        assert "\n" not in str(error)
