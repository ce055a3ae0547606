"""Defines invented faults of many kinds, for `stress.simulated_server.planted`."""

from stress.simulated_server.planting import Edit, Fault

_ROWS = "headrace.streams.stores.sqlite_rows"
_STREAM = "headrace.generation.stream:LiveStream"
_REGISTRY = "headrace.generation.registry:Registry"
_DELIVERY = "headrace.gateway.delivery:LiveAnswer"

STREAMS: dict[str, Fault] = {
    "the_end_of_a_log_wakes_nobody": Fault(
        "lost wake-up",
        "A reader that waits for the end of an answer never receives the end.",
        (
            Edit(
                "headrace.streams.log:Tail.extend",
                "if self._waiting:",
                "if self._waiting and not self.has_ended:",
            ),
        ),
    ),
    "the_log_is_not_synced": Fault(
        "missing sync",
        "After a power failure, text that a client has received is gone.",
        (
            Edit(
                "headrace.streams.stores.sqlite_schema:connect",
                'connection.execute("PRAGMA synchronous = FULL")',
                'connection.execute("PRAGMA synchronous = OFF")',
            ),
        ),
    ),
    "events_are_published_before_their_commit": Fault(
        "published before commit",
        "A reader gets events that a kill then removes from the log.",
        (
            Edit(
                "headrace.streams.stores.sqlite:_StoredLog.append",
                "await self._store._writer.write(work, publish, num_bytes=len(batch.data))",
                """
                publish(None)
                await self._store._writer.write(work, _nothing, num_bytes=len(batch.data))
                """,
            ),
        ),
    ),
    "a_stream_without_tokens_is_forgotten_at_restart": Fault(
        "stream forgotten",
        "A request that was accepted just before a kill is never answered.",
        (
            Edit(
                f"{_ROWS}:claim_unfinished",
                'found = [_read_through(db, row) for row in _select(db, "ended_at IS NULL")]',
                """
                live = _select(db, "ended_at IS NULL AND next_seq > 1")
                found = [_read_through(db, row) for row in live]
                """,
            ),
        ),
    ),
    "a_reader_one_event_behind_memory_skips": Fault(
        "cursor off by one",
        "A reader that falls behind by 32 events loses an event.",
        (
            Edit(
                "headrace.streams.log:Tail.read",
                "return self.events[start : start + limit] if start >= 0 else None",
                """
                first = max(0, start)
                return self.events[first : first + limit] if start >= -1 else None
                """,
            ),
        ),
    ),
    "a_reader_resumes_one_event_too_late": Fault(
        "cursor off by one",
        "A client that resumes loses one event.",
        (
            Edit(
                "headrace.gateway.native_routes:Cursor.after",
                "return self.seq if self.part is None else self.seq - 1",
                "return self.seq + (self.seq >= 0) if self.part is None else self.seq - 1",
            ),
        ),
    ),
    "a_byte_reader_skips_one_byte_too_few": Fault(
        "cursor off by one",
        "A client that resumes at a byte gets the byte before it again.",
        (
            Edit(
                "headrace.gateway.byte_routes:ByteView._cut",
                "self._to_skip -= skipped",
                "self._to_skip -= skipped + (0 < skipped < len(frame) and skipped > 2)",
            ),
        ),
    ),
    "a_durable_page_ends_one_offset_early": Fault(
        "cursor off by one",
        "A client of Durable Streams gets the last message of a page twice.",
        (
            Edit(
                "headrace.gateway.durable_routes:_Reading.page",
                "is_up_to_date = end >= log.next_seq",
                """
                is_up_to_date = end >= log.next_seq
                end -= end - start > 1 and not has_ended
                """,
            ),
        ),
    ),
    "a_key_is_free_at_the_end_of_its_stream": Fault(
        "key freed too early",
        "A retry with an idempotency key computes a second answer.",
        (
            Edit(
                f"{_ROWS}:make_batch",
                "return WriteBatch(first_seq, len(events), _encode(events), is_terminal(last), "
                "frees_key(last))",
                "return WriteBatch(first_seq, len(events), _encode(events), is_terminal(last), "
                "is_terminal(last))",
            ),
        ),
    ),
    "a_lookup_does_not_repeat_its_query": Fault(
        "thread against loop",
        "A request for a stream that was just created or has just ended fails.",
        (
            Edit(
                "headrace.streams.stores.sqlite:SqliteStore._ask",
                "if all(row.has_ended or row.record.id in self._live for row in sound):",
                "if True:",
            ),
        ),
    ),
    "the_timer_of_a_commit_is_not_cancelled": Fault(
        "timer not cancelled",
        "The store counts as stalled although each commit was fast.",
        (
            Edit(
                "headrace.streams.stores.sqlite_writer:Writer._committed",
                "self._watch.cancel()",
                "",
            ),
        ),
    ),
    "readers_stay_paused_after_a_stall": Fault(
        "flag not cleared",
        "After a short stall of the disk, no client can read a running stream.",
        (Edit(f"{_REGISTRY}.unpause", "stream.audience.pause.clear(reason)", ""),),
    ),
}

