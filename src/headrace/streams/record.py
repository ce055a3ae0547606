"""Defines the record that is stored with each log.

A record and its log contain all data that rendering and recovery need.
"""

from array import array

import msgspec

from headrace_common.adapter import Adapter
from headrace_common.ids import StreamId
from headrace_common.request import Chat, Request

CONVERSATION = "conversation\n"
"""The start of the stored names of conversations of /v1/conversations.

No X-Conversation-Id contains a line break, so no client can choose such a name.
"""


class Names(msgspec.Struct, frozen=True):
    """The names under which a stream can be found, and their `owner`, the name of an API key.

    `digest` identifies the route and the body's bytes: two requests with equal digests are the
    same request.
    """

    owner: str = ""
    conversation: str | None = None
    key: str | None = None
    digest: bytes = b""
    # The client asked to keep the stream, but named neither a conversation nor a key.
    is_stored: bool = False
    # The server keeps the stream in memory for a while after the stream's end, although the client
    # did not opt in.
    is_kept: bool = False
    # An equal request may take over the stream while nobody reads it.
    can_attach: bool = True
    # Ids that the client gave to items of its input.
    items: tuple[str, ...] = ()
    # The stream after which this stream may take over the conversation. None: after any stream.
    follows: StreamId | None = None

    @property
    def is_opted_in(self) -> bool:
        """Return whether the client asked for a stream that survives a lost connection."""
        return self.is_stored or self.conversation is not None or self.key is not None

    @property
    def is_in_conversation(self) -> bool:
        """Return whether the stream belongs to a conversation of /v1/conversations."""
        return self.conversation is not None and self.conversation.startswith(CONVERSATION)

    def outlives_client_s(self, linger_s: float) -> float | None:
        """Return how many seconds a stream without readers continues before its first token.

        Returns None if there is no limit. Returns 0 if no later request could find the stream.
        """
        if self.is_opted_in:
            return None
        return linger_s if self.can_attach else 0.0


class ServedSetup(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a model was served, apart from its weights.

    Fields that an older version did not write are empty.
    """

    # The version of Headrace.
    version: str = ""
    # The data type, with the quantization if there is one.
    dtype: str = ""
    device: str = ""
    max_model_len: int = 0


RENDERING = 3
"""The version of the rules that turn events into frames.

3 is current. Version 2 did not write the phase of a message in /v1/responses. Version 1 reported
prompt progress only in frames that some clients do not count as signs of life. In version 0, these
clients received no sign of life before the start of the answer.
"""


class Record(msgspec.Struct, frozen=True):
    """The request of a stream and the setup that served it, frozen at admission.

    `prompts` are packed int32 token ids, one entry per prompt.
    """

    id: StreamId
    created: int  # unix seconds
    request: Request
    prompts: tuple[bytes, ...]
    system_fingerprint: str
    names: Names = Names()
    # True if the stream survives a restart of the server.
    is_durable: bool = False
    served: ServedSetup = ServedSetup()
    # How the prompts were tokenized: "one-shot", "streamed" or "given". None if an older version
    # wrote the record.
    tokenization: str | None = None
    # The prompts as they were sent, if they contain images.
    images: bytes = b""
    # The adapter that changes the model for this request.
    adapter: Adapter | None = None
    # Changes made to messages that the chat template had refused.
    changes: tuple[str, ...] = ()
    # The value of RENDERING when the record was written. The stream must always render to the same
    # bytes.
    rendering: int = 0

    @property
    def mode(self) -> str:
        """Return "continue" if the answer only extends a final assistant message, else "fresh"."""
        continues = any(
            isinstance(prompt, Chat) and prompt.continue_final_message
            for prompt in self.request.prompts
        )
        return "continue" if continues else "fresh"

    @property
    def num_input_bytes(self) -> int:
        """Return the memory of the fields that grow with the request's body."""
        return sum(map(len, self.prompts)) + len(self.images) + len(self.request.kept)

    def prompt_ids(self, prompt: int) -> list[int]:
        return list(array("i", self.prompts[prompt]))

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of prompt tokens; a prompt counts once, even if it has several
        choices.
        """
        return sum(map(len, self.prompts)) // 4
