"""Defines the sequences that one request has in an engine, for text or for vectors."""

from collections.abc import Iterable

from headrace.fleet.engine_users import EngineUser, EngineUsers
from headrace_common.adapter import Adapter
from headrace_common.ids import SequenceId
from headrace_common.messages import Cancel, FinishReason, Submit


def salt_of(owner: str, salt: str, adapter: Adapter | None = None) -> str:
    """Return the cache salt of a request: only requests with equal salts share cached prefixes.

    An owner's name contains no line break, so no client can choose a salt that equals another
    owner's salt.
    """
    shared = f"{owner}\n{salt}"
    return shared if adapter is None else f"{adapter.fingerprint}\n{shared}"


class Submission:
    """The sequences of one request in an engine.

    `parts` maps each sequence id to the index of a choice (for text) or of an input (for vectors).
    """

    def __init__(self, user: EngineUser) -> None:
        self.parts: dict[SequenceId, int] = {}
        # None until an engine was ready for the first time.
        self.engine: EngineUsers | None = None
        self._user = user

    def move_to(self, engine: EngineUsers) -> None:
        """Use this engine for later submissions."""
        self.engine = engine

    def open(self, parts: Iterable[int]) -> tuple[SequenceId, ...]:
        """Reserve a sequence id for each of these choices or inputs.

        The caller must submit the sequences.
        """
        assert self.engine is not None
        new = {self.engine.open(self._user): part for part in parts}
        self.parts |= new
        return tuple(new)

    def submit(self, submit: Submit) -> None:
        assert self.engine is not None
        self.engine.submit(submit)

    def stop(self, sequence_id: SequenceId) -> None:
        """End a sequence because of a stop string; the sequence's finish reason is `stop`."""
        assert self.engine is not None
        self.engine.cancel(Cancel((sequence_id,), FinishReason.STOP))

    def cancel(self) -> None:
        """Cancel all sequences; the engine confirms each cancellation."""
        if self.engine is not None and self.parts:
            self.engine.cancel(Cancel(tuple(self.parts)))

    def close(self, sequence_id: SequenceId) -> int:
        """Remove a sequence that has ended; return the index of its choice or input."""
        assert self.engine is not None
        self.engine.forget((sequence_id,))
        return self.parts.pop(sequence_id)

    def leave(self) -> None:
        """Cancel all sequences without waiting for the engine's confirmation."""
        self.cancel()
        self.forget()

    def forget(self) -> dict[SequenceId, int]:
        """Ignore further messages about all sequences; return the sequences that were in the
        engine.
        """
        if self.engine is not None:
            self.engine.forget(self.parts)
        had, self.parts = self.parts, {}
        return had
