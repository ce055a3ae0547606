"""One choice on its way out: tokens in, events' worth of text out; judges ends in token order."""

from array import array
from collections.abc import Sequence

from headrace.core.ids import SequenceId
from headrace.core.messages import Finish, NewSequence, NewToken
from headrace.core.request import Chat
from headrace.generation.logprobs import token_logprobs
from headrace.generation.served import ServedModel
from headrace.streams.events import ChoiceEnd, Piece, TokenLogprob, Tokens
from headrace.streams.record import Record
from headrace.text.assembler import Fed, TextAssembler
from headrace.text.detokenizer import Detokenizer
from headrace.text.stops import StopMatcher


class Choice:
    """`index` counts over the whole request, `number` within its prompt."""

    def __init__(self, index: int, record: Record, model: ServedModel) -> None:
        request = record.request
        self.index = index
        self.prompt, self.number = divmod(index, request.n)
        self.end: ChoiceEnd | None = None
        self._tokenizer = model.tokenizer
        self._text: TextAssembler[TokenLogprob] = TextAssembler(
            Detokenizer(model.tokenizer, request.skip_special_tokens, self._token_before(record)),
            StopMatcher(request.stop, request.include_stop),
            request.sampling,
        )
        self._stop: ChoiceEnd | None = None  # its tokens say that it has ended
        self._token_ids: array[int] = array("i")  # all that count, delivered or about to be
        self._num_told = 0  # of them, those that an event has carried
        self._pieces: list[Piece] = []
        self._logprobs: list[TokenLogprob] = []
        self._is_end_told = False

    @property
    def is_stopped(self) -> bool:
        """Its own tokens have ended it; whatever the engine says of later ones is void."""
        return self._stop is not None

    @property
    def num_tokens(self) -> int:
        """Those of the answer so far."""
        return len(self._token_ids)

    def as_sequence(self, sequence_id: SequenceId) -> NewSequence:
        """This choice as an engine shall begin, or continue, it."""
        return NewSequence(sequence_id, self.prompt, self.number, self._token_ids.tobytes())

    def feed(self, token: NewToken) -> None:
        if self._stop or self.end:
            return
        self._token_ids.append(token.token_id)
        entry = None
        if token.logprobs is not None:
            entry = token_logprobs(token.logprobs, self._tokenizer)[0]
        self._deliver(self._text.feed(token.token_id, entry))

    def finish(self, finish: Finish) -> None:
        """The engine has let go of the sequence."""
        if self._stop is None:
            self._deliver(self._text.flush())
        self.end = self._stop or ChoiceEnd(str(finish))

    def replay(self, event: Tokens) -> bool:
        """Comes to the state behind an event of an earlier life; whether its text is the same."""
        for token_id in event.ids:
            self._token_ids.append(token_id)
            self._deliver(self._text.feed(token_id))
        if event.end is not None:
            if self._stop is None:
                self._deliver(self._text.flush())
            self.end = event.end
        made = self.take(event.seq, event.at_ms)
        return (made.text if made else "") == event.text

    def echo(self, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        """The prompt, to stand before the choice's own text."""
        self._add(text, logprobs)

    def take(self, seq: int, at_ms: int) -> Tokens | None:
        """What came since the last call, as an event; None if nothing did."""
        ids = tuple(self._token_ids[self._num_told :])
        end = None if self._is_end_told else self.end
        if not ids and not self._pieces and not self._logprobs and end is None:
            return None
        event = Tokens(
            seq=seq,
            at_ms=at_ms,
            choice=self.index,
            ids=ids,
            pieces=tuple(self._pieces),
            logprobs=tuple(self._logprobs),
            end=end,
        )
        self._is_end_told = self.end is not None
        self._num_told = len(self._token_ids)
        self._pieces, self._logprobs = [], []
        return event

    def _token_before(self, record: Record) -> int | None:
        """The token that the text continues; None where an answer begins."""
        prompt = record.request.prompts[self.prompt]
        if isinstance(prompt, Chat) and not prompt.continue_final_message:
            return None
        return array("i", record.prompts[self.prompt][-4:])[0]

    def _deliver(self, fed: Fed[TokenLogprob]) -> None:
        self._add(fed.text, fed.entries)
        if fed.ended:
            self._stop = ChoiceEnd("stop", fed.stop)

    def _add(self, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        if text:
            self._pieces.append(Piece(text))
        self._logprobs.extend(logprobs)
