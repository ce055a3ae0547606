"""Turns the tokens of one choice into text for events, and decides where the choice ends."""

from array import array
from dataclasses import dataclass, field

from headrace.fleet.served_model import ServedModel
from headrace.streams.events import ChoiceEnd, TokenLogprob, Tokens
from headrace.streams.record import Record
from headrace.text.assembler import TextAssembler
from headrace.text.detokenizer import Detokenizer
from headrace.text.output_splitter import PLAIN, Splitting, make_splitting
from headrace.text.stops import NO_STOPS, StopMatcher
from headrace.text.tokenizer import Tokenizer
from headrace_common.ids import SequenceId
from headrace_common.messages import FinishReason, Guessed, NewSequence, PromptLogprobs
from headrace_common.pieces import ChannelPiece
from headrace_common.request import Chat
from headrace_common.sampling import Logprobs

# The number of tokens at a prompt's end that are searched for an opening reasoning tag.
_TAIL = 16


@dataclass(slots=True)
class _Unreported:
    """A choice's results since its last event. The assembler keeps the log probabilities."""

    ids: list[int] = field(default_factory=list)
    state: bytes = b""
    num_reasoning: int = 0
    num_guessed: int = 0
    num_accepted: int = 0
    pieces: list[ChannelPiece] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class ChoiceWriter:
    """Builds the events of one choice.

    `index` is the choice's index in the request, and `number` the choice's index among the choices
    of one prompt.
    """

    def __init__(self, index: int, record: Record, model: ServedModel) -> None:
        request = record.request
        self.index = index
        self.prompt, self.number = divmod(index, request.n)
        self.end: ChoiceEnd | None = None
        # Whether the engine has started this choice.
        self.has_begun = False
        # Whether the choice's text has started. An echoed prompt is part of the text.
        self.has_text = False
        # Whether a stop string or an end token has ended the choice; later tokens are ignored.
        self.is_stopped = False
        self.num_prompt = len(record.prompts[self.prompt]) // 4
        self._has_source = model.has_source
        self._max_tokens = request.sampling.max_tokens
        self._tokenizer = model.tokenizer
        self._splitting = splitting_of(record, self.prompt, model.tokenizer)
        self._text: TextAssembler[TokenLogprob] = TextAssembler(
            Detokenizer(model.tokenizer, request.skip_special_tokens, self._token_before(record)),
            StopMatcher(request.stop, request.include_stop) if request.stop else NO_STOPS,
            request.sampling,
            self._splitting,
        )
        # All tokens generated so far; a new engine continues after these tokens.
        self._token_ids: array[int] = array("i")
        # The samplers' state after the last generated token.
        self._state = b""
        self._unreported = _Unreported()

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in the prompt and the answer so far.

        For an encoder-decoder model, return the larger of the two numbers, because the prompt and
        the answer have separate contexts.
        """
        counts = self.num_prompt, len(self._token_ids)
        return max(counts) if self._has_source else sum(counts)

    def is_cut_short(self, context: int) -> bool:
        """Return whether a full context of this size is the only reason why the choice must end."""
        is_full = self.num_tokens >= context
        return is_full and not self.is_stopped and len(self._token_ids) != self._max_tokens

    def as_sequence(self, sequence_id: SequenceId) -> NewSequence:
        """Return this choice as a sequence that an engine can start or continue."""
        generated = self._token_ids.tobytes()
        return NewSequence(sequence_id, self.prompt, self.number, generated, self._state)

    def begin(self) -> None:
        """Record that the engine has started this choice."""
        self.has_begun = True

    def begin_text(self) -> None:
        """Record that the text of this choice has started."""
        self.has_text = True

    def feed(self, token_id: int, logprobs: Logprobs | None = None, state: bytes = b"") -> None:
        """Add the next token. `logprobs` is None unless the request asks for log probabilities."""
        entry = None if logprobs is None else token_logprobs(logprobs, self._tokenizer)[0]
        self._token_ids.append(token_id)
        unreported, splitter = self._unreported, self._splitting.splitter
        unreported.ids.append(token_id)
        if state:
            self._state = unreported.state = state
        unreported.num_reasoning += splitter is not None and splitter.is_reasoning
        unreported.pieces += self._text.feed(token_id, entry)
        self.is_stopped = self._text.has_ended

    def count_guessed(self, guessed: Guessed) -> None:
        self._unreported.num_guessed += guessed.num_tokens
        self._unreported.num_accepted += guessed.num_right

    def finish(self, finish: FinishReason) -> None:
        """Set the choice's finish reason after the engine has finished the sequence."""
        self._flush()
        self.end = ChoiceEnd("stop", self._text.stop) if self.is_stopped else ChoiceEnd(str(finish))
        splitter = self._splitting.splitter
        if splitter and splitter.num_calls and self.end == ChoiceEnd("stop"):
            self.end = ChoiceEnd("tool_calls")

    def replay(self, event: Tokens) -> bool:
        """Replay an event that an earlier process wrote.

        Returns whether the event's tokens still decode to the event's text.
        """
        for token_id in event.ids:
            self.feed(token_id, state=event.state)
        if event.end is not None:
            self._flush()
            self.end = event.end
        made = self.take(event.seq, event.at_ms)
        return (made.text if made else "") == event.text

    def echo(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Put the prompt's text before the choice's own text."""
        self._unreported.pieces.append(ChannelPiece(text))
        self._unreported.prompt_logprobs = logprobs

    def take(self, seq: int, at_ms: int) -> Tokens | None:
        """Return the results since the last call as an event, or None if there are no results.

        The choice's last event contains the end of the choice.
        """
        unreported = self._unreported
        logprobs = unreported.prompt_logprobs
        if self._text.entries:
            logprobs += self._text.take_entries()
        if not (unreported.ids or unreported.pieces or logprobs or self.end):
            return None
        self._unreported = _Unreported()
        return Tokens(
            seq=seq,
            at_ms=at_ms,
            choice=self.index,
            ids=tuple(unreported.ids),
            pieces=tuple(unreported.pieces),
            logprobs=logprobs,
            num_reasoning=unreported.num_reasoning,
            num_guessed=unreported.num_guessed,
            num_accepted=unreported.num_accepted,
            end=self.end,
            state=unreported.state,
        )

    def _token_before(self, record: Record) -> int | None:
        """Return the prompt's last token if the answer's text continues the prompt, else None."""
        prompt = record.request.prompts[self.prompt]
        if self._has_source or (isinstance(prompt, Chat) and not prompt.continue_final_message):
            return None
        return array("i", record.prompts[self.prompt][-4:])[0]

    def _flush(self) -> None:
        if not self.is_stopped:
            self._unreported.pieces += self._text.flush()
            self.is_stopped = self._text.has_ended


def splitting_of(record: Record, prompt: int, tokenizer: Tokenizer) -> Splitting:
    """Return how answers to this prompt are split into channels.

    Only the record and the tokenizer determine the result, so a restart does not change the result.
    """
    channels = record.request.channels
    if channels is None:
        return PLAIN
    tail = ""
    if channels.reasoning:
        tail = tokenizer.decode(record.prompt_ids(prompt)[-_TAIL:], skip_special_tokens=False)
    return make_splitting(channels, tail, tokenizer.token_id)


def begins_in_reasoning(record: Record, prompt: int, tokenizer: Tokenizer) -> bool:
    """Return whether the prompt ends inside reasoning that the answer continues."""
    splitter = splitting_of(record, prompt, tokenizer).splitter
    return splitter is not None and splitter.is_reasoning


class Echo:
    """Echoes the prompt at the start of an answer, with the log probabilities of the prompt's
    tokens.
    """

    def __init__(self, record: Record, tokenizer: Tokenizer) -> None:
        self._record = record
        self._tokenizer = tokenizer
        # By prompt and by position in the prompt. After a crash, another engine processes the
        # prompt again in other chunks, so its entries replace some of the earlier entries.
        self._entries: dict[int, dict[int, TokenLogprob]] = {}

    def add(self, prompt: int, item: PromptLogprobs) -> None:
        """Keep log probabilities of a prompt until a choice echoes the prompt."""
        entries = token_logprobs(item.logprobs, self._tokenizer)
        self._entries.setdefault(prompt, {}).update(enumerate(entries, item.start))

    def begin(self, choice: ChoiceWriter) -> None:
        """Put the prompt's text at the start of the choice."""
        token_ids = self._record.prompt_ids(choice.prompt)
        skip = self._record.request.skip_special_tokens
        choice.echo(self._tokenizer.decode(token_ids, skip), self._logprobs(choice, token_ids[0]))

    def _logprobs(self, choice: ChoiceWriter, first_id: int) -> tuple[TokenLogprob, ...]:
        if self._record.request.sampling.num_prompt_logprobs is None:
            return ()
        entries = self._entries.get(choice.prompt, {})
        rest = [entries[position] for position in sorted(entries)]
        # The prompt's first token has no log probability, because no token precedes the first
        # token.
        return (_entry(first_id, None, self._tokenizer), *rest)


def token_logprobs(packed: Logprobs, tokenizer: Tokenizer) -> list[TokenLogprob]:
    """Return one entry per position: the position's token, with the most likely tokens as `top`."""
    token_ids, values = array("i", packed.ids), array("f", packed.values)
    entries = []
    for row in range(0, len(token_ids), packed.width):
        first, *top = (
            _entry(token_ids[i], values[i], tokenizer) for i in range(row, row + packed.width)
        )
        entries.append(
            TokenLogprob(first.token_id, first.token, first.bytes, first.logprob, tuple(top))
        )
    return entries


def _entry(token_id: int, logprob: float | None, tokenizer: Tokenizer) -> TokenLogprob:
    return TokenLogprob(
        token_id, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), logprob
    )
