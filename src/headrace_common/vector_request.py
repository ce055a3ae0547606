"""A request for vectors, of inputs or of pairs of texts."""

import msgspec

from headrace_common.jobs import EncodedAhead
from headrace_common.request import Route


class VectorRequest(msgspec.Struct, frozen=True):
    """A request for vectors, one per input; `packed` holds the inputs for a worker."""

    route: Route
    task: str  # embed or score
    packed: bytes
    field: str  # of the body, which has the inputs
    is_list: bool = True
    model: str | None = None
    owner: str = ""
    ahead: EncodedAhead | None = None
    priority: int = 0
