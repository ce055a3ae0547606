"""The record stored beside a log: with its events, all that rendering and recovery need."""

from array import array

import msgspec

from headrace_common.adapter import Adapter
from headrace_common.ids import StreamId
from headrace_common.request import Chat, Request


class Names(msgspec.Struct, frozen=True):
    """The names that find a stream; they belong to `owner`, the name of an API key.

    `digest` identifies route and body bytes: two requests with equal digests are the same.
    """

    owner: str = ""
    conversation: str | None = None
    key: str | None = None
    digest: bytes = b""
    is_stored: bool = False  # the client asked for it to be kept, by no name but its id
    is_kept: bool = False  # kept for a while after its end all the same, in memory
    can_attach: bool = True  # an equal request may take over the stream while nobody reads it

    @property
    def is_opted_in(self) -> bool:
        """Whether the client asked for a stream that survives it."""
        return self.is_stored or self.conversation is not None or self.key is not None

    def outlives_client_s(self, linger_s: float) -> float | None:
        """Seconds that work for an unread stream goes on before its first token; None: no limit.

        0 if no later request could find the stream.
        """
        if self.is_opted_in:
            return None
        return linger_s if self.can_attach else 0.0


class ServedSetup(msgspec.Struct, frozen=True, omit_defaults=True):
    """The setup of a served model beside its weights; empty where an older version is silent."""

    version: str = ""  # of Headrace
    dtype: str = ""  # with the quantization, if there is one
    device: str = ""
    max_model_len: int = 0


RENDERING = 2
"""How events become frames now. 1: progress of prompts on frames that only some clients count as
life; 0: no signs but such."""


class Record(msgspec.Struct, frozen=True):
    """Frozen at admission. `prompts` are packed int32 token ids, one entry per prompt."""

    id: StreamId
    created: int  # unix seconds
    request: Request
    prompts: tuple[bytes, ...]
    system_fingerprint: str
    names: Names = Names()
    is_durable: bool = False  # survives the server
    served: ServedSetup = ServedSetup()
    tokenization: str | None = None  # one-shot, streamed or given; None: an older version
    images: bytes = b""  # the prompts as they were sent, if there are images among them
    adapter: Adapter | None = None  # that changes the model for it
    changes: tuple[str, ...] = ()  # made in messages that the chat template refused
    rendering: int = 0  # RENDERING of the version that made it: its bytes stay what they were

    @property
    def mode(self) -> str:
        """continue: the log holds only what is added to a final assistant message; else fresh."""
        continues = any(
            isinstance(prompt, Chat) and prompt.continue_final_message
            for prompt in self.request.prompts
        )
        return "continue" if continues else "fresh"

    def prompt_ids(self, prompt: int) -> list[int]:
        return list(array("i", self.prompts[prompt]))

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the whole request, each prompt counted once for any n."""
        return sum(map(len, self.prompts)) // 4