GENERATION: dict[str, Fault] = {
    "a_cut_stream_keeps_its_ticket": Fault(
        "queue ticket leaked",
        "After some cancelled requests the queue counts as full for good.",
        (Edit(f"{_STREAM}.release", "self._ticket.leave(self.record.num_input_bytes)", ""),),
    ),
    "a_recovered_stream_submits_twice": Fault(
        "submitted twice",
        "After a restart of the engine, an answer contains tokens twice.",
        (
            Edit(
                f"{_STREAM}._take",
                """
                self._is_recovering = self._builder.has_begun
                self._submit()
                """,
                """
                self._is_recovering = self._builder.has_begun
                self._submit()
                if self._is_recovering:
                    self._submit()
                """,
            ),
        ),
    ),
    "the_end_precedes_the_last_token": Fault(
        "order of two events",
        "The last tokens of an answer are missing.",
        (
            Edit(
                "headrace.fleet.engine_users:EngineUsers.deliver",
                """
                for items in (
                    outputs.started,
                    outputs.prompt_logprobs,
                    outputs.progress,
                    outputs.guessed,
                    outputs.tokens,
                    outputs.finished,
                ):
                """,
                """
                for items in (
                    outputs.started,
                    outputs.prompt_logprobs,
                    outputs.progress,
                    outputs.guessed,
                    outputs.finished,
                    outputs.tokens,
                ):
                """,
            ),
        ),
    ),
    "a_waiting_reader_takes_any_new_stream": Fault(
        "wrong stream",
        "A client gets the answer of another request.",
        (
            Edit(
                f"{_REGISTRY}.wrap",
                "await self.unless_stalled(stored.record, changed)",
                """
                await self.unless_stalled(stored.record, changed)
                if added.is_set() and self._live:
                    return next(reversed(self._live.values()))
                """,
            ),
        ),
    ),
    "an_old_writer_removes_the_new_one": Fault(
        "check removed",
        "After a stall of the disk, a running stream cannot be found or stopped.",
        (
            Edit(
                f"{_REGISTRY}.remove",
                "if self._live.get(stream.record.id) is stream:",
                "if stream.record.id in self._live:",
            ),
        ),
    ),
    "the_linger_time_runs_on": Fault(
        "timer not cancelled",
        "A client that came back in time loses its answer.",
        (
            Edit(
                "headrace.generation.readers:Audience._stop_lingering",
                "self._linger.cancel()",
                "",
            ),
        ),
    ),
    "an_abandoned_stream_goes_on": Fault(
        "work without an owner",
        "The engine computes answers that nobody can read.",
        (Edit("headrace.generation.readers:Audience._give_up", "self._on_abandoned()", ""),),
    ),
    "a_drain_waits_for_the_engine": Fault(
        "drain without end",
        "A stop takes as long as an engine that hangs or loads.",
        (
            Edit(
                "headrace.generation.generation:Generation.drain",
                "stream.end_now(_SHUTS_DOWN)",
                "stream.stop(_SHUTS_DOWN)",
            ),
        ),
    ),
    "a_drain_has_no_limit": Fault(
        "drain without end",
        "A stop waits until the last stream has ended.",
        (
            Edit(
                "headrace.generation.generation:Generation.drain",
                "await asyncio.wait(ends, timeout=seconds)",
                "await asyncio.wait(ends)",
            ),
        ),
    ),
    "the_sweep_cannot_be_cancelled": Fault(
        "cancellation swallowed",
        "The server does not stop.",
        (
            Edit(
                "headrace.generation.store_tasks:sweep",
                "with contextlib.suppress(TimeoutError):",
                "with contextlib.suppress(TimeoutError, asyncio.CancelledError):",
            ),
        ),
    ),
    "vectors_are_not_computed_again": Fault(
        "job lost",
        "An embedding request waits forever after the death of its engine.",
        (
            Edit(
                "headrace.generation.vector_batch:VectorBatch._forget_engine",
                "self._remaining.extendleft(sorted(lost.values(), reverse=True))",
                "",
            ),
        ),
    ),
}

