"""Turns a model's configuration into a runner and a scheduler; the one place that joins them."""

from pathlib import Path

import msgspec

from headrace.core.config import ModelConfig
from headrace.core.messages import Ready
from headrace.runner.load import load_runner
from headrace.runner.runner import Runner
from headrace.runner.trial import timed_steps
from headrace.scheduler.budget import resolve
from headrace.scheduler.scheduler import Scheduler


def load(config: ModelConfig) -> tuple[Runner, Scheduler, Ready]:
    """Loads and times the model that `config` names; ModelError if it cannot be served."""
    runner, ready = load_runner(config, Path(config.model))
    layout = ready.layout
    limits = resolve(
        config.scheduler, layout, ready.device, ready.max_num_seqs, ready.max_model_len
    )
    ready = msgspec.structs.replace(
        ready, max_step_tokens=limits.max_step_tokens, max_stall_s=limits.max_stall_s
    )
    scheduler = Scheduler(config.scheduler, layout, limits)
    for chunk, seconds in timed_steps(runner, layout):
        scheduler.observe((chunk,), seconds)
    return runner, scheduler, ready
