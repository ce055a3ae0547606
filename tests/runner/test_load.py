import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace

from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import ModelConfig, SchedulerConfig
from headrace_common.errors import ModelError
from headrace_common.loading import CHECKING, COMPILING, ON_LOADING
from headrace_common.messages import Loading, Ready
from headrace_engine.runner import load, room
from headrace_engine.runner.footprint import footprint
from headrace_engine.runner.load import load_runner, plan_load
from headrace_kernels import ON_COMPILE
from tests.kernels.own_kernels import compiled_kernels, forbid_kernels, needs_own_kernels
from tools.harness.drive import generate, random_prompt
from tools.harness.tiny_models import make_tiny_image_model, make_tiny_model

POSITION = 3 * 2 * 16 * 2 * 4  # bytes: layers, kv heads, head size, keys and values, float32


def ready(folder: Path, **config: Any) -> Ready:
    return load_runner(ModelConfig(**({"device": "cpu", "threads": 1} | config)), folder)[1]


def refusal(folder: Path, **config: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        ready(folder, **config)
    return caught.value


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """Makes the machine have so many free bytes."""
    return lambda num: monkeypatch.setattr(load, "free_bytes", lambda _: num)


def test_ready_describes_the_model_and_its_limits(folder: Path) -> None:
    told = ready(folder)
    assert (told.lane, told.device, told.dtype) == ("native-text", "cpu", "float32")
    assert (told.vocab_size, told.max_model_len, told.max_num_seqs) == (320, 2048, 64)
    assert told.weight_bytes == 4 * told.num_parameters and len(told.fingerprint) == 12
    assert told.layout.max_positions == 2048


def test_a_lane_with_slots_runs_no_more_sequences_than_it_has_of_them(
    folder: Path, free, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "_supports_attention_backend", False)
    free(4 * 3 * 2048 * POSITION)
    told = ready(folder, lane="generic-text")
    assert told.max_num_seqs == told.layout.num_slots < 64


def test_the_config_can_lower_the_length_and_never_raise_it(folder: Path) -> None:
    assert ready(folder, max_model_len=100).max_model_len == 100
    assert ready(folder, max_model_len=5000).max_model_len == 2048


def test_memory_given_in_bytes_is_what_the_pool_takes(folder: Path) -> None:
    told = ready(folder, kv_cache_memory_bytes=40 * 32 * POSITION)
    assert (told.layout.num_blocks, told.max_model_len) == (40, 1280)


def test_block_size_is_the_configs(folder: Path) -> None:
    told = ready(folder, block_size=16, max_model_len=64, scheduler=SchedulerConfig(max_num_seqs=3))
    assert (told.layout.block_size, told.layout.num_blocks) == (16, 12)


def test_by_default_the_cache_takes_a_quarter_of_what_is_free(folder: Path, free) -> None:
    free(4 * 50 * 32 * POSITION)
    assert ready(folder).layout.num_blocks == 50


def test_type_follows_the_checkpoint_unless_told(tmp_path: Path) -> None:
    stored = make_tiny_model(tmp_path / "tiny", dtype=torch.bfloat16)
    assert ready(stored, max_model_len=64).dtype == "bfloat16"
    assert ready(stored, max_model_len=64, dtype="float32").dtype == "float32"


def test_float16_is_computed_in_float32(tmp_path: Path) -> None:
    stored = make_tiny_model(tmp_path / "tiny", dtype=torch.float16)
    assert ready(stored, max_model_len=64).dtype == "float32"


def test_weights_that_do_not_fit_are_refused_with_both_sizes(folder: Path, free) -> None:
    free(100 << 10)
    error = refusal(folder)
    assert error.code == "model_too_large"
    assert "0 MiB are free" in str(error) and "--dtype bfloat16" in str(error)


@needs_own_kernels
def test_a_model_that_fits_in_int8_alone_is_told_so_and_then_taken(tmp_path: Path, free) -> None:
    folder = make_tiny_model(tmp_path, hidden_size=128, intermediate_size=512, dtype=torch.bfloat16)
    spec = read_spec(folder)
    wide, narrow = (footprint(spec, torch.bfloat16, "avx512", kind) for kind in ("none", "int8"))
    assert narrow.peak < wide.held
    free((narrow.peak + wide.held) // 2)
    assert "--quantize int8" in str(refusal(folder, max_model_len=64))
    ready(folder, max_model_len=64, quantize="int8", kv_cache_memory_bytes=64 * POSITION)


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_sizes(folder: Path) -> None:
    error = refusal(folder, kv_cache_memory_bytes=992 * POSITION)
    assert error.code == "model_too_large"
    assert "992 tokens" in str(error) and "1024 tokens must fit" in str(error)
    assert "--kv-cache-memory-bytes" in str(error)


def test_a_cache_larger_than_what_is_free_is_refused_with_both_sizes(folder: Path, free) -> None:
    free(64 << 20)
    error = refusal(folder, kv_cache_memory_bytes=65 << 20)
    assert error.code == "model_too_large"
    assert "asks for 65 MiB besides 0 MiB of weights" in str(error)
    assert "64 MiB are free; set it to at most 63 MiB" in str(error)


def test_a_model_that_leaves_no_room_for_one_sequence_is_refused_before_it_is_read(
    folder: Path, free, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = footprint(read_spec(folder), torch.float32, "avx512", "none")
    monkeypatch.setattr(load, "watch_memory", None)  # would be a TypeError
    free(weights.peak + 1000)
    error = refusal(folder)
    assert error.code == "model_too_large"
    assert "to cache one sequence" in str(error) and "Close other programs" in str(error)


def test_a_model_fits_only_if_its_vision_side_fits(tmp_path: Path, free) -> None:
    folder = make_tiny_image_model(tmp_path, "Qwen3.5")
    config = ModelConfig(device="cpu", dtype="float32", max_model_len=64)
    held = plan_load(config, folder, checks_kernels=False).weights.held
    text = plan_load(replace(config, lane="native-text"), folder, False).weights.held
    free((text + held) // 2)
    with pytest.raises(ModelError, match=r"The weights of .* take") as refused:
        plan_load(config, folder, checks_kernels=False)
    assert refused.value.code == "model_too_large"


def test_a_load_beside_a_program_that_takes_the_memory_is_given_up_in_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([1 << 30, *[(1 << 30) - (it << 28) for it in range(9)]])
    monkeypatch.setattr(room, "_CHECK_S", 0.0)
    monkeypatch.setattr(room, "free_bytes", lambda device: next(left))
    error = refusal(folder)
    assert error.code == "model_too_large"
    assert "0 MiB are free" in str(error) and "51 MiB must stay free" in str(error)


def test_a_short_model_need_only_fit_itself(folder: Path) -> None:
    assert ready(folder, kv_cache_memory_bytes=64 * POSITION, max_model_len=64).max_model_len == 64


def test_a_gpu_runs_more_sequences_so_a_step_takes_more_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_device", lambda config: torch.device(config.device))
    monkeypatch.setattr(load, "free_bytes", lambda device: 1 << 30)
    texts = (
        str(refusal(folder, device=it, kv_cache_memory_bytes=1 << 40)) for it in ("cpu", "cuda")
    )
    steps = [int(re.findall(r"(\d+) MiB for a step", text)[0]) for text in texts]
    assert steps == [0, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_refused_with_the_remedy(folder: Path) -> None:
    assert "--device cpu" in str(refusal(folder, device="cuda"))


def test_the_number_of_threads_is_the_configs(folder: Path) -> None:
    ready(folder, threads=2, max_model_len=64)
    assert torch.get_num_threads() == 2
    ready(folder, threads=1, max_model_len=64)
    assert torch.get_num_threads() == 1


def test_loading_leaves_torchs_generator_alone(folder: Path) -> None:
    state = torch.random.get_rng_state()
    ready(folder, max_model_len=64)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_model_without_a_stated_limit_gets_one(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "MambaForCausalLM", state_size=8)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 2048,', ""))
    assert ready(folder, scheduler=SchedulerConfig(max_num_seqs=2)).max_model_len == 4096


@needs_own_kernels
def test_no_kernel_is_left_to_compile_in_a_request(tmp_path: Path) -> None:
    runner, _ = load_runner(ModelConfig(model="tiny", threads=1), make_tiny_model(tmp_path))
    at_load = compiled_kernels()
    assert at_load
    generate(runner, list(range(1, 300)), 3, chunk=192)
    assert compiled_kernels() == at_load


@needs_own_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_compiles_no_kernel_and_says_what_the_others_say(
    dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompt = make_tiny_model(tmp_path, initializer_range=0.1), random_prompt(60)
    config = {"model": "tiny", "device": "cpu", "dtype": dtype, "threads": 1, "max_model_len": 128}
    runner, ready = load_runner(ModelConfig(**config), folder)
    expected = generate(runner, prompt, 4)

    forbid_kernels(monkeypatch)
    runner, told = load_runner(ModelConfig(**config, kernels="plain"), folder)
    assert (told.kernels, told.kernels_reason) == ("plain", "as asked")
    assert told.fingerprint != ready.fingerprint
    assert generate(runner, prompt, 4) == expected


def test_another_lane_is_plain_and_refuses_the_rest(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    config = {"model": "tiny", "device": "cpu", "lane": "generic-text", "threads": 1}
    assert load_runner(ModelConfig(**config), folder)[1].kernels == "plain"
    with pytest.raises(ModelError, match="--kernels avx512 needs a native lane on a CPU"):
        load_runner(ModelConfig(**config, kernels="avx512"), folder)


def test_instructions_that_cannot_compute_a_type_are_refused_with_those_that_can(
    folder: Path,
) -> None:
    error = refusal(folder, dtype="float32", kernels="bf16dot", max_model_len=64)
    assert "--kernels bf16dot cannot compute float32" in str(error) and "plain." in str(error)


@needs_own_kernels
def test_who_loads_hears_how_many_kernels_are_compiled(folder: Path) -> None:
    told: list[Loading] = []
    token = ON_LOADING.set(told.append)
    ready(folder, max_model_len=64)
    ON_COMPILE.get()(3, 8)
    ON_COMPILE.get()(8, 8)
    ON_LOADING.reset(token)
    *_, compiling, after = told
    assert compiling == Loading(3 / 8, COMPILING, "(3 of 8), once for this processor")
    assert after.stage == CHECKING


_LOAD = """
import gc, sys
from pathlib import Path
from numba.core.dispatcher import Dispatcher
from headrace_common.config.settings import ModelConfig
from headrace_engine.runner.load import load_runner
config = ModelConfig(device="cpu", threads=1, max_model_len=64, dtype="bfloat16")
load_runner(config, Path(sys.argv[1]))
"""
_HEAVY = (
    _LOAD
    + """
print([it for it in ("transformers", "sympy", "httpx") if it in sys.modules])
"""
)
_COMPILED = (
    _LOAD
    + """
functions = [it for it in gc.get_objects() if issubclass(type(it), Dispatcher)]
print([it.__qualname__ for it in functions if it.overloads], len(functions) > 20)
"""
)


def printed(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_native_model_is_loaded_without_what_takes_a_second_to_import(folder: Path) -> None:
    assert printed(_HEAVY, folder) == "[]"


@needs_own_kernels
def test_a_process_that_loads_compiles_nothing_itself(folder: Path) -> None:
    assert printed(_COMPILED, folder) == "[] True"


def test_a_lane_without_an_int8_cache_says_what_would_do(folder: Path) -> None:
    error = refusal(folder, lane="generic-text", kv_cache_dtype="int8")
    remedy = "needs a native lane on a CPU, not generic-text on cpu. Use --kv-cache-dtype auto."
    assert remedy in str(error)


def test_an_int8_cache_holds_more_tokens_and_has_a_fingerprint_of_its_own(folder: Path) -> None:
    room = 64 * POSITION
    exact = ready(folder, max_model_len=64, kv_cache_memory_bytes=room)
    rounded = ready(folder, max_model_len=64, kv_cache_memory_bytes=room, kv_cache_dtype="int8")
    # In float32, 16 numbers take 64 bytes; in int8 they take 16 bytes, and their scale takes 4.
    assert exact.layout.num_blocks * 32 == 64
    assert rounded.layout.num_blocks == 64 * 64 // 20 // 32
    assert (exact.kv_cache_dtype, rounded.kv_cache_dtype) == ("auto", "int8")
    assert exact.fingerprint != rounded.fingerprint
