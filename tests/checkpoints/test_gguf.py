import contextlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.fleet.served_model import ServedModel
from headrace.gateway.model_entries import family_of, precision_of
from headrace_common.checkpoints.find import find_model
from headrace_common.checkpoints.gguf_file_names import quantization_of
from headrace_common.checkpoints.gguf_folder import (
    _EXPERTS,
    _SIZES,
    _STATES,
    _llama3,
    gguf_folder,
)
from headrace_common.checkpoints.gguf_header import TYPES, read_gguf
from headrace_common.checkpoints.spec import Defaults, read_spec
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import ModelError
from headrace_engine.models.rope import frequencies
from headrace_engine.models.text_config import Rope
from headrace_engine.runner.footprint import footprint
from headrace_engine.runner.lanes import choose
from headrace_engine.runner.lanes.lane import LaneOptions
from headrace_engine.runner.lanes.native_text import NativeText
from headrace_engine.runner.load import load_runner
from headrace_engine.runner.runner import Runner
from headrace_engine.weights.gguf_groups import GROUP_SCHEMES, GroupScheme
from tests.kernels.own_kernels import needs_own_kernels
from tools.harness.drive import (
    assert_close,
    assert_errs_no_more_than_bfloat16,
    random_prompt,
    row_logits,
    tiny_runner,
)
from tools.harness.gguf_files import make_tiny_file, write_file
from tools.harness.tiny_models import CHAT_TEMPLATE, END, GEMMA4_EXPERTS

KINDS = [entry[0] for entry in TYPES.values()]
FAMILIES = [
    f"{name}ForCausalLM"
    for name in (
        *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3"),
        *("SmolLM3", "Olmo2", "Olmo3", "Phi3", "Granite"),
    )
]
CASES = [
    *((family, "Q8_0") for family in FAMILIES),
    *((f"Qwen3{name}ForCausalLM", kind) for name in ("Moe", "_5Moe") for kind in ("Q8_0", "Q4_K")),
    *((f"Qwen3{name}ForCausalLM", "Q8_0") for name in ("_5", "Next")),
    *(("Gemma4ForCausalLM", kind) for kind in ("Q8_0", "Q4_K")),
    *(("LlamaForCausalLM", kind) for kind in KINDS),
]
PROMPT = random_prompt(40)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make(tmp_path: Path, family: str = "Qwen3ForCausalLM", kind: str = "Q8_0", **more: Any):
    return make_tiny_file(tmp_path, family, kind, **more)


@pytest.mark.parametrize("family, kind", CASES)
def test_a_file_says_what_its_values_say_as_safetensors(
    tmp_path: Path, family: str, kind: str
) -> None:
    folder, file = make(tmp_path, family, kind)
    expected = row_logits(tiny_runner(folder, dtype="float32"), PROMPT)
    found = row_logits(tiny_runner(find_model(str(file)), dtype="float32"), PROMPT)
    assert_close(found, expected, tolerance=1e-4)
    assert float(expected.std()) > 0.01


ALL_BIASES = tuple(f"{part}.bias" for part in ("attn_output", "ffn_gate", "ffn_up", "ffn_down"))


@pytest.mark.parametrize("left_out", [(), ALL_BIASES[:1], ALL_BIASES])
def test_a_llama_file_may_have_some_of_the_biases(
    tmp_path: Path, left_out: tuple[str, ...]
) -> None:
    biased = {"attention_bias": True, "mlp_bias": True}
    folder, file = make(tmp_path, "LlamaForCausalLM", config=biased, left_out=left_out)
    expected = row_logits(tiny_runner(folder, dtype="float32"), PROMPT)
    found = row_logits(tiny_runner(find_model(str(file)), dtype="float32"), PROMPT)
    assert_close(found, expected, tolerance=1e-4)