WORKERS: dict[str, Fault] = {
    "a_job_is_lost_with_its_worker": Fault(
        "job lost",
        "A request whose worker was killed waits forever.",
        (
            Edit(
                "headrace.workers.pool:_Worker._do",
                "if verdict is not None:",
                "if True:",
            ),
            Edit(
                "headrace.workers.pool:_Worker._do",
                """
                job.refuse(verdict)
                return
                """,
                "return",
            ),
            Edit(
                "headrace.workers.job_queue:JobQueue.finish",
                """
                if not job.done.done():
                    job.refuse(SHUTDOWN)
                """,
                "",
            ),
        ),
    ),
    "a_worker_swallows_its_cancellation": Fault(
        "cancellation swallowed",
        "The server does not stop if a worker has a job.",
        (
            Edit(
                "headrace.workers.pool:_Worker._do",
                "except (EOFError, ConnectionError, TimeoutError):",
                "except (EOFError, ConnectionError, TimeoutError, asyncio.CancelledError):",
            ),
        ),
    ),
    "two_workers_take_one_spare_process": Fault(
        "double claim",
        "Two requests get each other's results.",
        (
            Edit(
                "headrace.workers.pool:_ProcessSource.take",
                "spare, self._spare = self._spare, None",
                "spare = self._spare",
            ),
            Edit(
                "headrace.workers.pool:_ProcessSource.take",
                "await spare.end()",
                """
                self._spare = None
                await spare.end()
                """,
            ),
        ),
    ),
    "a_done_job_counts_as_running": Fault(
        "quota not returned",
        "A key that had a few requests can read no body any more.",
        (
            Edit(
                "headrace.workers.job_queue:JobQueue.finish",
                "self._running.discard(job)",
                "",
            ),
        ),
    ),
    "a_worker_is_not_told_of_a_job": Fault(
        "lost wake-up",
        "A request waits until another request wakes the workers.",
        (
            Edit(
                "headrace.workers.job_queue:JobQueue.next",
                """
                while (job := self._take(takes_large)) is None:
                    self._has_changed.clear()
                    await self._has_changed.wait()
                """,
                """
                while (job := self._take(takes_large)) is None:
                    await asyncio.sleep(0)
                    self._has_changed.clear()
                    await self._has_changed.wait()
                """,
            ),
        ),
    ),
}

