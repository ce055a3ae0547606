"""Defines the stream of a running request. Only this stream writes the request's log."""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Sequence
from functools import partial

from headrace.engines.client import EngineDown, EngineUp
from headrace.fleet.engine_users import EngineUsers, InQueue, Item, UserNews
from headrace.fleet.queue_eta import TokenDemand
from headrace.fleet.served_model import ServedModel
from headrace.generation.admission import QueueTicket
from headrace.generation.crash_blame import CrashBlame
from headrace.generation.event_builder import ChoiceProgress, EventBuilder
from headrace.generation.model_checks import check_can_begin, check_can_continue
from headrace.generation.readers import Audience
from headrace.generation.request_span import span_of
from headrace.generation.submission import Submission, salt_of
from headrace.generation.wait_news import HeartbeatNews
from headrace.metrics.metrics import RequestFigures
from headrace.metrics.traces import Traces
from headrace.streams.events import AnyEvent, Usage
from headrace.streams.log import Log, LogGone, LogTaken
from headrace.streams.record import Record
from headrace.streams.store import StoreStalled
from headrace.streams.usage import UsageCounter
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
    """Writes the log of one stream: takes the engine's messages in order and appends the events.

    An instance is created on admission, or from a stored log after a restart. `run` writes the log
    to the end. Until the end, the instance keeps the queue ticket and the prepared images.
    """

    def __init__(
        self,
        record: Record,
        builder: EventBuilder,
        log: Log,
        place: QueueTicket,
        admitted: Admitted,
        linger_s: float,
    ) -> None:
        self.record = record
        self.log = log
        self._ticket = place
        self._admitted = admitted
        self._limits: list[Countdown] = []
        # The stream's number in this process.
        self.number = next(_numbers)
        # The error that cut the stream, or None.
        self.cut: RequestError | None = None
        self.ended = asyncio.Event()
        self.audience = Audience(
            log,
            record.names.outlives_client_s(linger_s),
            on_abandoned=self._abandon,
            others_wait=lambda: place.others_wait,
        )
        self._builder = builder
        # None in the inbox makes the stream end without waiting for the engine.
        self._inbox: asyncio.Queue[UserNews | HeartbeatNews | None] = asyncio.Queue()
        self._submission = Submission(self)
        self._blame = CrashBlame()
        # The context length, if it has shrunk since admission.
        self._smaller_context: int | None = None
        # True until the new engine has caught up with the dead engine.
        self._is_recovering = builder.has_begun
        self._admitted_at = time.monotonic() - builder.last_ms / 1000
        # The numbers of live and waiting choices last reported to the queue ticket.
        self._counts = (0, 0)
        self._update_ticket()

    # The methods below are called by other objects.

    def begin(self, model: ServedModel, engine: EngineUsers, up: EngineUp) -> None:
        """Submit the unfinished choices, or end the stream if the engine's model cannot continue.

        The model's settings may have changed since the stream was admitted.
        """
        builder = self._builder
        try:
            if model.ready is not None and model.ready is self._admitted.ready:
                # The model has not changed since the stream was admitted.
                pass
            elif self._is_loading or builder.serving.known is None:
                check_can_begin(self.record, model)
                builder.serving.begin(model)
            else:
                context = check_can_continue(*builder.serving.known, builder.num_tokens, model)
                self._smaller_context = context
            self._submission.move_to(engine)
        except RequestError as change:
            self.end_now(change)
        self.tell(up)

    def lose(self, error: RequestError) -> None:
        """Do nothing: Generation ends the stream, or keeps a durable stream for a later engine."""

    @property
    def _is_loading(self) -> bool:
        """Return whether the stream has not started because its model is still loading."""
        return self._submission.engine is None and not self._builder.has_begun

    @property
    def state(self) -> str:
        """Return loading, queued, prompt, decode or recovering; valid until the log has ended."""
        if self._is_recovering:
            return "recovering"
        if self._is_loading:
            return "loading"
        if not self._builder.has_begun:
            return "queued"
        return "decode" if self._builder.has_tokens else "prompt"

    @property
    def num_readers(self) -> int:
        """Return the current number of readers."""
        return self.audience.num_readers

    @property
    def silent_s(self) -> float:
        """Return the seconds since the stream's last event that is not a heartbeat.

        Returns 0 for background requests, which are expected to wait.
        """
        if self.record.request.is_background:
            return 0.0
        return (self._at_ms() - self._builder.news_ms) / 1000

    @property
    def tally(self) -> UsageCounter:
        """Return the token counts and timings so far."""
        return self._builder.tally

    def choice_progress(self) -> dict[SequenceId, ChoiceProgress]:
        """Return the progress of the choices that the engine has started, by sequence id."""
        by_choice = {standing.choice: standing for standing in self._builder.choice_progress()}
        parts = self._submission.parts.items()
        return {number: by_choice[choice] for number, choice in parts if choice in by_choice}

    def asked(self, sequence_id: SequenceId) -> TokenDemand:
        """Return how many tokens one of this stream's sequences needs.

        The choices of one prompt share the prompt, so only the first choice counts the prompt's
        tokens.
        """
        choice = self._submission.parts.get(sequence_id)
        if choice is None:
            return TokenDemand(0, 0)
        request = self.record.request
        prompt, number = divmod(choice, request.n)
        limit = request.sampling.max_tokens
        num_prompt = 0 if number else len(self.record.prompts[prompt]) // 4
        return TokenDemand(num_prompt, math.inf if limit is None else limit)

    def tell(self, news: UserNews | HeartbeatNews) -> None:
        """Queue a message for the writer."""
        self._inbox.put_nowait(news)

    def stop(self, error: RequestError) -> None:
        """Cut the stream with this error, after the engine has ended the stream's sequences.

        Idempotent.
        """
        if self.ended.is_set() or self.cut:
            return
        self.cut = error
        if self._submission.parts:
            self._submission.cancel()
        else:
            self._inbox.put_nowait(None)

    def end_now(self, error: RequestError) -> None:
        """Cut the stream without waiting for an engine that will not answer."""
        self.cut = self.cut or error
        self._inbox.put_nowait(None)

    def set_queue_position(self, place: InQueue) -> None:
        """Report the queue position if a report is due.

        Reports are rare, because thousands of streams may be waiting.
        """
        if not self._builder.has_begun and self._builder.queue.wants(place, self._at_ms()):
            self.tell(place)

    def end_within(self, queue_s: float, request_s: float) -> None:
        """Cut the stream if it has not started within `queue_s` or ended within `request_s`.

        Both times count from admission, and 0 means no limit. A stream whose engine died has no
        `queue_s` limit any more.
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
        message = (
            f"The request took longer than its limit of {seconds:g} s; ask for a shorter answer."
        )
        self.stop(RequestError("request_timeout", message))

    def beat(self, form: str, interval_s: float) -> None:
        """Write a heartbeat into the log, for protocols that resume by byte position.

        All readers share the heartbeats: a second call within half an interval adds nothing.
        """
        if self._builder.beats.wants(form, interval_s, self._at_ms()):
            self.tell(HeartbeatNews(self.state, form))

    def set_load_progress(self, progress: float | None, stage: str) -> None:
        """Report how far the model is loaded; `progress` is None while the progress is unknown."""
        self.tell(HeartbeatNews("loading", "data", progress=progress, stage=stage))

    def check_log(self) -> None:
        """Append a heartbeat. The append fails if another server has taken over the log."""
        self.tell(HeartbeatNews(self.state, "comment"))

    def release(self) -> None:
        """Release the place in the queue, the prepared images and the time limits. Idempotent.

        The record stays in memory until `close`, as readers may still need it.
        """
        for limit in self._limits:
            limit.cancel()
        self._limits.clear()
        if self._admitted.pixels is not None:
            self._admitted.close()
        self._ticket.leave(self.record.num_input_bytes)

    def close(self) -> None:
        """Stop counting the input, because the stream is not used any more."""
        self._ticket.close()

    def _abandon(self) -> None:
        # Usually the last reader leaves after the stream's end, when there is nothing to stop.
        if not self.ended.is_set():
            self.stop(RequestError("client_gone", "The client left before the answer ended."))

    # The methods below belong to the writer.

    async def accept(self) -> None:
        """Write the first event."""
        await self.log.append(0, [self._builder.accepted()])

    async def run(self) -> None:
        """Write all events after the first event; the terminal event is the last.

        The inbox orders everything that can happen to a stream. An entry is a list with one
        step's results, another message, or None to end the stream now. Each entry changes the
        state, and the resulting events are appended before the next entry is read.

        The task ends without a terminal event if the store stalls, if another server takes over the
        log, or if this task is cancelled: another writer continues the log. The same holds if the
        log was deleted. Any other failure ends the stream with `internal_error`.
        """
        try:
            builder = self._builder
            # The tokens of an earlier process may already end a choice.
            if builder.has_begun:
                await self._append(builder.new_events(self._at_ms(), is_cut=bool(self.cut)))
            while builder.num_live and (news := await self._inbox.get()) is not None:
                at_ms = int((time.monotonic() - self._admitted_at) * 1000)
                if isinstance(news, list):
                    self._take_step(news, at_ms)
                else:
                    self._take(news, at_ms)
                if (builder.num_live, builder.num_waiting) != self._counts:
                    self._update_ticket()
                if new := builder.new_events(at_ms, is_cut=bool(self.cut)):
                    await self.log.append(new[0].seq, new)
        except (StoreStalled, LogTaken, LogGone, *STEERING):
            self._submission.leave()
            raise
        # Catch BaseException, because a panic in a native library is not an Exception.
        except BaseException:
            logger.exception("A stream failed")
            self.cut = RequestError("internal_error", "The server failed on this request.")
            self._submission.leave()
        self._submission.forget()
        # Release the ticket and the images before any reader sees the end.
        self.release()
        end = self._builder.terminal(self._at_ms(), self.cut)
        await self.log.append(end.seq, [end])
        self.ended.set()

    def _update_ticket(self) -> None:
        builder = self._builder
        self._counts = (builder.num_live, builder.num_waiting)
        self._ticket.update(*self._counts, builder.num_unread)

    def note_end(self, figures: RequestFigures, traces: Traces) -> Usage:
        """Report the end to the metrics, the traces and the server's log; return the usage."""
        route, outcome = self.record.request.route, self.cut.code if self.cut else "finished"
        tally, total_ms = self._builder.tally, self._at_ms()
        usage, timings = figures.ended(route, outcome, tally, total_ms / 1000)
        if traces.is_on:
            ingestion = self._builder.ingestion()
            traces.ended(span_of(self.record, tally, ingestion, total_ms / 1000, self.cut))
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
            total_ms=total_ms,
            readers=self.audience.num_joined,
            resumes=self.audience.num_resumed,
            recoveries=self._builder.num_recoveries,
        )
        return usage

    def _take_step(self, items: list[Item], at_ms: int) -> None:
        """Process the results of one engine step for this stream. This code runs for every
        token.
        """
        builder, parts = self._builder, self._submission.parts
        for item in items:
            # 1. Find the choice. Ignore a sequence that no longer belongs to this stream.
            choice = parts.get(item.sequence_id)
            if choice is None:
                continue
            # 2. A token shows that the new engine has caught up with the dead engine, and that this
            # stream did not kill the engine.
            if isinstance(item, NewToken):
                self._is_recovering = False
                if self._blame.is_suspect:
                    self._blame.clear()
            else:
                self._is_recovering = self._is_recovering and builder.has_tokens
                if isinstance(item, Finished):
                    self._check_end(choice, item)
            # 3. Add the result to the choice. The engine does not know stop strings, so end the
            # sequence here if the text contains a stop string.
            if builder.take(choice, item, at_ms):
                self._submission.stop(item.sequence_id)

    def _take(self, news: EngineUp | EngineDown | InQueue | HeartbeatNews, at_ms: int) -> None:
        match news:
            case EngineUp():
                self._is_recovering = self._builder.has_begun
                self._submit()
            case EngineDown():
                self._forget_engine(news, at_ms)
            case InQueue():
                self._builder.queue.move_to(None if self._builder.has_begun else news)
            case HeartbeatNews():
                self._builder.beats.add(news, at_ms)

    def _check_end(self, choice: int, end: Finished) -> None:
        """Cut the stream if the engine failed, or if the context has shrunk since admission."""
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
        """Submit the unfinished choices to a new engine."""
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
        """Handle the death of an engine: keep the results received so far; all other results are
        lost.
        """
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
