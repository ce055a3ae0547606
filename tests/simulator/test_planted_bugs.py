"""Tests that the simulator finds bugs that are planted one at a time."""

from collections.abc import Callable

import msgspec
import pytest

from headrace.generation.submission import salt_of
from headrace_engine.memory.blocks import BlockPool
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.memory.memory import NO_MATCH, Match, Memory
from headrace_engine.memory.prefix import NameChain
from headrace_engine.memory.slots import SlotPool
from headrace_engine.scheduler.commit import InFlight
from headrace_engine.scheduler.plan import Planner
from headrace_engine.scheduler.restores import Read, Restores
from headrace_engine.scheduler.sequence import Sequence, by_key
from headrace_engine.scheduler.step import PlannedStep
from headrace_engine.scheduler.table import Quarantine, SequenceTable, WaitingQueues
from stress.simulator.fake_disk import FakeDisk
from stress.simulator.simulation import Violation, run_seed

MAX_SEEDS = 400
Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, Plant] = {}


def plant(function: Plant) -> Plant:
    PLANTS[function.__name__] = function
    return function


@plant
def a_block_is_public_before_it_is_full(patch: pytest.MonkeyPatch) -> None:
    publish = Memory.publish

    def early(self, lease, token_ids, chain, num_computed):
        size = self.layout.block_size
        most = min(len(token_ids), len(lease.block_ids) * size)
        publish(self, lease, token_ids, chain, min(num_computed + size - 1, most))

    patch.setattr(Memory, "publish", early)


@plant
def one_client_has_every_turn(patch: pytest.MonkeyPatch) -> None:
    def in_order(self, without=()):
        everybody = [s for line in self._queues.values() for s in line if s not in without]
        return iter(sorted(everybody, key=by_key))

    patch.setattr(WaitingQueues, "in_order", in_order)


@plant
def wrong_guesses_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    commit = InFlight._commit_guess

    def all_right(self, sequence, chunk, drawn):
        sequence.num_planned += len(chunk.guess) - max(0, len(drawn.token_ids) - 1)
        commit(self, sequence, chunk, drawn)
        return len(chunk.guess)

    patch.setattr(InFlight, "_commit_guess", all_right)


@plant
def something_is_planned_behind_a_guess(patch: pytest.MonkeyPatch) -> None:
    def counted(self):
        if self.num_pending and self.num_known >= self.max_total:
            return 0
        return self.num_known - self.num_planned

    patch.setattr(Sequence, "remaining", property(counted))


@plant
def a_state_keeps_what_was_guessed_wrong(patch: pytest.MonkeyPatch) -> None:
    commit = InFlight._commit_guess

    def not_back(self, sequence, chunk, drawn):
        num_right = commit(self, sequence, chunk, drawn)
        sequence.num_to_recompute = 0
        return num_right

    patch.setattr(InFlight, "_commit_guess", not_back)


@plant
def a_guess_takes_the_last_block(patch: pytest.MonkeyPatch) -> None:
    stretch = Memory.stretch

    def greedy(self, lease, num_positions, num_spare):
        return stretch(self, lease, num_positions, 0)

    patch.setattr(Memory, "stretch", greedy)


@plant
def siblings_get_no_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlannedStep, "copy", lambda self, block_copy, slot_copy: None)


@plant
def a_snapshot_is_not_restored(patch: pytest.MonkeyPatch) -> None:
    begin = PlannedStep.begin
    patch.setattr(PlannedStep, "begin", lambda self, sequence, restore=None: begin(self, sequence))


@plant
def a_shared_block_is_freed_with_its_first_holder(patch: pytest.MonkeyPatch) -> None:
    def release(self, block_ids):
        for block_id in block_ids:
            self._num_holders[block_id] = 0
            if block_id in self.index:
                self._unheld[block_id] = None
            else:
                self._free.append(block_id)

    patch.setattr(BlockPool, "release", release)


@plant
def a_slot_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotPool, "release", lambda self, slot_id: None)


@plant
def salts_are_ignored(patch: pytest.MonkeyPatch) -> None:
    chain = Memory.chain
    patch.setattr(Memory, "chain", lambda self, salt, marks=(): chain(self, "", marks))


@plant
def blocks_are_named_without_their_prefix(patch: pytest.MonkeyPatch) -> None:
    name = NameChain.name

    def rootless(self, token_ids, index):
        chain = NameChain(self._block_size, "")
        return name(chain, token_ids[index * self._block_size :], 0)

    patch.setattr(NameChain, "name", rootless)


@plant
def credit_covers_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    match = Memory.match

    def greedy(self, token_ids, chain):
        return match(self, token_ids + token_ids[-1:], chain) if token_ids else NO_MATCH

    patch.setattr(Memory, "match", greedy)


@plant
def blocks_that_others_took_are_kept_on_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Memory, "still_holds", lambda self, block_ids, take_counts: True)


@plant
def a_run_is_loaded_from_its_first_block_on(patch: pytest.MonkeyPatch) -> None:
    loaded = Read.loaded

    def shifted(self, sequence, block_size):
        run = loaded(self, sequence, block_size)
        return msgspec.structs.replace(run, num_blocks=run.num_blocks, skip=0)

    patch.setattr(Read, "loaded", shifted)


@plant
def a_late_run_is_loaded_where_the_prompt_stands_now(patch: pytest.MonkeyPatch) -> None:
    at = Restores.at

    def stale(self, sequence, context, now):
        restore = self._restores.get(sequence.id)
        if restore is not None and context % self.disk.block_size == 0:
            for read in restore.reads:
                read.start, read.end = context, max(context + 1, read.end)
        return at(self, sequence, context, now)

    patch.setattr(Restores, "at", stale)