ENGINES: dict[str, Fault] = {
    "a_hanging_engine_is_not_killed": Fault(
        "watchdog",
        "All requests wait for an engine that hangs in a step.",
        (
            Edit(
                "headrace.engines.supervisor:PingMonitor._is_overdue",
                "return self._child.step_record.is_overdue(time.monotonic(), self._awake_since)",
                "return False",
            ),
        ),
    ),
    "a_mute_engine_is_not_killed": Fault(
        "watchdog",
        "An engine that answers no pings is never replaced.",
        (
            Edit(
                "headrace.engines.supervisor:PingMonitor.watch",
                "self._num_silent += 1",
                "self._num_silent = 0",
            ),
        ),
    ),
    "a_stop_during_a_start_is_missed": Fault(
        "await after a check",
        "The server does not stop if an engine is just being started.",
        (
            Edit(
                "headrace.engines.supervisor:Supervisor._live_once",
                """
                if self._closing.is_set():
                    # `close` ran during the spawn and found no child to kill.
                    child.kill()
                """,
                "",
            ),
        ),
    ),
    "the_first_stream_is_not_told_of_a_death": Fault(
        "news lost",
        "After a restart of the engine, an answer has tokens of two engines.",
        (
            Edit(
                "headrace.fleet.engine_users:EngineUsers.pause",
                """
                else:
                    user.tell(news)
                """,
                """
                elif user is not next(iter(self)):
                    user.tell(news)
                """,
            ),
        ),
    ),
    "ended_sequences_keep_their_owner": Fault(
        "growth",
        "The server's memory grows with each request.",
        (
            Edit(
                "headrace.fleet.engine_users:EngineUsers.forget",
                "self._owners.pop(sequence_id, None)",
                "",
            ),
        ),
    ),
}

FLEET: dict[str, Fault] = {
    "a_stream_keeps_its_use_of_the_model": Fault(
        "lease leaked",
        "A model that no stream uses can never be unloaded.",
        (
            Edit(
                "headrace.generation.writers:Writers._write",
                "self._fleet.release(used)",
                "",
            ),
        ),
    ),
    "a_client_that_leaves_keeps_the_model": Fault(
        "lease leaked",
        "A model cannot be unloaded after a client left in the wrong moment.",
        (
            Edit(
                "headrace.fleet.fleet:Fleet.enter",
                "if ticket.has_entered:",
                "if False:",
            ),
        ),
    ),
    "the_end_of_a_use_moves_nobody": Fault(
        "lost wake-up",
        "A request for a model waits though the memory is free.",
        (Edit("headrace.fleet.fleet:Fleet.release", "self._apply_moves()", ""),),
    ),
    "a_request_enters_during_the_shutdown": Fault(
        "await after a check",
        "A request that came during a shutdown waits until it is cut.",
        (
            Edit(
                "headrace.fleet.fleet:Fleet.enter",
                """
                if self._refusal.done():
                    raise self._refusal.result().with_traceback(None)
                """,
                "",
            ),
        ),
    ),
    "a_free_replica_takes_no_queued_request": Fault(
        "lost wake-up",
        "A queued request waits though an engine is free.",
        (
            Edit(
                "headrace.fleet.replicas:Replicas._release",
                """
                if outputs.finished:
                    self._assign()
                """,
                "if outputs.finished:",
            ),
        ),
    ),
    "an_ended_request_keeps_its_replica": Fault(
        "quota not returned",
        "Replicas count as full and get no more requests.",
        (
            Edit(
                "headrace.fleet.request_queue:RequestQueue.release",
                "self.placement.release(part)",
                "",
            ),
        ),
    ),
}

