"""Requests to several engines of one model: which wait, and which runs where. Knows no engine."""

import itertools
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from headrace.fleet.placement import PartId, Placement, ReplicaId, Want, prefix_names
from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import Cancel, Finished, Status, Submit

PRIORITY_LEVEL_S = 10.0  # what one level is worth, as in an engine's own queue
Cancels = dict[ReplicaId, Cancel]


class RequestLine:
    """The parts of requests, by prompt: tell it what happens, then send what `placed` yields.

    A prompt's choices stay together, since they share it; prompts may part.
    """

    def __init__(self) -> None:
        self.placement = Placement()
        self._new_ids = itertools.count()
        self._parts: dict[PartId, Submit] = {}  # with the sequences that have not ended
        self._part_of: dict[SequenceId, PartId] = {}

    def ask(self, submit: Submit, layout: MemoryLayout) -> None:
        """Puts a request in line; its needs are counted in blocks of this layout."""
        for part in _by_prompt(submit):
            id = next(self._new_ids)
            self._parts[id] = part
            self._part_of |= {new.sequence_id: id for new in part.sequences}
            self.placement.ask(id, _want(part, layout))

    def placed(self) -> Iterator[tuple[ReplicaId, Submit]]:
        """The parts whose turn has come, and the replica that each is for."""
        for it in iter(self.placement.next, None):
            yield it.replica, self._parts[it.part]

    def status(self) -> Status:
        """The figures of those in line, first one first."""
        line = [self._parts[id] for id in self.placement.waiting()]
        num_tokens = sum(len(part.prompts[0]) // 4 for part in line)
        heads = tuple(part.sequences[0].sequence_id for part in line)
        return Status(0, sum(len(it.sequences) for it in line), num_tokens, 0, 0, 0, queue=heads)

    def cancel(self, cancel: Cancel) -> tuple[tuple[Finished, ...], Cancels]:
        """Takes sequences from the line; returns their ends, and what engines have to cancel."""
        ended: list[Finished] = []
        running: defaultdict[ReplicaId, list[SequenceId]] = defaultdict(list)
        for id in cancel.sequence_ids:
            if (part := self._part_of.get(id)) is None:
                continue
            if (replica := self.placement.replica_of(part)) is not None:
                running[replica].append(id)
                continue
            ended.append(Finished(id, cancel.finish))
            want = self.placement.leave(part)
            if self._has_more(id) and want is not None:
                self.placement.ask(part, want._replace(num_places=want.num_places - 1))
        cancels = {replica: Cancel(tuple(ids), cancel.finish) for replica, ids in running.items()}
        return tuple(ended), cancels

    def release(self, sequence_id: SequenceId) -> None:
        """An engine has let go of a sequence; nothing if it is unknown."""
        if (part := self._part_of.get(sequence_id)) is not None:
            self.placement.release(part)
            self._has_more(sequence_id)

    def close(self, replica: ReplicaId) -> tuple[tuple[SequenceId, ...], Cancels]:
        """Removes a replica, and forgets all sequences of the streams that it ran.

        A stream submits them again together, so those at other replicas have to end there: their
        places are free once that engine has let go. Returns all of them, and what to cancel.
        """
        streams = {self._parts[id].stream_id for id in self.placement.close(replica)}
        mine = [it for it in self._parts.values() if it.stream_id in streams]
        lost = tuple(new.sequence_id for it in mine for new in it.sequences)
        return lost, self.cancel(Cancel(lost))[1]

    def _has_more(self, ended: SequenceId) -> bool:
        """Forgets a sequence; whether its part has others."""
        id = self._part_of.pop(ended)
        part = self._parts[id]
        left = tuple(new for new in part.sequences if new.sequence_id != ended)
        if left:
            self._parts[id] = msgspec.structs.replace(part, sequences=left)
        else:
            del self._parts[id]
        return bool(left)


def _by_prompt(submit: Submit) -> Iterator[Submit]:
    for number, prompt in enumerate(submit.prompts):
        inputs = submit.inputs[number : number + 1]
        mine = (it for it in submit.sequences if it.prompt == number)
        if new := tuple(msgspec.structs.replace(it, prompt=0) for it in mine):
            yield msgspec.structs.replace(submit, prompts=(prompt,), inputs=inputs, sequences=new)


def _want(part: Submit, layout: MemoryLayout) -> Want:
    prompt = part.prompts[0]
    num_tokens = max((len(new.generated) for new in part.sequences), default=0) + len(prompt)
    names: tuple[int, ...] = ()
    if part.use_prefix and layout.num_blocks:
        names = prefix_names(prompt, layout.block_size, part.salt)
    due = part.arrival + PRIORITY_LEVEL_S * part.priority
    return Want(len(part.sequences), layout.blocks_for(num_tokens // 4), names, due)
