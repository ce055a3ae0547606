"""From a model's configuration to a runner and a scheduler; the one place that joins them."""

from pathlib import Path

from headrace.core.config import ModelConfig
from headrace.core.messages import Ready
from headrace.runner.load import load_runner
from headrace.runner.runner import Runner
from headrace.scheduler.limits import Limits
from headrace.scheduler.scheduler import Scheduler

_MAX_STEP_TOKENS = {"cpu": 512, "cuda": 2048}


def load(config: ModelConfig) -> tuple[Runner, Scheduler, Ready]:
    """Loads the folder that `config.model` names; ModelError if it cannot be served."""
    runner, ready = load_runner(config, Path(config.model))
    cap = config.scheduler.max_step_tokens or _MAX_STEP_TOKENS[ready.device]
    limits = Limits(
        max_num_seqs=ready.max_num_seqs, max_step_tokens=cap, max_model_len=ready.max_model_len
    )
    return runner, Scheduler(config.scheduler, ready.layout, limits), ready