BATCHES: dict[str, Fault] = {
    "a_written_result_is_not_counted": Fault(
        "order of two events",
        "A line of a stopped batch gets a second result.",
        (
            Edit(
                "headrace.batches.run:BatchRun._append",
                "self._done.update(it.number for it in mine)",
                "",
            ),
        ),
    ),
    "a_restarted_batch_reads_no_results": Fault(
        "cursor off by one",
        "After a restart, lines of a batch are answered twice.",
        (
            Edit(
                "headrace.batches.lines:answered",
                "numbers.add(int(found[1]))",
                "numbers.add(int(found[1]) - 1)",
            ),
        ),
    ),
    "a_torn_result_stays": Fault(
        "torn write",
        "A result file has half a line after a power failure.",
        (
            Edit(
                "headrace.batches.folder:_prepare",
                "return _whole_lines(descriptor, os.fstat(descriptor).st_size)",
                "return os.fstat(descriptor).st_size",
            ),
        ),
    ),
    "a_result_is_not_synced": Fault(
        "missing sync",
        "Results of a batch are gone after a power failure.",
        (Edit("headrace.batches.folder:_write", "os.fsync(descriptor)", ""),),
    ),
    "the_last_line_wakes_nobody": Fault(
        "lost wake-up",
        "A batch with all results never ends.",
        (Edit("headrace.batches.run:BatchRun._write", "self._changed.set()", ""),),
    ),
    "a_batch_is_claimed_twice": Fault(
        "double claim",
        "Two servers run the same batch.",
        (
            Edit(
                "headrace.batches.redis_store:RedisRecords.claim",
                "claims = self._claims",
                "claims = self._claims",
            ),
            Edit(
                "headrace.batches.redis_store:_CLAIM",
                "if holder ~= ARGV[1] and",
                "if false and",
            ),
        ),
    ),
    "an_upload_keeps_its_quota": Fault(
        "quota not returned",
        "A key can upload nothing more after some uploads.",
        (
            Edit(
                "headrace.batches.files:Upload.__aexit__",
                "self._files.count(self._owner, -self.num_bytes)",
                "",
            ),
        ),
    ),
}

GATEWAY: dict[str, Fault] = {
    "heartbeats_stop_with_the_first_token": Fault(
        "heartbeat stops",
        "Clients give up while an engine restarts.",
        (
            Edit(
                f"{_DELIVERY}._due",
                """
                return min(
                    self._data_at + self.pace.heartbeat_s,
                    self._byte_at + self.pace.ping_s,
                    self._sign_at + self.pace.sign_s,
                )
                """,
                """
                return math.inf if self._stream.audience.has_seen_tokens else min(
                    self._data_at + self.pace.heartbeat_s,
                    self._byte_at + self.pace.ping_s,
                    self._sign_at + self.pace.sign_s,
                )
                """,
            ),
        ),
    ),
    "heartbeats_go_on_after_the_answer": Fault(
        "task not cancelled",
        "Each answer leaves a task behind.",
        (Edit(f"{_DELIVERY}._deliver", "beating.cancel()", "pass"),),
    ),
    "a_heartbeat_interrupts_a_frame": Fault(
        "lock removed",
        "A heartbeat follows the end of an answer.",
        (
            Edit(
                f"{_DELIVERY}._write",
                """
                async with self._writing:
                    if self._has_ended:
                        return
                """,
                """
                if True:
                    await asyncio.sleep(0)
                """,
            ),
        ),
    ),
    "the_counts_of_a_body_are_not_locked": Fault(
        "lock removed",
        "Two readers of one stream count its bytes twice.",
        (
            Edit(
                "headrace.gateway.body_index:_Counts.extend",
                "async with self._counting:",
                "if True:",
            ),
        ),
    ),
}

INTAKE: dict[str, Fault] = {
    "a_whole_answer_skips_an_event": Fault(
        "cursor off by one",
        "A unary answer misses text where two pages of its log meet.",
        (
            Edit(
                "headrace.intake.answers:AnswerBody.gather",
                "after += len(page)",
                "after += len(page) + (len(page) > 2 and not has_ended)",
            ),
        ),
    ),
    "an_equal_request_is_not_looked_for": Fault(
        "key freed too early",
        "A retry of a key with another body gets the old answer.",
        (
            Edit(
                "headrace.generation.registry:_check_same",
                "if record.names.digest != names.digest:",
                "if False:",
            ),
        ),
    ),
}

FAULTS: dict[str, Fault] = {
    **STREAMS,
    **GENERATION,
    **WORKERS,
    **ENGINES,
    **FLEET,
    **BATCHES,
    **GATEWAY,
    **INTAKE,
}
"""All invented faults, by name."""
