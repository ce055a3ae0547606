"""One choice on its way out: tokens in, events' worth of text out; judges ends in token order."""

from array import array
from dataclasses import dataclass, field

from headrace.fleet.served_model import ServedModel
from headrace.streams.events import ChoiceEnd, TokenLogprob, Tokens
from headrace.streams.record import Record
from headrace.text.assembler import TextAssembler
from headrace.text.detokenizer import Detokenizer
from headrace.text.output_splitter import PLAIN, REASONING_TAGS, Splitting, make_splitting
from headrace.text.stops import StopMatcher
from headrace.text.tokenizer import Tokenizer
from headrace_common.ids import SequenceId
from headrace_common.messages import FinishReason, Guessed, NewSequence, PromptLogprobs
from headrace_common.pieces import ChannelPiece
from headrace_common.request import Chat
from headrace_common.sampling import Logprobs

_TAIL = 16  # tokens of a prompt in which reasoning may have been opened


@dataclass(slots=True)
class _Untold:
    """News of a choice that no event has carried yet, beside the text's own entries."""

    ids: list[int] = field(default_factory=list)
    num_reasoning: int = 0
    num_guessed: int = 0
    num_accepted: int = 0
    pieces: list[ChannelPiece] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class ChoiceWriter:
    """`index` counts over the whole request, `number` within its prompt."""

    def __init__(self, index: int, record: Record, model: ServedModel) -> None:
        request = record.request
        self.index = index
        self.prompt, self.number = divmod(index, request.n)
        self.end: ChoiceEnd | None = None
        self.has_begun = False  # the engine has begun it
        self.has_text = False  # its text has begun, with the echo of its prompt if there is one
        self.is_stopped = False  # by its own tokens; later tokens from the engine are ignored
        self.num_prompt = len(record.prompts[self.prompt]) // 4
        self._has_source = model.has_source
        self._max_tokens = request.sampling.max_tokens
        self._tokenizer = model.tokenizer
        self._splitting = splitting_of(record, self.prompt, model.tokenizer)
        self._text: TextAssembler[TokenLogprob] = TextAssembler(
            Detokenizer(model.tokenizer, request.skip_special_tokens, self._token_before(record)),
            StopMatcher(request.stop, request.include_stop),
            request.sampling,
            self._splitting,
        )
        self._token_ids: array[int] = array("i")  # all so far: a new engine continues them
        self._untold = _Untold()

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far; the larger of them where each has a context of its own."""
        counts = self.num_prompt, len(self._token_ids)
        return max(counts) if self._has_source else sum(counts)

    def is_cut_short(self, context: int) -> bool:
        """Whether nothing but a context of this size ends it."""
        is_full = self.num_tokens >= context
        return is_full and not self.is_stopped and len(self._token_ids) != self._max_tokens

    def as_sequence(self, sequence_id: SequenceId) -> NewSequence:
        """This choice as an engine is to begin or continue it."""
        return NewSequence(sequence_id, self.prompt, self.number, self._token_ids.tobytes())

    def feed(self, token_id: int, logprobs: Logprobs | None = None) -> None:
        """Takes the next token, with its log probabilities if they were asked for."""
        entry = None if logprobs is None else token_logprobs(logprobs, self._tokenizer)[0]
        self._token_ids.append(token_id)
        untold, splitter = self._untold, self._splitting.splitter
        untold.ids.append(token_id)
        untold.num_reasoning += splitter is not None and splitter.is_reasoning
        untold.pieces += self._text.feed(token_id, entry)
        self.is_stopped = self._text.has_ended

    def count_guessed(self, guessed: Guessed) -> None:
        self._untold.num_guessed += guessed.num_tokens
        self._untold.num_accepted += guessed.num_right

    def finish(self, finish: FinishReason) -> None:
        """The engine has let go of the sequence."""
        self._flush()
        self.end = ChoiceEnd("stop", self._text.stop) if self.is_stopped else ChoiceEnd(str(finish))
        splitter = self._splitting.splitter
        if splitter and splitter.num_calls and self.end == ChoiceEnd("stop"):
            self.end = ChoiceEnd("tool_calls")

    def replay(self, event: Tokens) -> bool:
        """Returns to the state after an event of an earlier run; whether its text is the same."""
        for token_id in event.ids:
            self.feed(token_id)
        if event.end is not None:
            self._flush()
            self.end = event.end
        made = self.take(event.seq, event.at_ms)
        return (made.text if made else "") == event.text

    def echo(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Puts the prompt before the choice's own text."""
        self._untold.pieces.append(ChannelPiece(text))
        self._untold.prompt_logprobs = logprobs

    def take(self, seq: int, at_ms: int) -> Tokens | None:
        """The tokens since the last call, as an event; None if there are none.

        The event with the end is the last: nothing comes after it.
        """
        untold = self._untold
        logprobs = untold.prompt_logprobs
        if self._text.entries:
            logprobs += self._text.take_entries()
        if not (untold.ids or untold.pieces or logprobs or self.end):
            return None
        self._untold = _Untold()
        return Tokens(
            seq=seq,
            at_ms=at_ms,
            choice=self.index,
            ids=tuple(untold.ids),
            pieces=tuple(untold.pieces),
            logprobs=logprobs,
            num_reasoning=untold.num_reasoning,
            num_guessed=untold.num_guessed,
            num_accepted=untold.num_accepted,
            end=self.end,
        )

    def _token_before(self, record: Record) -> int | None:
        """The token that the text continues; None where an answer begins."""
        prompt = record.request.prompts[self.prompt]
        if self._has_source or (isinstance(prompt, Chat) and not prompt.continue_final_message):
            return None
        return array("i", record.prompts[self.prompt][-4:])[0]

    def _flush(self) -> None:
        if not self.is_stopped:
            self._untold.pieces += self._text.flush()
            self.is_stopped = self._text.has_ended


