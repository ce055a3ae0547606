"""One generation request while it lives: the only writer of its log."""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Sequence
from functools import partial

from headrace.engines.client import EngineDown, EngineUp
from headrace.fleet.queue_eta import TokensAsked
from headrace.fleet.served_model import ServedModel
from headrace.fleet.tenants import InQueue, Item, TenantNews, Tenants
from headrace.generation.admission import Place
from headrace.generation.crash_blame import CrashBlame
from headrace.generation.event_builder import EventBuilder, Standing
from headrace.generation.model_checks import check_can_begin, check_can_go_on
from headrace.generation.readers import Audience
from headrace.generation.request_span import span_of
from headrace.generation.submission import Submission, salt_of
from headrace.generation.waits import Beat
from headrace.metrics.metrics import RequestFigures
from headrace.metrics.traces import Traces
from headrace.streams.events import AnyEvent
from headrace.streams.log import Log, LogTaken
from headrace.streams.record import Record
from headrace.streams.store import StoreStalled
from headrace.streams.tally import Tally
from headrace.workers.image_file import Admitted
from headrace_common.errors import RequestError
from headrace_common.ids import SequenceId
from headrace_common.log_context import log_request
from headrace_common.messages import Finished, FinishReason, NewToken, Submit
from headrace_common.system.awake import Countdown
from headrace_common.system.panics import STEERING

logger = logging.getLogger(__name__)

_numbers = itertools.count(1)


