"""Queues requests for several engines of one model, and tracks which engine runs a request."""

import itertools
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from headrace.fleet.placement import PartId, Placement, PlacementRequest, ReplicaId, prefix_names
from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import Cancel, Finished, Status, Submit

# One priority level shifts a request by this many seconds, as in the queue of an engine.
PRIORITY_LEVEL_S = 10.0
Cancels = dict[ReplicaId, Cancel]


class RequestQueue:
    """The requests of several engines, split into parts with one prompt each.

    The caller reports each event, then submits the parts that `placed` yields. All choices of a
    prompt stay together, since the choices share the prompt's cache. Different prompts may run on
    different engines.
    """

    def __init__(self) -> None:
        self.placement = Placement()
        self._new_ids = itertools.count()
        # The parts, each with only the sequences that have not ended.
        self._parts: dict[PartId, Submit] = {}
        self._part_of: dict[SequenceId, PartId] = {}

    def ask(self, submit: Submit, layout: MemoryLayout) -> None:
        """Queue a request; `layout` gives the size of a memory block."""
        for part in _by_prompt(submit):
            id = next(self._new_ids)
            self._parts[id] = part
            self._part_of |= {new.sequence_id: id for new in part.sequences}
            self.placement.ask(id, _placement_request(part, layout))

    def placed(self) -> Iterator[tuple[ReplicaId, Submit]]:
        """Assign queued parts to replicas; yield the replica's id and the part."""
        for it in iter(self.placement.next, None):
            yield it.replica, self._parts[it.part]

    def status(self) -> Status:
        """Return the queue as a Status, whose field `queue` lists the next request first."""
        queued = [self._parts[id] for id in self.placement.waiting()]
        num_tokens = sum(len(part.prompts[0]) // 4 for part in queued)
        heads = tuple(part.sequences[0].sequence_id for part in queued)
        return Status(0, sum(len(it.sequences) for it in queued), num_tokens, 0, 0, 0, queue=heads)

    def cancel(self, cancel: Cancel) -> tuple[tuple[Finished, ...], Cancels]:
        """Remove sequences from the queue.

        The first result has a Finished for each removed sequence. The second result has a Cancel
        for each replica that runs some of the sequences.
        """
        ended: list[Finished] = []
        running: defaultdict[ReplicaId, list[SequenceId]] = defaultdict(list)
        for id in cancel.sequence_ids:
            if (part := self._part_of.get(id)) is None:
                continue
            if (replica := self.placement.replica_of(part)) is not None:
                running[replica].append(id)
                continue
            ended.append(Finished(id, cancel.finish))
            needs = self.placement.leave(part)
            if self._remove(id) and needs is not None:
                self.placement.ask(part, needs._replace(num_places=needs.num_places - 1))
        cancels = {replica: Cancel(tuple(ids), cancel.finish) for replica, ids in running.items()}
        return tuple(ended), cancels

    def release(self, sequence_id: SequenceId) -> None:
        """Record that an engine has ended a sequence; unknown sequences are ignored."""
        if (part := self._part_of.get(sequence_id)) is not None:
            self.placement.release(part)
            self._remove(sequence_id)

    def close(self, replica: ReplicaId) -> tuple[tuple[SequenceId, ...], Cancels]:
        """Remove a replica, and withdraw the streams that had sequences on the replica.

        All sequences of such a stream are withdrawn, and the stream submits its sequences again.
        So the stream's sequences on other replicas have to be cancelled. A cancelled sequence
        keeps its slot until the engine has ended the sequence. Returns the ids of all withdrawn
        sequences, and a Cancel for each replica that runs withdrawn sequences.
        """
        streams = {self._parts[id].stream_id for id in self.placement.close(replica)}
        own = [it for it in self._parts.values() if it.stream_id in streams]
        lost = tuple(new.sequence_id for it in own for new in it.sequences)
        return lost, self.cancel(Cancel(lost))[1]

    def _remove(self, ended: SequenceId) -> bool:
        """Forget a sequence; return whether other sequences of the same prompt are left."""
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
        own = (it for it in submit.sequences if it.prompt == number)
        if new := tuple(msgspec.structs.replace(it, prompt=0) for it in own):
            yield msgspec.structs.replace(submit, prompts=(prompt,), inputs=inputs, sequences=new)


def _placement_request(part: Submit, layout: MemoryLayout) -> PlacementRequest:
    prompt = part.prompts[0]
    num_tokens = max((len(new.generated) for new in part.sequences), default=0) + len(prompt)
    names: tuple[int, ...] = ()
    if part.use_prefix and layout.num_blocks:
        names = prefix_names(prompt, layout.block_size, part.salt)
    due = part.arrival + PRIORITY_LEVEL_S * part.priority
    return PlacementRequest(len(part.sequences), layout.blocks_for(num_tokens // 4), names, due)
