"""`headrace doctor`: what it finds here, in a broken place, and beside a running server."""

import http.server
import json
import os
import re
import socket
import threading
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants

from headrace.cli.capacity import cache_bytes
from headrace.cli.doctor import _model, _port, doctor
from headrace.cli.doctor_report import verdict
from headrace.text.tokenizer import Tokenizer
from headrace_common.config.settings import HttpConfig, ModelConfig
from headrace_common.config.sources import load
from headrace_common.errors import ModelError
from headrace_common.layout import MemoryLayout
from tests.kernels.own_kernels import HAS_OWN, needs_own_kernels
from tools.harness.gguf_files import to_gguf
from tools.harness.gguf_vision import to_gguf_pair, to_mmproj
from tools.harness.tiny_models import (
    make_tiny_encoder,
    make_tiny_image_model,
    make_tiny_model,
    make_tiny_seq2seq,
)


def examine(
    capsys: pytest.CaptureFixture[str],
    model: str | None = None,
    loads: bool = True,
    **flags: object,
) -> tuple[int, dict[str, dict[str, str]]]:
    given = {"port": 0, "threads": 1, **flags} | ({"model": model} if model else {})
    capsys.readouterr()
    code = doctor(load(given, {}, None), model, as_json=True, loads=loads)
    findings = json.loads(capsys.readouterr().out)
    return code, {finding["subject"]: finding for finding in findings}