def splitting_of(record: Record, prompt: int, tokenizer: Tokenizer) -> Splitting:
    """How the answers to this prompt are split into channels; the same after every restart."""
    channels = record.request.channels
    if channels is None:
        return PLAIN
    tail = ""
    if channels.reasoning in REASONING_TAGS:
        tail = tokenizer.decode(record.prompt_ids(prompt)[-_TAIL:], skip_special_tokens=False)
    return make_splitting(channels, tail, tokenizer.token_id)


def begins_in_reasoning(record: Record, prompt: int, tokenizer: Tokenizer) -> bool:
    """Whether this prompt has opened reasoning, so that the answer goes on with it."""
    splitter = splitting_of(record, prompt, tokenizer).splitter
    return splitter is not None and splitter.is_reasoning


class Echo:
    """The prompt as the beginning of an answer: its text, and its tokens' log probabilities."""

    def __init__(self, record: Record, tokenizer: Tokenizer) -> None:
        self._record = record
        self._tokenizer = tokenizer
        self._entries: dict[int, dict[int, list[TokenLogprob]]] = {}

    def add(self, prompt: int, item: PromptLogprobs) -> None:
        """Keeps what the engine says of a prompt, until a choice begins with it."""
        rows = self._entries.setdefault(prompt, {})
        rows[item.start] = token_logprobs(item.logprobs, self._tokenizer)

    def begin(self, choice: ChoiceWriter) -> None:
        """Writes the prompt into the choice."""
        token_ids = self._record.prompt_ids(choice.prompt)
        skip = self._record.request.skip_special_tokens
        choice.echo(self._tokenizer.decode(token_ids, skip), self._logprobs(choice, token_ids[0]))

    def _logprobs(self, choice: ChoiceWriter, first_id: int) -> tuple[TokenLogprob, ...]:
        if self._record.request.sampling.num_prompt_logprobs is None:
            return ()
        rows = self._entries.get(choice.prompt, {})
        rest = [entry for start in sorted(rows) for entry in rows[start]]
        return (_entry(first_id, None, self._tokenizer), *rest)  # nothing precedes the first


def token_logprobs(packed: Logprobs, tokenizer: Tokenizer) -> list[TokenLogprob]:
    """One entry per row: the token itself, with the likeliest ones in its place below it."""
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