@pytest.mark.parametrize("stated, complaint", [(7, "experts.10"), (12, "experts.11")])
def test_experts_that_do_not_fit_their_number_are_named(
    tmp_path: Path, stated: int, complaint: str
) -> None:
    folder = find_model(str(make(tmp_path, "Qwen3MoeForCausalLM")[1]))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_experts": stated}))
    with pytest.raises(ModelError, match=complaint) as error:
        tiny_runner(folder)
    assert error.value.code == "model_corrupt"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_a_gemma_4_with_experts_and_keys_as_values_says_the_same(tmp_path: Path, kind: str) -> None:
    config = GEMMA4_EXPERTS | {"moe_intermediate_size": 256}
    folder, file = make_tiny_file(tmp_path, "Gemma4ForCausalLM", kind, config=config)
    expected = row_logits(tiny_runner(folder, dtype="float32"), PROMPT)
    found = row_logits(tiny_runner(find_model(str(file)), dtype="float32"), PROMPT)
    assert_close(found, expected, tolerance=1e-4)


@needs_own_kernels
@pytest.mark.parametrize("family, kind", [(f, k) for f, k in CASES if k in GROUP_SCHEMES])
def test_a_file_keeps_its_bits_and_computes_as_plain_bfloat16_or_better(
    tmp_path: Path, family: str, kind: str
) -> None:
    """Chunks change no bit of the logits, and the weights take the memory that was computed."""
    file = find_model(str(make(tmp_path, family, kind)[1]))
    runner, unpacked = tiny_runner(file), footprint(read_spec(file), BF16, "avx512", "none")
    found = row_logits(runner, PROMPT)
    assert_errs_no_more_than_bfloat16(found, file, PROMPT)
    for chunk in (1, 7, 30):
        assert torch.equal(row_logits(runner, PROMPT, chunk), found)
    needed = footprint(read_spec(file), BF16, "avx512", "own")
    assert runner.lane.weight_bytes == needed.held <= needed.peak
    assert needed.held < (0.45 if GROUP_SCHEMES[kind].bits == 4 else 0.7) * unpacked.held


@needs_own_kernels
@pytest.mark.parametrize("is_tied", [True, False])
def test_stacks_of_several_types_and_heads_of_their_own_keep_their_values(
    tmp_path: Path, is_tied: bool
) -> None:
    """As the mixes named K_M have them: some of q, k and v in more bits than the others."""
    mixed = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "output": "Q8_0"}
    file = find_model(
        str(make(tmp_path, "Qwen2ForCausalLM", "Q4_K", mixed=mixed, is_tied=is_tied)[1])
    )
    runner = tiny_runner(file)
    schemes = {path: m.scheme for path, m in modules_of(runner).items() if hasattr(m, "scheme")}
    assert schemes["layers.0.attention.qkv"] == GroupScheme(8, 16, True)
    assert schemes["layers.0.attention.out"] == GroupScheme(4, 32, True)
    assert schemes["layers.0.mlp.down"] == GroupScheme(8, 16, False)
    assert schemes["head"] == GroupScheme(8, 16 if is_tied else 32, False)
    assert_errs_no_more_than_bfloat16(row_logits(runner, PROMPT), file, PROMPT)
    needed = footprint(read_spec(file), BF16, "avx512", "own")
    assert runner.lane.weight_bytes == needed.held


@needs_own_kernels
def test_a_file_is_unpacked_on_request_and_by_plain_and_its_answers_are_named_apart(
    tmp_path: Path,
) -> None:
    file = find_model(str(make(tmp_path)[1]))
    ready = {
        settings: load_runner(
            ModelConfig(device="cpu", threads=1, max_model_len=64, **dict([settings])), file
        )[1]
        for settings in (("quantize", "auto"), ("quantize", "none"), ("kernels", "plain"))
    }
    assert [r.quantize for r in ready.values()] == ["own", "none", "none"]
    assert len({r.fingerprint for r in ready.values()}) == 3
    held = [r.weight_bytes for r in ready.values()]
    assert held[0] < 0.7 * held[1]


def modules_of(runner: Runner) -> dict[str, torch.nn.Module]:
    return dict(runner.lane._model.named_modules())


