"""Builds an engine and all of its parts from a model's configuration."""

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace_common.checkpoints.adapters import name_adapter
from headrace_common.checkpoints.spec import read_spec
from headrace_common.config.settings import ModelConfig, SchedulerConfig
from headrace_common.errors import ModelError
from headrace_common.grammar import GrammarCompiler, GrammarError
from headrace_common.messages import Ready
from headrace_common.system.awake import ProcessStops
from headrace_common.system.core_lock import CoreLock
from headrace_engine.adapters import AdapterLoader
from headrace_engine.disk_prefixes import disk_part
from headrace_engine.engine import Engine, Outbox, StepWriter
from headrace_engine.grammars import Grammars
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.prefixes.keeper import PrefixKeeper
from headrace_engine.runner.load import load_lane, warm
from headrace_engine.runner.runner import Runner
from headrace_engine.runner.trial import timed_drafts, timed_encoding, timed_steps
from headrace_engine.scheduler.budget import MAX_GUESS, MOST_DEFAULT_S, resolve
from headrace_engine.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """Holds the parts of an engine, and the Ready message to send first."""

    runner: Runner
    scheduler: Scheduler
    ready: Ready
    grammars: Grammars
    prefixes: PrefixKeeper | None
    adapters: AdapterLoader

    def engine(
        self,
        outbox: Outbox,
        step_record: StepWriter | None = None,
        core_lock: CoreLock | None = None,
    ) -> Engine:
        """Build the engine from these parts; the arguments are the parts of its process."""
        return Engine(
            self.scheduler,
            self.runner,
            outbox,
            step_record,
            self.grammars,
            self.adapters,
            self.prefixes,
            core_lock,
        )


def load(config: ModelConfig) -> Loaded:
    """Load the model that `config` names, and time a few steps.

    Raise ModelError if the model cannot be served. The order of the calls follows from the
    constructors, because each constructor takes the parts that it needs.
    """
    folder = Path(config.model)
    lane, head, ready, drafter = load_lane(config, folder)
    num_guessed = max_guess(config.scheduler, ready)
    grammars = Grammars(_compiler(folder))
    runner = Runner(lane, head, grammars.constrain, num_guessed > 0, drafter)
    warm(runner, ready.layout)
    disk = disk_part(config.prefix_cache, config.model, runner, ready)
    known = None if disk is None else disk.known
    scheduler, ready = schedule(config.scheduler, runner, ready, num_guessed, known)
    prefixes = None if disk is None else disk.keeper(scheduler.memory)
    adapters = AdapterLoader(runner)
    for named in config.adapter:
        name, _, path = named.partition("=")
        adapters.load(name_adapter(name, Path(path), read_spec(folder).architecture))
    return Loaded(runner, scheduler, ready, grammars, prefixes, adapters)


def schedule(
    config: SchedulerConfig,
    runner: Runner,
    ready: Ready,
    num_guessed: int = 0,
    disk: DiskPrefixes | None = None,
) -> tuple[Scheduler, Ready]:
    """Return a scheduler that has learned from timed steps, and Ready with the scheduler's limits.

    `num_guessed` is the maximum number of guessed tokens in a chunk.
    """
    layout = ready.layout
    limits = resolve(config, layout, ready.device, ready.max_num_seqs, ready.max_model_len)
    if ready.is_whole:
        limits = msgspec.structs.replace(limits, is_whole=True, forward_per_chunk=False)
    limits = msgspec.structs.replace(
        limits,
        source=ready.source,
        max_guess=num_guessed,
        max_draft=ready.draft.max_positions if ready.draft and num_guessed else 0,
    )
    ready = msgspec.structs.replace(
        ready,
        max_step_tokens=limits.max_step_tokens,
        max_stall_s=limits.max_stall_s,
        highest_stall_s=MOST_DEFAULT_S if limits.is_default else limits.max_stall_s,
    )
    scheduler = Scheduler(config, layout, limits, disk)
    with ProcessStops() as stops:
        for chunk, seconds in timed_steps(runner, layout):
            if not stops.take():
                scheduler.observe((chunk,), seconds)
        for timed in timed_drafts(runner, layout) if ready.draft else ():
            if not stops.take():
                scheduler.observe_draft(*timed)
        for work, piece, seconds in timed_encoding(runner, layout):
            if not stops.take():
                scheduler.observe_encoding(work, piece, seconds)
    return scheduler, ready


def max_guess(config: SchedulerConfig, ready: Ready) -> int:
    """Return the maximum number of guessed tokens in a chunk; 0 if guesses could change the text.

    Raise ModelError if the configuration asks for guesses that are not possible.
    """
    # The user did not ask for the MTP layer, a default draft, so it causes no error if unused.
    has_draft = ready.draft is not None and not ready.draft.is_own
    if config.guess == "off" or "generate" not in ready.tasks:
        if has_draft:
            raise ModelError(
                "--draft has no effect, because guessing is off or the model generates no text. "
                "Use --guess auto, or omit --draft."
            )
        return 0
    reason = ""
    if ready.kernels == "plain" or (ready.dtype == "float32" and ready.quantize == "none"):
        reason = "torch rounds differently when it processes several tokens together"
    elif ready.layout.num_slots and ready.layout.num_snapshots < 2:
        reason = "no memory is left for the saved states that a wrong guess requires"
    if reason and has_draft:
        raise ModelError(f"--draft is not possible: {reason}. Omit --draft.")
    if reason and config.guess != "auto":
        raise ModelError(
            f"--guess {config.guess} is not possible: {reason}. Use --guess auto or --guess off."
        )
    if reason:
        logger.info("Speculative decoding (--guess) is off: %s.", reason)
        return 0
    return MAX_GUESS if config.guess == "auto" else config.guess


def _compiler(folder: Path) -> GrammarCompiler | None:
    """Return the grammar compiler, or None if the tokenizer does not support grammars.

    Without a compiler, requests with a grammar are refused.
    """
    spec = read_spec(folder)
    try:
        return GrammarCompiler.load(folder, spec.vocab_size, spec.end_token_ids)
    except (GrammarError, ModelError) as error:
        logger.info("Requests with a grammar or schema are refused for this model: %s", error)
        return None