class LiveStream:
    """The writer of a log: takes news in order, and appends the events that follow from it.

    Made on admission, or from its log after a restart. `run` writes the log to its end. Until then
    the stream keeps its place in the queue and its images.
    """

    def __init__(
        self,
        record: Record,
        builder: EventBuilder,
        log: Log,
        place: Place,
        admitted: Admitted,
        linger_s: float,
    ) -> None:
        self.record = record
        self.log = log
        self._place = place
        self._admitted = admitted
        self._limits: list[Countdown] = []
        self.number = next(_numbers)  # counts the streams of this process
        self.cut: RequestError | None = None  # why it was cut, if it was
        self.ended = asyncio.Event()
        self.audience = Audience(
            log, record.names.outlives_client_s(linger_s), on_abandoned=self._abandon
        )
        self._builder = builder
        # None: it ends without the engine
        self._inbox: asyncio.Queue[TenantNews | Beat | None] = asyncio.Queue()
        self._submission = Submission(self)
        self._blame = CrashBlame()
        self._smaller_context: int | None = None  # if it has shrunk since admission
        self._is_recovering = builder.has_begun  # until the engine is where a dead one was
        self._admitted_at = time.monotonic() - builder.last_ms / 1000
        self._counts = (0, 0)  # live and waiting choices that its place was last updated with
        self._keep_place()

    # what others call

    def begin(self, model: ServedModel, engine: Tenants, up: EngineUp) -> None:
        """Submits what is left to an engine, or ends if its model cannot go on with that.

        The model may have other settings than when the stream was admitted.
        """
        builder = self._builder
        try:
            if self._is_loading or builder.serving.known is None:
                check_can_begin(self.record, model)
                builder.serving.begin(model)
            else:
                context = check_can_go_on(*builder.serving.known, builder.num_tokens, model)
                self._smaller_context = context
            self._submission.engine = engine
        except RequestError as change:
            self.end_now(change)
        self.tell(up)

    def lose(self, error: RequestError) -> None:
        """Generation ends it, or keeps it for a later engine if it is durable."""

    @property
    def _is_loading(self) -> bool:
        """Whether it waits for its model to be in memory, to begin."""
        return self._submission.engine is None and not self._builder.has_begun

    @property
    def state(self) -> str:
        """loading, queued, prompt, decode or recovering, until the log has ended."""
        if self._is_recovering:
            return "recovering"
        if self._is_loading:
            return "loading"
        if not self._builder.has_begun:
            return "queued"
        return "decode" if self._builder.has_tokens else "prompt"

    @property
    def num_readers(self) -> int:
        """The number of readers at this moment."""
        return self.audience.num_readers

    @property
    def silent_s(self) -> float:
        """Seconds since its last event but signs of life; none for the background, which waits."""
        if self.record.request.is_background:
            return 0.0
        return (self._at_ms() - self._builder.news_ms) / 1000

    @property
    def tally(self) -> Tally:
        """The figures of all that was said so far."""
        return self._builder.tally

    def standings(self) -> dict[SequenceId, Standing]:
        """The standings of choices that this engine has begun, by the engine's ids."""
        by_choice = {standing.choice: standing for standing in self._builder.standings()}
        parts = self._submission.parts.items()
        return {number: by_choice[choice] for number, choice in parts if choice in by_choice}

    def asked(self, sequence_id: SequenceId) -> TokensAsked:
        """The tokens that one of its sequences asks of the engine; siblings share their prompt."""
        choice = self._submission.parts.get(sequence_id)
        if choice is None:
            return TokensAsked(0, 0)
        request = self.record.request
        prompt, number = divmod(choice, request.n)
        limit = request.sampling.max_tokens
        num_prompt = 0 if number else len(self.record.prompts[prompt]) // 4
        return TokensAsked(num_prompt, math.inf if limit is None else limit)

    def tell(self, news: TenantNews | Beat) -> None:
        """Hands over what the engine said, or what became of it."""
        self._inbox.put_nowait(news)

    def stop(self, error: RequestError) -> None:
        """Cuts the stream: it ends with this error once the engine has let go. Idempotent."""
        if self.ended.is_set() or self.cut:
            return
        self.cut = error
        if self._submission.parts:
            self._submission.cancel()
        else:
            self._inbox.put_nowait(None)

    def end_now(self, error: RequestError) -> None:
        """Cuts the stream without waiting for an engine that will not answer."""
        self.cut = self.cut or error
        self._inbox.put_nowait(None)

    def tell_place(self, place: InQueue) -> None:
        """Hands over where it stands in the queue, if that is news; there may be thousands."""
        if not self._builder.has_begun and self._builder.queue.wants(place, self._at_ms()):
            self.tell(place)

    def end_within(self, queue_s: float, request_s: float) -> None:
        """Cuts the stream if it has not begun or ended within these seconds of its admission.

        0: no limit. What waits for an engine to come back has no limit any more for beginning.
        """
        for seconds, cut in ((queue_s, self._time_out_in_queue), (request_s, self._time_out)):
            if seconds:
                left_s = max(0.0, seconds - self._at_ms() / 1000)
                self._limits.append(Countdown(left_s, partial(cut, seconds)))

    def _time_out_in_queue(self, seconds: float) -> None:
        if not self._builder.has_begun and not self._is_recovering:
            message = f"The request waited for {seconds:g} s and was not started; try again later."
            self.stop(RequestError("queue_timeout", message))

    def _time_out(self, seconds: float) -> None:
        message = f"The request took longer than {seconds:g} s; ask for less at once."
        self.stop(RequestError("request_timeout", message))

    def beat(self, form: str, interval_s: float) -> None:
        """Writes a heartbeat into the log, for wires on which every byte counts.

        One for all readers: those who ask within half an interval of it mean the same one.
        """
        if self._builder.beats.wants(form, interval_s, self._at_ms()):
            self.tell(Beat(self.state, form))

    def tell_load(self, progress: float | None, stage: str) -> None:
        """Says what the load of its model does and how far it is; None: not known yet."""
        self.tell(Beat("loading", "data", progress=progress, stage=stage))

    def check_log(self) -> None:
        """Writes a heartbeat, which fails if another server writes the log now."""
        self.tell(Beat(self.state, "comment"))

    def release(self) -> None:
        """Gives up its place, its images and its limits of time. Idempotent."""
        for limit in self._limits:
            limit.cancel()
        self._limits.clear()
        self._admitted.close()
        self._place.close()

    def _abandon(self) -> None:
        if not self.ended.is_set():  # usually the last reader leaves after the end
            self.stop(RequestError("client_gone", "The client left before the answer ended."))

    # the writer

    async def accept(self) -> None:
        """Writes the first event."""
        await self._append([self._builder.accepted()])

    async def run(self) -> None:
        """Writes all other events, the terminal one last."""
        try:
            builder = self._builder
            # Tokens of an earlier run may have reached the end of a choice.
            await self._append(builder.new_events(self._at_ms(), is_cut=bool(self.cut)))
            while builder.num_live and (news := await self._inbox.get()) is not None:
                at_ms = int((time.monotonic() - self._admitted_at) * 1000)
                if isinstance(news, list):
                    self._take_step(news, at_ms)
                else:
                    self._take(news, at_ms)
                if (builder.num_live, builder.num_waiting) != self._counts:
                    self._keep_place()
                if new := builder.new_events(at_ms, is_cut=bool(self.cut)):
                    await self.log.append(new[0].seq, new)
        except (StoreStalled, LogTaken):
            self._submission.leave()
            raise
        except STEERING:
            raise
        except BaseException:  # a library's panic is not an Exception
            logger.exception("A stream failed")
            self.cut = RequestError("internal_error", "The server failed on this request.")
            self._submission.leave()
        self._submission.forget()
        self.release()  # before any reader sees the end
        await self._append([self._builder.terminal(self._at_ms(), self.cut)])
        self.ended.set()

    def _keep_place(self) -> None:
        builder = self._builder
        self._counts = (builder.num_live, builder.num_waiting)
        self._place.update(*self._counts, builder.num_unread)

    def note_end(self, figures: RequestFigures, traces: Traces) -> None:
        """Tells figures, traces and log what became of it."""
        route, outcome = self.record.request.route, self.cut.code if self.cut else "finished"
        tally = self.tally
        usage, timings = figures.ended(route, outcome, tally, self._at_ms() / 1000)
        if traces.is_on:
            ingestion = self._builder.ingestion()
            traces.ended(span_of(self.record, tally, ingestion, self._at_ms() / 1000, self.cut))
        if self.record.adapter is not None:
            figures.adapted(self.record.adapter.name, outcome, tally)
        log_request(
            route,
            outcome,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            queue_ms=timings.queue_ms,
            prompt_ms=timings.prompt_ms,
            ttft_ms=tally.first_token_ms,
            max_gap_ms=timings.max_gap_ms,
            total_ms=self._at_ms(),
            readers=self.audience.num_joined,
            resumes=self.audience.num_resumed,
            recoveries=self._builder.num_recoveries,
        )

    def _take_step(self, items: list[Item], at_ms: int) -> None:
        """Take the results of one engine step for this stream; this runs for every token."""
        builder, parts = self._builder, self._submission.parts
        for item in items:
            # 1. Find the choice. Ignore a sequence that this stream has given up.
            choice = parts.get(item.sequence_id)
            if choice is None:
                continue
            # 2. A token shows that the engine has caught up with the one that died, and that this
            # stream did not kill it.
            if isinstance(item, NewToken):
                self._is_recovering = False
                if self._blame.is_suspect:
                    self._blame.clear()
            else:
                self._is_recovering = self._is_recovering and builder.has_tokens
                if isinstance(item, Finished):
                    self._check_end(choice, item)
            # 3. Add it to the choice's text. The engine cannot see a stop string, so its sequence
            # is ended from here.
            if builder.take(choice, item, at_ms):
                self._submission.stop(item.sequence_id)

    def _take(self, news: EngineUp | EngineDown | InQueue | Beat, at_ms: int) -> None:
        match news:
            case EngineUp():
                self._is_recovering = self._builder.has_begun
                self._submit()
            case EngineDown():
                self._forget_engine(news, at_ms)
            case InQueue():
                self._builder.queue.place = None if self._builder.has_begun else news
            case Beat():
                self._builder.beats.add(news, at_ms)

    def _check_end(self, choice: int, end: Finished) -> None:
        """Cuts the stream if the engine failed, or if the context has shrunk since admission."""
        context = self._smaller_context
        if end.finish is FinishReason.ERROR:
            self.stop(RequestError(end.code or "internal_error", end.message))
        elif (
            end.finish is FinishReason.LENGTH
            and context is not None
            and self._builder.is_cut_short(choice, context)
        ):
            message = f"The context is now {context} tokens, too few for the rest of this answer."
            self.stop(RequestError("model_changed", message))

    def _submit(self) -> None:
        """Submits what is left of the request to a new engine."""
        if self.cut:
            return
        live = self._builder.live()
        new = self._submission.open(choice.index for choice in live)
        request = self.record.request
        self._submission.submit(
            Submit(
                stream_id=self.record.id,
                prompts=self.record.prompts,
                inputs=self._admitted.inputs,
                sequences=tuple(
                    choice.as_sequence(sequence_id)
                    for sequence_id, choice in zip(new, live, strict=True)
                ),
                sampling=request.sampling,
                arrival=self._admitted_at,
                priority=request.priority,
                salt=salt_of(self.record.names.owner, request.cache_salt, self.record.adapter),
                use_prefix=request.cache_prompt and not request.echo,
                suspect=self._blame.is_suspect,
                client=self.record.names.owner,
                adapter=self.record.adapter,
            )
        )

    def _forget_engine(self, down: EngineDown, at_ms: int) -> None:
        """Forgets a dead engine: its news so far counts, the rest is lost."""
        poison = self._blame.judge(down, self._submission.forget())
        self._builder.end_stopped()
        self.cut = self.cut or poison
        if self.cut:
            self._inbox.put_nowait(None)
        elif self._builder.num_live:
            self._is_recovering = True
            self._builder.recover(at_ms)

    async def _append(self, new: Sequence[AnyEvent]) -> None:
        if new:
            await self.log.append(new[0].seq, new)

    def _at_ms(self) -> int:
        return int((time.monotonic() - self._admitted_at) * 1000)
