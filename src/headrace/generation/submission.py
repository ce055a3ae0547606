"""A request's sequences in an engine, whether they become text or vectors."""

from collections.abc import Iterable

from headrace.fleet.tenants import Tenant, Tenants
from headrace_common.adapter import Adapter
from headrace_common.ids import SequenceId
from headrace_common.messages import Cancel, FinishReason, Submit


def salt_of(owner: str, salt: str, adapter: Adapter | None = None) -> str:
    """Tells whose prefixes may be shared, and what computed them.

    An owner has no line break, so that no salt can pass for another owner's.
    """
    shared = f"{owner}\n{salt}"
    return shared if adapter is None else f"{adapter.fingerprint}\n{shared}"


class Submission:
    """The part of a request that an engine has: `parts` are its choices or inputs, by sequence."""

    def __init__(self, tenant: Tenant) -> None:
        self.parts: dict[SequenceId, int] = {}
        self.engine: Tenants | None = None  # None until one was there
        self._tenant = tenant

    def open(self, parts: Iterable[int]) -> tuple[SequenceId, ...]:
        """Sequences for these parts, which are to be submitted."""
        assert self.engine is not None
        new = {self.engine.open(self._tenant): part for part in parts}
        self.parts |= new
        return tuple(new)

    def submit(self, submit: Submit) -> None:
        assert self.engine is not None
        self.engine.submit(submit)

    def stop(self, sequence_id: SequenceId) -> None:
        """Ends a sequence that has said enough."""
        assert self.engine is not None
        self.engine.cancel(Cancel((sequence_id,), FinishReason.STOP))

    def cancel(self) -> None:
        """Ends all; the engine says so of each."""
        if self.engine is not None and self.parts:
            self.engine.cancel(Cancel(tuple(self.parts)))

    def close(self, sequence_id: SequenceId) -> int:
        """The part that has ended."""
        assert self.engine is not None
        self.engine.forget((sequence_id,))
        return self.parts.pop(sequence_id)

    def leave(self) -> None:
        """Ends all, whatever the engine may say of it."""
        self.cancel()
        self.forget()

    def forget(self) -> dict[SequenceId, int]:
        """Hears no more of it; returns what the engine had."""
        if self.engine is not None:
            self.engine.forget(self.parts)
        had, self.parts = self.parts, {}
        return had