def test_the_folder_that_is_made_holds_what_the_file_says(tmp_path: Path) -> None:
    original, file = make(tmp_path)
    spec, before = read_spec(find_model(str(file))), read_spec(original)
    assert spec.name == "tiny-Q8_0" and spec.dtype == "bfloat16"
    assert spec.architecture == "Qwen3ForCausalLM"
    assert spec.vocab_size == before.vocab_size and spec.max_positions == before.max_positions
    assert spec.end_token_ids[0] == END
    described = json.loads((spec.folder / "tokenizer_config.json").read_text())
    assert described["chat_template"] == CHAT_TEMPLATE and described["eos_token"] == "<|im_end|>"
    assert gguf_folder(file) == spec.folder  # made once


@pytest.mark.parametrize(("name", "kind"), [("it-Q4_K_M.gguf", "Q4_K_M"), ("it.gguf", "Q8_0")])
def test_lists_of_models_name_a_files_family_and_type_as_ollama_does(
    tmp_path: Path, name: str, kind: str
) -> None:
    file = make(tmp_path, "LlamaForCausalLM")[1]
    config = ModelConfig(model=str(file.rename(tmp_path / name)))
    model = ServedModel(config)
    assert (family_of(model), precision_of(model)) == ("llama", kind)


def test_a_file_without_sampling_settings_is_drawn_from_as_llama_cpp_does(tmp_path: Path) -> None:
    spec = read_spec(find_model(str(make(tmp_path)[1])))
    assert spec.defaults == Defaults(0.8, 0.95, 40, 0.05, 1.0)
    (tmp_path / "own").mkdir()
    said = {"temp": 0.6, "top_k": 20, "min_p": -3.0, "penalty_repeat": 1.1}
    more = {f"general.sampling.{key}": value for key, value in said.items()}
    own = read_spec(find_model(str(make(tmp_path / "own", **more)[1])))
    assert own.defaults == Defaults(0.6, 0.95, 20, 0.05, 1.1)


def test_the_file_of_smollm2_gets_settings_that_it_lacks(tmp_path: Path) -> None:
    more = {"general.name": "Smollm2 135M 8k Lc100K Mix1 Ep2", "general.sampling.top_k": 20}
    spec = read_spec(find_model(str(make(tmp_path, **more)[1])))
    assert spec.defaults == Defaults(0.2, 0.9, 20, 0.05, 1.1, max_tokens=1024)


def test_a_file_that_changes_is_read_anew(tmp_path: Path) -> None:
    file = make(tmp_path)[1]
    first = gguf_folder(file)
    file.write_bytes(file.read_bytes() + b"\0")
    assert gguf_folder(file) != first


def test_one_of_several_quantizations_is_named(tmp_path: Path) -> None:
    file = make(tmp_path)[1]
    folder = tmp_path / "both"
    folder.mkdir()
    for kind in ("Q8_0", "Q4_K_M"):
        (folder / f"tiny-{kind}.gguf").write_bytes(file.read_bytes())
    assert find_model(f"{folder}:q4_k_m").name == "tiny-Q4_K_M"
    with pytest.raises(ModelError, match=r"2 GGUF files \(Q4_K_M, Q8_0\).*both:Q4_K_M"):
        find_model(str(folder))
    with pytest.raises(ModelError, match="name one"):
        find_model(f"{folder}:Q5_0")
    (folder / "tiny-Q4_K_M.gguf").unlink()
    assert find_model(str(folder)).name == "tiny-Q8_0"


def test_two_of_one_quantization_are_told_apart_by_their_names(tmp_path: Path) -> None:
    file = make(tmp_path)[1]
    folder = tmp_path / "both"
    folder.mkdir()
    for name in ("m1", "m2", "small-Q8_0", "large-Q8_0"):
        (folder / f"{name}.gguf").write_bytes(file.read_bytes())
    named = "large-Q8_0.gguf, m1.gguf, m2.gguf, small-Q8_0.gguf"
    for model in (str(folder), f"{folder}:Q8_0", f"{folder}:m3.gguf"):
        with pytest.raises(ModelError, match=rf"4 GGUF files \({named}\)") as refused:
            find_model(model)
    remedy = str(refused.value).partition("as in ")[2].rstrip(".")
    assert remedy == f"{folder}:large-Q8_0.gguf" and find_model(remedy).name == "large-Q8_0"
    assert find_model(f"{folder}:m1.gguf").name == find_model(f"{folder}:m1").name == "m1"