@plant
def salts_are_ignored_on_disk(patch: pytest.MonkeyPatch) -> None:
    find, name = DiskPrefixes.find, NameChain.name

    def unsalted(self, token_ids, index):
        return name(NameChain(self._block_size, salt_of("", "", None)), token_ids, index)

    def without(self, token_ids, chain, block):
        with pytest.MonkeyPatch.context() as within:
            within.setattr(NameChain, "name", unsalted)
            return find(self, token_ids, chain, block)

    patch.setattr(DiskPrefixes, "find", without)
    patch.setattr(FakeDisk, "is_wanted", lambda self, run, wish: run is not None)


@plant
def the_oldest_is_preempted(patch: pytest.MonkeyPatch) -> None:
    preempt = SequenceTable.preempt
    patch.setattr(SequenceTable, "preempt", lambda self, sequence: preempt(self, self.running[0]))


@plant
def a_cancel_frees_memory_that_launched_plans_name(patch: pytest.MonkeyPatch) -> None:
    end = SequenceTable.end

    def at_once(self, sequence, finish, message=""):
        sequence.num_in_flight = 0
        end(self, sequence, finish, message)

    patch.setattr(SequenceTable, "end", at_once)


@plant
def a_preempted_sequence_starts_aloud_again(patch: pytest.MonkeyPatch) -> None:
    rewind = Sequence.rewind

    def forgetful(self):
        rewind(self)
        self.num_reported = -1

    patch.setattr(Sequence, "rewind", forgetful)


@plant
def a_preempted_sequence_keeps_what_was_pending(patch: pytest.MonkeyPatch) -> None:
    rewind = Sequence.rewind

    def careless(self):
        pending = self.num_pending
        rewind(self)
        self.num_pending = pending

    patch.setattr(Sequence, "rewind", careless)


@plant
def a_sequence_past_its_due_is_passed_by(patch: pytest.MonkeyPatch) -> None:
    def may_start(self, step, sequence, match):
        return self._fits(sequence, match)

    patch.setattr(Planner, "_may_start", may_start)


@plant
def the_last_decoder_sits_a_step_out(patch: pytest.MonkeyPatch) -> None:
    add = PlannedStep.add_decode_chunks
    patch.setattr(
        PlannedStep, "add_decode_chunks", lambda self, sequences: add(self, sequences[:2])
    )


@plant
def all_of_a_failed_step_are_blamed(patch: pytest.MonkeyPatch) -> None:
    suspect = InFlight.suspect

    def blaming(self, plan, message):
        suspect(self, plan, message)
        for chunk in plan.chunks:
            if (sequence := self._table.living(chunk.sequence_id)) is not None:
                self._table.end(sequence, "error", message)

    patch.setattr(InFlight, "suspect", blaming)


@plant
def suspects_are_never_cleared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Quarantine, "step_was_good", lambda self: None)


@plant
def progress_is_told_twice(patch: pytest.MonkeyPatch) -> None:
    report = InFlight._report

    def repeating(self, sequence, start, result):
        sequence.num_reported = min(sequence.num_reported, start)
        report(self, sequence, start, result)

    patch.setattr(InFlight, "_report", repeating)


@plant
def an_evicted_block_can_still_be_found(patch: pytest.MonkeyPatch) -> None:
    def take(self):
        if self._free:
            block_id = self._free.pop()
        else:
            block_id = next(iter(self._unheld))
            del self._unheld[block_id]
        self._num_holders[block_id] = 1
        return block_id

    patch.setattr(BlockPool, "take", take)


@plant
def a_match_takes_blocks_without_their_state(patch: pytest.MonkeyPatch) -> None:
    def stateless(self, found, token_ids, chain):
        return Match(found, len(found) * self.layout.block_size)

    patch.setattr(Memory, "_match_state", stateless)


@plant
def tokens_do_not_wait_for_their_work(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "next_encoding", lambda self, num_cached: None)


@plant
def a_preempted_sequence_counts_as_encoded(patch: pytest.MonkeyPatch) -> None:
    rewind = Sequence.rewind

    def keeping(self):
        num_units = self.num_units_planned
        rewind(self)
        self.num_units_planned = num_units

    patch.setattr(Sequence, "rewind", keeping)
    patch.setattr(Sequence, "start_at", lambda self, n: setattr(self, "num_planned", n))


@plant
def spans_are_broken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "span_around", lambda self, position: None)


@plant
def an_encoder_that_cannot_be_cut_runs_beside_streams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlannedStep, "is_empty", property(lambda self: not self.encoded))


@plant
def streams_sit_out_one_such_step_after_the_other(patch: pytest.MonkeyPatch) -> None:
    plan = Planner.plan

    def greedy(self, now, can_preempt):
        candidates = [*self._table.waiting, *self._table.running]
        wanting = (s for s in candidates if s.next_encoding(s.num_planned) is not None)
        self._promised, self._was_exclusive = self._promised or next(wanting, None), False
        return plan(self, now, can_preempt)

    patch.setattr(Planner, "plan", greedy)


@plant
def a_line_of_a_batch_is_in_a_step_of_streams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlannedStep, "is_for", lambda step, sequence: True)


@plant
def images_do_not_count_in_the_names_of_blocks(patch: pytest.MonkeyPatch) -> None:
    chain = Memory.chain
    patch.setattr(Memory, "chain", lambda self, salt, marks=(): chain(self, salt))


def first_violation() -> str:
    for seed in range(MAX_SEEDS):
        try:
            run_seed(seed)
        except Violation as violation:
            return str(violation)
    return ""


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    assert first_violation(), f"{MAX_SEEDS} schedules did not notice that {name.replace('_', ' ')}"
