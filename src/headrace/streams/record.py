"""What lies beside a log: with the events, all that rendering and recovery need."""

from array import array

import msgspec

from headrace.core.ids import StreamId
from headrace.core.request import Request


class Record(msgspec.Struct, frozen=True):
    """Frozen at admission. `prompts` are packed int32 token ids, one entry per prompt."""

    id: StreamId
    created: int  # unix seconds
    request: Request
    prompts: tuple[bytes, ...]
    system_fingerprint: str

    def prompt_ids(self, prompt: int) -> list[int]:
        return list(array("i", self.prompts[prompt]))

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the whole request, each prompt counted once for any n."""
        return sum(len(packed) for packed in self.prompts) // 4