@pytest.mark.parametrize(
    "name, kind",
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"),
        ("llama.q4_k_m.gguf", "Q4_K_M"),
        ("x-IQ4_XS-00001-of-00002.gguf", "IQ4_XS"),
        ("model-bf16.gguf", "BF16"),
        ("model.gguf", None),
    ],
)
def test_a_quantization_is_read_from_a_name(name: str, kind: str | None) -> None:
    assert quantization_of(name) == kind


def test_a_model_in_parts_is_one_model_and_a_missing_part_is_named(tmp_path: Path) -> None:
    folder, file = make(tmp_path)
    reader = gguf.GGUFReader(file)
    names = [tmp_path / f"cut-0000{n}-of-00002.gguf" for n in (1, 2)]
    header = read_gguf(file)
    for number, (path, tensors) in enumerate(
        zip(names, (reader.tensors[:9], reader.tensors[9:]), strict=True)
    ):
        writer = gguf.GGUFWriter(path, "qwen3")
        if number == 0:
            for key, value in header.fields.items():
                field = reader.fields[key]
                if not key.startswith("GGUF.") and key != "general.architecture":
                    sub = field.types[1] if len(field.types) > 1 else None
                    writer.add_key_value(key, value, field.types[0], sub)
        for tensor in tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        write_file(writer)
    whole = row_logits(tiny_runner(folder, dtype="float32"), PROMPT)
    found = find_model(str(names[0]))
    assert found.name == "cut"
    assert_close(row_logits(tiny_runner(found, dtype="float32"), PROMPT), whole, tolerance=1e-4)
    names[1].unlink()
    with pytest.raises(ModelError, match=r"cut-00002-of-00002.gguf is missing"):
        find_model(str(names[0]))