def test_a_sound_machine_has_no_fault(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = examine(capsys, state_dir=str(tmp_path / "state"))
    assert code == 0
    assert "torch" in found["libraries"]["detail"]
    assert "ms to sync" in found["state"]["detail"]
    assert not (tmp_path / "state").exists()


def test_a_model_is_told_its_lane_and_what_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    code, found = examine(capsys, str(folder), max_num_seqs=4, max_model_len=512)
    assert code == 0
    assert found["lane"]["detail"].startswith("native-text on cpu")
    bytes_per_token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, size, float32
    assert found["cache"]["detail"].startswith(f"{bytes_per_token} bytes per token, and 0 per")
    assert found["streams"]["detail"].startswith("2048 tokens fit: 4 streams of 512 tokens")
    told_tools = "characters; tools: generic (the template does not support tools)"
    assert found["template"]["detail"].endswith(told_tools)


def test_the_vision_part_of_a_gguf_model_is_named_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    folder = make_tiny_image_model(tmp_path / "model", "Qwen3.5")
    text, vision = to_gguf_pair(folder, tmp_path / "files")
    used = examine(capsys, str(text), loads=False)[1]
    assert used["vision"]["detail"] == (
        f"{vision.name} (the mmproj file in the model's folder): an image encoder of 3 layers"
    )
    assert used["lane"]["detail"].startswith("native-multimodal")
    other = to_mmproj(folder, {}, tmp_path / "mmproj-other.gguf", "F32", {})
    assert "vision" not in examine(capsys, str(text), loads=False, mmproj="none")[1]
    named = examine(capsys, str(text), loads=False, mmproj=str(other))[1]
    assert "mm.2.weight is missing" in named["model"]["detail"]
    other.rename(vision)
    unused = examine(capsys, str(text), loads=False)[1]["vision"]
    assert unused["verdict"] == "warn" and "is not used: text only" in unused["detail"]
    assert "mm.2.weight is missing" in unused["remedy"]
    vision.with_name("mmproj-tiny-second.gguf").touch()
    several = examine(capsys, str(text), loads=False)[1]["vision"]
    assert several["remedy"] == f"Name one with --mmproj: {vision.name}, mmproj-tiny-second.gguf."


def test_how_prompts_are_computed_is_told_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    conv = {"layer_types": ["conv", "full_attention", "conv"]}
    told = {}
    for name, config in (("Qwen3", {}), ("Mixtral", {"num_local_experts": 4}), ("Lfm2", conv)):
        folder = make_tiny_model(tmp_path / name, f"{name}ForCausalLM", **config)
        code, found = examine(capsys, str(folder), max_num_seqs=4, max_model_len=64)
        assert code == 0
        told[name] = found["prompts"]["detail"]
    mask = "no mask" if HAS_OWN else "a mask for each chunk"
    assert told["Qwen3"] == f"in chunks, {mask}, long texts tokenized streamed; memory: blocks"
    assert mask in told["Mixtral"]
    assert "memory: blocks: packing changes logits by at most " in told["Mixtral"]
    assert "a mask for each chunk" in told["Lfm2"]
    reason = "memory: slot: Lfm2ForCausalLM can use blocks in only 1 of its 3 layers"
    assert told["Lfm2"].endswith(reason)


def test_a_model_with_states_is_told_how_slots_bound_its_streams(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "Qwen3_5ForConditionalGeneration")
    slot_bytes = 2 * 4 * (4 * 16 * 64 + 3 * (2 * 2 * 16 + 4 * 64))  # layers, float32
    flags = {"kv_cache_memory_bytes": 21 * slot_bytes, "max_model_len": 100}
    code, found = examine(capsys, str(folder), **flags)
    assert code == 0
    assert "of them not for text" in found["model"]["detail"]
    per_token, per_sequence = map(int, re.findall(r"\d+", found["cache"]["detail"]))
    assert per_token == 256 and 0 <= per_sequence - slot_bytes < 32 * per_token  # up to a block
    assert "or 5 shorter streams; 5 slots of" in found["streams"]["detail"]
    assert "and 5 more for saved states" in found["streams"]["detail"]


@needs_own_kernels
def test_weights_are_told_as_they_are_held(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, hidden_size=256, intermediate_size=2048)
    found = {
        kind: examine(capsys, str(folder), max_model_len=64, quantize=kind)[1]
        for kind in ("none", "int8", "int4")
    }
    assert "smaller" not in found["int4"]
    smaller = found["none"]["smaller"]["detail"]
    assert re.fullmatch(r".* with --quantize int8, .* with --quantize int4", smaller)
    told = {kind: one["weights"]["detail"] for kind, one in found.items()}
    assert all(
        f"{told[kind].split(chr(44))[0]} with --quantize {kind}" in smaller
        for kind in ("int8", "int4")
    )
    assert told["none"].endswith("MiB, in float32")
    assert told["int8"].endswith("MiB while loading, in int8 and float32")
    assert int(told["int8"].split()[0]) < 0.4 * int(told["none"].split()[0])


def test_a_broken_model_is_a_fault_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    code, found = examine(capsys, str(folder))
    assert code == 1
    assert "truncated" in found["model"]["detail"]


def test_a_state_directory_that_cannot_be_made_is_a_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, found = examine(capsys, state_dir=str(tmp_path / "file" / "state"))
    assert code == 1
    assert found["state"]["verdict"] == "fail" and found["state"]["remedy"]


def test_a_running_server_on_the_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status":"recovering","last_step_age_s":null}')

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _, found = examine(capsys, port=server.server_port)
        server.shutdown()
    assert "'recovering'" in found["port"]["detail"]
    assert found["port"]["verdict"] == "warn" and "another --port" in found["port"]["remedy"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_a_program_on_the_port_of_ipv4_is_in_the_way_of_all_addresses() -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        found = _port(HttpConfig(host="::", port=other.getsockname()[1]))
    assert found.verdict == "fail"
    assert "in use by another program" in found.detail


def test_another_program_on_the_port_is_a_fault_with_its_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert report(capsys, port=port)[0] == (
            f"Something is broken: port: 127.0.0.1:{port} is in use by another program. "
            "Stop that program, or choose another --port."
        )
        assert examine(capsys, port=port)[0] == 1


class DenseLane:
    """A sequence takes 1,000 bytes, and each of its tokens 10."""

    def layout(
        self, free_bytes: int, max_num_seqs: int, max_positions: int, block_size: int
    ) -> MemoryLayout:
        longest = min(max_positions, (free_bytes - 1000) // 10)
        return MemoryLayout(block_size=block_size, num_slots=1, max_positions=longest)


def test_bytes_of_token_and_sequence_come_from_the_lanes_own_layout() -> None:
    per_token, per_sequence = cache_bytes(DenseLane(), 16)  # type: ignore[arg-type]
    assert per_token == 10
    assert 1000 <= per_sequence < 1010


class StateLane:
    """A sequence takes 1,000 bytes, however long it is."""

    def layout(
        self, free_bytes: int, max_num_seqs: int, max_positions: int, block_size: int
    ) -> MemoryLayout:
        num_slots = min(max_num_seqs, free_bytes // 1000)
        return MemoryLayout(block_size, num_slots=num_slots, max_positions=max_positions)


def test_a_model_of_states_alone_takes_nothing_for_a_token() -> None:
    assert cache_bytes(StateLane(), 16) == (0, 1000)  # type: ignore[arg-type]


def test_a_model_that_would_be_downloaded_is_no_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cli.doctor.ask_hub", lambda *_: None)
    code, found = examine(capsys, "someone/model-that-nobody-has")
    assert code == 0
    assert found["model"]["verdict"] == "warn"
    assert "will be downloaded" in found["model"]["remedy"]


def test_no_download_is_promised_without_the_hub(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, found = examine(capsys, "someone/model-that-nobody-has")
    assert code == 0
    assert found["model"]["verdict"] == "warn"
    assert "HF_HUB_OFFLINE" in found["model"]["remedy"]
    assert "will be downloaded" not in found["model"]["remedy"]


def test_a_model_that_the_hub_refuses_is_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ModelError("someone/else is gated.", "download_denied")

    monkeypatch.setattr("headrace.cli.doctor.ask_hub", refuse)
    code, found = examine(capsys, "someone/else")
    assert code == 1
    assert found["model"]["detail"] == "someone/else is gated."


def gguf_files(tmp_path: Path, *kinds: str) -> Path:
    """One model in several files."""
    (tmp_path / "files").mkdir()
    for kind in kinds:
        shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
        folder = make_tiny_model(tmp_path / kind, "LlamaForCausalLM", **shape)
        to_gguf(folder, tmp_path / "files" / f"tiny-{kind}.gguf", kind, eos_token_id=258)
    return tmp_path / "files"


def test_of_several_gguf_files_each_is_told_its_lane_and_the_largest_that_fits_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = gguf_files(tmp_path, "Q4_0", "Q8_0")
    (folder / "tiny-F16.gguf").write_bytes(b"GGUF")
    flags = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 20, "kernels": "plain"}
    code, found = examine(capsys, str(folder), **flags)
    assert code == 0
    each = 2 * 8 * 2 * 16 * 2 * 64  # keys and values, layers, heads, size, bytes, tokens
    told = f"MiB of weights, {(1 << 20) // each} streams of 64 tokens"
    for kind in ("Q4_0", "Q8_0"):
        told_lane = "native-text: Headrace implements this architecture; "
        assert found[kind]["detail"].startswith(told_lane)
        assert found[kind]["detail"].endswith(told) and found[kind]["verdict"] == "ok"
    assert found["F16"]["verdict"] == "warn" and "truncated" in found["F16"]["detail"]
    assert found["model"]["detail"].startswith(f"{folder}:Q4_0 is the largest file that fits")
    monkeypatch.setattr("headrace_engine.runner.probe.free_bytes", lambda device: 1 << 20)
    code, found = examine(capsys, str(folder), **flags)
    assert code == 1 and "no file fits" in found["model"]["detail"]
    for file in folder.iterdir():
        file.write_bytes(b"GGUF")
    code, found = examine(capsys, str(folder), **flags)
    assert code == 1 and "no file can be run" in found["model"]["detail"]


def test_what_fewer_bits_lose_is_measured_on_a_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "tiny", hidden_size=64)
    text = tmp_path / "text.txt"
    text.write_text("The mill race runs beside the wheel. " * 4)
    settings = load({"model": str(folder), "threads": 1, "port": 0}, {}, None)
    if not HAS_OWN:
        pytest.skip("int8 and int4 need kernels of ours")
    assert doctor(settings, str(folder), True, text) == 0
    found = json.loads(capsys.readouterr().out)
    detail = next(each["detail"] for each in found if each["subject"] == "loss")
    number, signed = r"([\d.]+)", r"([+-][\d.]+)"
    form = (
        rf"148 tokens of text.txt: none: perplexity {number}; "
        rf"int8: {number} \({signed} %, {signed} per token\); "
        rf"int4: {number} \({signed} %, {signed} per token\)"
    )
    told = re.fullmatch(form, detail)
    assert told, detail
    plain, int8, int4 = (float(told[group]) for group in (1, 2, 5))
    assert plain == pytest.approx(reference_perplexity(folder, text.read_text()), rel=1e-3)
    assert 0 < abs(int8 / plain - 1) < 0.1 and abs(int4 / plain - 1) > abs(int8 / plain - 1)


def reference_perplexity(folder: Path, text: str) -> float:
    """By transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([list(Tokenizer.load(folder).encode(text, True))])
    with torch.inference_mode():
        return float(model(ids, labels=ids).loss.exp())


def test_models_that_are_no_plain_generators_are_told_in_their_own_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("bert", "t5", "seeing"):
        (tmp_path / name).mkdir()
    encoder = examine(capsys, str(make_tiny_encoder(tmp_path / "bert")))[1]
    assert "template" not in encoder and "streams" not in encoder
    assert encoder["tasks"]["detail"].startswith("embed;")
    assert encoder["cache"]["detail"].startswith("none")
    assert encoder["inputs"]["detail"].endswith("of up to 128 tokens per step")
    assert {finding["verdict"] for finding in encoder.values()} <= {"ok", "warn"}
    source = examine(capsys, str(make_tiny_seq2seq(tmp_path / "t5")))[1]
    assert source["prompts"]["detail"].startswith("source encoded layer by layer, 16 tokens")
    seeing = examine(capsys, str(make_tiny_image_model(tmp_path / "seeing", "Qwen3.5")))[1]
    assert seeing["lane"]["detail"].startswith("native-multimodal on cpu")
    assert "images encoded a few layers" in seeing["prompts"]["detail"]


@pytest.fixture
def no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every load of a model and every check of a kernel fail."""

    def fail(*_: object) -> None:
        raise AssertionError("doctor without --load must not do this")

    monkeypatch.setattr("headrace_engine.runner.load.load_runner", fail)
    monkeypatch.setattr("headrace_kernels.choose._fault", fail)


@pytest.mark.usefixtures("no_load")
def test_without_load_a_model_is_described_from_its_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    (tmp_path / "bert").mkdir()
    flags = {"max_model_len": 512, "kv_cache_memory_bytes": 1 << 20}
    code, found = examine(capsys, str(folder), loads=False, **flags)
    assert code == 0
    assert found["lane"]["detail"].startswith("native-text on cpu in float32")
    assert found["weights"]["detail"].endswith("in float32")
    each = 3 * 2 * 2 * 16 * 4 * 512  # layers, keys and values, heads, size, float32, tokens
    detail = f"about {(1 << 20) // each} streams of 512 tokens each fit; --load measures it"
    assert found["streams"]["detail"] == detail
    assert found["template"]["verdict"] == "ok" and "cache" not in found
    groups = [found[subject]["group"] for subject in ("libraries", "port", "lane")]
    assert groups == ["machine", "server", "tiny"]
    encoder = examine(capsys, str(make_tiny_encoder(tmp_path / "bert")), loads=False)[1]
    assert "generates no text" in encoder["tasks"]["detail"] and "template" not in encoder


@pytest.mark.usefixtures("no_load")
def test_the_format_of_a_gguf_file_is_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = gguf_files(tmp_path, "Q4_0")
    found = examine(capsys, str(folder / "tiny-Q4_0.gguf"), loads=False)[1]
    assert re.search(r"in 1 file, \d+ MiB in Q4_0", found["model"]["detail"])
    if HAS_OWN:
        assert "in the file's own format and bfloat16" in found["weights"]["detail"]


def report(
    capsys: pytest.CaptureFixture[str], model: str | None = None, **flags: object
) -> list[str]:
    given = {"port": 0, "threads": 1, **flags} | ({"model": model} if model else {})
    capsys.readouterr()
    doctor(load(given, {}, None), model, as_json=False)
    return capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("no_load")
def test_the_verdict_comes_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert report(capsys)[:3] == ["This machine can serve.", "", "Machine"]
    folder = make_tiny_model(tmp_path / "tiny")
    said = report(capsys, str(folder))
    assert re.fullmatch(
        r"This machine can serve tiny, with \d+ MiB of weights in memory\.", said[0]
    )
    assert "Server" in said and "tiny" in said
    missing = report(capsys, "someone/model-that-nobody-has")[0]
    assert missing == (
        "This machine can serve. someone/model-that-nobody-has has not been downloaded, so whether "
        "it fits is unknown."
    )
    os.truncate(folder / "model.safetensors", 100)
    broken = report(capsys, str(folder))[0]
    assert broken.startswith("Something is broken: model: ") and "truncated" in broken


def test_the_catalog_says_whether_a_model_fits_before_its_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("headrace.cli.doctor.installed_bytes", lambda: 8_000_000_000)
    (small,) = _model(ModelConfig(model="qwen3-4b"), None, loads=False)
    assert small.detail == (
        "qwen3-4b has not been downloaded; it needs about 4.1 GB of memory, and fits into 6.0 GB, "
        "three quarters of this machine's memory"
    )
    (large,) = _model(ModelConfig(model="qwen3-8b"), None, loads=False)
    assert "needs about 7.0 GB of memory, and does not fit into 6.0 GB" in large.detail
    assert verdict([large]) == f"This machine can serve. {large.detail}."
