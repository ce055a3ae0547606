"""Defines a request for embeddings of inputs, or for scores of pairs of texts."""

import msgspec

from headrace_common.request import Route
from headrace_common.worker_jobs import EncodedAhead


class VectorRequest(msgspec.Struct, frozen=True):
    """A request for vectors, one per input. `packed` contains the inputs for a worker."""

    route: Route
    task: str  # embed or score
    packed: bytes
    field: str  # name of the body's field with the inputs
    is_list: bool = True
    model: str | None = None
    owner: str = ""
    ahead: EncodedAhead | None = None
    priority: int = 0
    digest: bytes = b""  # equal for requests with the same inputs