def write(path: Path, architecture: str, kind: gguf.GGMLQuantizationType) -> Path:
    """Two tokens and one tensor."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    raw = np.zeros((2, 54), np.uint8)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    write_file(writer)
    return path


@pytest.mark.parametrize(
    "architecture, reason",
    [("mamba", "of the architecture mamba are"), ("llama", "tensors of the type TQ1_0")],
)
def test_what_ours_do_not_compute_is_llama_cpps_and_without_it_the_remedy_is_told(
    tmp_path: Path, architecture: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.gguf", architecture, gguf.GGMLQuantizationType.TQ1_0)
    spec = read_spec(find_model(str(path)))
    monkeypatch.setattr(choose, "has_llama_cpp", lambda: False)
    for wanted in ("auto", "llama-cpp"):
        with pytest.raises(ModelError, match=r"pip install '\.\[llama-cpp\]'"):
            choose.choose_lane(spec, wanted)
    with pytest.raises(ModelError, match=reason):
        choose.choose_lane(spec, "auto")
    monkeypatch.setattr(choose, "has_llama_cpp", lambda: True)
    assert choose.choose_lane(spec, "auto").traits.id == "llama-cpp"
    assert footprint(spec, BF16, "plain", "own").held == 108  # as it is stored


def test_a_file_of_ours_may_be_forced_to_llama_cpp_and_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "has_llama_cpp", lambda: True)
    folder, file = make(tmp_path)
    spec = read_spec(find_model(str(file)))
    assert choose.choose_lane(spec, "auto").traits.id == "native-text"
    assert choose.choose_lane(spec, "llama-cpp").traits.id == "llama-cpp"
    with pytest.raises(ModelError, match="model has no GGUF file"):
        choose.choose_lane(read_spec(folder), "llama-cpp")


def test_a_type_that_nobody_knows_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "llama", gguf.GGMLQuantizationType.TQ1_0)
    raw = path.read_bytes()
    name = b"token_embd.weight"
    place = raw.index(name) + len(name) + 4 + 2 * 8  # behind the rank and two sizes
    path.write_bytes(raw[:place] + (99).to_bytes(4, "little") + raw[place + 4 :])
    with pytest.raises(ModelError, match=r"token_embd.weight of x.gguf has GGML's type 99"):
        find_model(str(path))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make(tmp_path_factory.mktemp("sound"))[1].read_bytes()


@settings(
    max_examples=int(os.environ.get("MUTATIONS", "60")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_a_damaged_head_is_one_line_and_no_crash(
    tmp_path: Path, sound: bytes, data: st.DataObject
) -> None:
    changed = bytearray(sound)
    head = 12_000  # fields, tokens and the table of tensors lie in it
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(head, len(changed)) - 9))
        size = data.draw(st.sampled_from([1, 4, 8]))
        changed[place : place + size] = data.draw(st.binary(min_size=size, max_size=size))
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(0, len(changed))) :]
    path = tmp_path / "changed.gguf"
    path.write_bytes(changed)
    try:
        spec = read_spec(find_model(str(path)))
        choose.choose_lane(spec, "native-text")
        NativeText(spec, torch.float32, torch.device("cpu"), LaneOptions())
    except ModelError as error:
        assert "\n" not in str(error)


def test_llama3s_stretching_is_recognized() -> None:
    rope = Rope(500_000.0, 8192, "llama3", 32.0, 1.0, 4.0)
    divisors = frequencies(Rope(500_000.0, 8192), 64)[0] / frequencies(rope, 64)[0]
    config = {"head_dim": 64, "rope_theta": 500_000.0}
    assert _llama3(config, tuple(divisors.tolist()))["factor"] == pytest.approx(32.0)
    with pytest.raises(ModelError, match="rope_freqs"):
        _llama3(config, tuple((divisors * torch.linspace(1, 2, 32)).tolist()))


def opened_with(fields: Mapping[str, Any], cache: Path) -> None:
    """Open a real file as if its head had other fields as well."""
    file = Path(__file__).with_name("data") / "llama-Q4_K_M.gguf"
    header = read_gguf(file)
    header.fields.update(fields)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=cache) as own:
        patch.setenv("XDG_CACHE_HOME", own)
        patch.setattr("headrace_common.checkpoints.gguf_folder.read_gguf", lambda _: header)
        read_spec(gguf_folder(file))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("llama.block_count", 2**31),
        ("llama.embedding_length", "many"),
        ("llama.rope.scaling.factor", math.nan),
        ("llama.rope.freq_base", math.inf),
        ("tokenizer.ggml.token_type", 7),
    ],
)
def test_fields_that_do_not_fit_together_are_damage(field: str, value: Any, tmp_path: Path) -> None:
    fields = {"llama.rope.scaling.type": "yarn", field: value}
    with pytest.raises(ModelError, match=r"download it again|cannot be used"):
        opened_with(fields, tmp_path)


OTHERS = ("full_attention_interval", "nextn_predict_layers", "rope.dimension_count")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    architecture=st.sampled_from(
        [
            *("llama", "gemma2", "gemma4", "gpt-oss", "qwen3next", "qwen35moe", "other"),
            *("granite", "olmo2", "phi3"),
        ]
    ),
    fields=st.dictionaries(
        st.sampled_from([*_SIZES, *_EXPERTS, *_STATES, *OTHERS, "rope.scaling.type"]),
        st.sampled_from([0, -1, 1, 2, 2**31, "x", "yarn", "linear", [1], math.nan, 1e308]),
        max_size=8,
    ),
)
def test_fields_of_any_values_are_taken_or_refused_and_are_never_a_bug(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    whole = {f"{architecture}.{name}": 1 for name in (*_SIZES, *_STATES)}
    named = {f"{architecture}.{name}": value for name, value in fields.items()}
    with contextlib.suppress(ModelError):
        opened_with({"general.architecture": architecture} | whole | named, tmp_path)
