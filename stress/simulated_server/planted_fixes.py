"""Undoes fixes of faults that the server once had, for `stress.simulated_server.planted`.

Each of these faults was found by reading: two tasks, or a task and a kill, met in an order that no
test had tried.
"""

from stress.simulated_server.planting import Edit, Fault

_RESUME = "headrace.generation.resume:Resumption"
_WRITERS = "headrace.generation.writers:Writers"
_PULLS = "headrace.fleet.pulls:Pulls"

STREAMS: dict[str, Fault] = {
    "a_kept_stream_resumes_during_its_last_append": Fault(
        "append still pending",
        "A stream ends as an error after its model came back.",
        (Edit(f"{_RESUME}._resume_kept", "await stored.log.settle()", ""),),
    ),
    "a_stream_without_a_log_is_waited_for": Fault(
        "lost wake-up",
        "A client that looks for a stream whose log failed waits forever.",
        (
            Edit(
                f"{_WRITERS}._write",
                "self._streams.close(failure, stream.record.id)",
                "",
            ),
        ),
    ),
    "a_stop_waits_for_a_stream_that_was_let_go": Fault(
        "lost wake-up",
        "A stop waits forever if the engine is given up at the same time.",
        (
            Edit(f"{_WRITERS}._write", "stream.ended.set()", ""),
            *(
                Edit(
                    f"{_WRITERS}._write",
                    f"except {error}:",
                    f"""
                    except {error}:
                        stream.ended.set()
                    """,
                )
                for error in ("LogTaken", "Exception as error")
            ),
        ),
    ),
    "a_kept_stream_forgets_that_it_was_stopped": Fault(
        "state lost",
        "A stream that was stopped goes on once its model is back.",
        (
            Edit(
                "headrace.generation.registry:Registry.add",
                "stream.stop(stop)",
                "pass",
            ),
        ),
    ),
    "a_stored_stream_gets_no_writer": Fault(
        "cancellation cuts work",
        "A request that was given up while its stream was being stored never ends.",
        (
            Edit(
                "headrace.generation.generation:Generation._admit",
                "return await uncut(starting)",
                "return await starting",
            ),
        ),
    ),
    "a_resumed_stream_does_not_hold_its_model": Fault(
        "lease missing",
        "A stream is left without an engine if its model is removed meanwhile.",
        (
            Edit(f"{_RESUME}._resume", "self._fleet.hold(host)", ""),
            Edit(f"{_RESUME}._resume", "self._fleet.release(host)", ""),
        ),
    ),
    "a_creation_is_repeated_after_a_takeover": Fault(
        "not idempotent",
        "A stream that another gateway has ended and deleted is generated again.",
        (
            Edit(
                "headrace.streams.stores.redis_scripts:CREATE",
                "(is_again and call('EXISTS', P .. 'd:' .. id) == 1)",
                "false",
            ),
        ),
    ),
    "an_old_writer_gives_its_stream_away": Fault(
        "state lost",
        "A stream that a gateway has taken back cannot be found for a while.",
        (
            Edit(
                "headrace.streams.stores.redis_tails:LiveTails.lose",
                "if self.own.get(id) == epoch:",
                "if id in self.own:",
            ),
        ),
    ),
    "a_lost_stream_counts_as_a_bug": Fault(
        "error not expected",
        "The log has a traceback for each stream that a failover of Redis has lost.",
        (
            Edit(
                "headrace.generation.stream:LiveStream.run",
                "except (StoreStalled, LogTaken, LogGone, *STEERING):",
                "except (StoreStalled, LogTaken, *STEERING):",
            ),
        ),
    ),
    "lost_events_are_not_stored_again": Fault(
        "state lost",
        "A failover of Redis ends streams whose writer still has all of their events.",
        (
            Edit(
                "headrace.streams.stores.redis_writer:Appends._mend",
                "missing = self._tails.recent(id, next_seq, events[0].seq)",
                "missing = None",
            ),
        ),
    ),
    "a_restored_epoch_has_two_writers": Fault(
        "check missing",
        "Two gateways write a stream after a failover has undone a takeover.",
        (
            Edit(
                "headrace.streams.stores.redis_scripts:APPEND",
                "if found[1] ~= epoch or found[4] ~= gateway then return 'taken' end",
                "if found[1] ~= epoch then return 'taken' end",
            ),
        ),
    ),
    "a_stall_ends_a_stream_with_a_key": Fault(
        "error passed on",
        "A client that repeats a refused request gets an error instead of its answer.",
        (
            Edit(
                "headrace.generation.generation:Generation._begin",
                "if record.names.key is None or not isinstance(error, RequestError):",
                "if True:",
            ),
        ),
    ),
    "a_heartbeat_waits_for_the_last_frame": Fault(
        "await after a check",
        "A heartbeat follows the end of an answer if its reader is slow.",
        (
            Edit(
                "headrace.gateway.delivery:LiveAnswer._write",
                "self._has_ended = is_last",
                "",
            ),
        ),
    ),
    "an_unreadable_message_ends_the_feed": Fault(
        "error passed on",
        "One damaged message of another server ends all streams of this server.",
        (
            Edit(
                "headrace.streams.stores.redis_tails:LiveTails._receive",
                "except (*UNREADABLE, LookupError):",
                "except ZeroDivisionError:",
            ),
        ),
    ),
}

FLEET: dict[str, Fault] = {
    "an_adapter_waits_for_a_dead_replica": Fault(
        "lost wake-up",
        "A read of an adapter waits forever, and all loads behind it.",
        (Edit("headrace.fleet.engine_users:EngineUsers.move", "self._stop_reading()", ""),),
    ),
    "a_model_is_not_held_while_it_is_read": Fault(
        "lease missing",
        "A model that is deleted as it arrives is downloaded again.",
        (
            Edit("headrace.fleet.fleet:Fleet.fetch", "self.hold(host)", ""),
            Edit("headrace.fleet.fleet:Fleet._fetch", "self.release(host)", "pass"),
        ),
    ),
    "a_damaged_model_ends_the_server": Fault(
        "error passed on",
        "An I/O error while a stream is resumed ends the server at each start.",
        (
            Edit(
                f"{_RESUME}._resume_at",
                "except ModelError as error:",
                "except ZeroDivisionError as error:",
            ),
        ),
    ),
    "a_pull_is_shown_before_it_is_saved": Fault(
        "published before commit",
        "A download that a client saw is forgotten by a restart.",
        (
            Edit(
                f"{_PULLS}._run",
                """
                await self._save()
                logger.info("Downloading %s", pull.model)
                """,
                'logger.info("Downloading %s", pull.model)',
            ),
        ),
    ),
    "a_deleted_pull_is_deleted_twice": Fault(
        "await after a check",
        "One of two deletions of a model that is being downloaded fails.",
        (
            Edit(
                f"{_PULLS}.forget",
                "if self._pulls.get(model) is not pull:",
                "if False:",
            ),
        ),
    ),
    "a_stopped_pull_stays_downloading": Fault(
        "state lost",
        "A client that waits for a stopped download never gets an answer.",
        (
            Edit(
                f"{_PULLS}._end",
                """
                while pull.state == "downloading":
                    if (task := pull.task) is not None:
                        task.cancel()
                        await asyncio.wait([task])
                    if pull.task is task and pull.state == "downloading":
                        pull.settle("stopped")
                """,
                """
                if (task := pull.task) is not None:
                    task.cancel()
                    await asyncio.wait([task])
                """,
            ),
        ),
    ),
    "a_restarted_pull_counts_as_stopped": Fault(
        "await after a check",
        "A download that was started again during its stop is shown as stopped.",
        (
            Edit(
                f"{_PULLS}._end",
                'if pull.task is task and pull.state == "downloading":',
                'if pull.state == "downloading":',
            ),
        ),
    ),
}

BATCHES: dict[str, Fault] = {
    "an_ended_batch_runs_again": Fault(
        "check missing",
        "A batch that ended is run again and never ends.",
        (
            Edit(
                "headrace.batches.batches:Batches._look",
                "if batch is None or batch.has_ended:",
                "if batch is None:",
            ),
        ),
    ),
    "an_unlisted_batch_never_runs": Fault(
        "job lost",
        "A batch that was created just before a kill never ends.",
        (
            Edit(
                "headrace.batches.batches:Batches._sweep",
                "elif not batch.has_ended and batch.id.encode() not in listed:",
                "elif False:",
            ),
        ),
    ),
    "a_cancelled_write_is_overtaken": Fault(
        "cancellation cuts work",
        "A removed file comes back and stays until a restart.",
        (
            Edit(
                "headrace.batches.folder:_InThread._do",
                "return await uncut(doing, _PATIENCE_S)",
                "return await doing",
            ),
        ),
    ),
    "uploads_together_pass_the_quota": Fault(
        "await after a check",
        "Uploads that begin together exceed the quota of their key.",
        (
            Edit(
                "headrace.batches.files:Files.add",
                "self.check_quota(await self._used(file.owner) + file.num_bytes)",
                "await self._used(file.owner)",
            ),
        ),
    ),
    "a_lapsed_claim_is_renewed": Fault(
        "double claim",
        "A server that comes back from a pause answers lines a second time.",
        (
            Edit(
                "headrace.batches.redis_store:RedisRecords.claim",
                "claims = self._claims",
                "claims = self._claims",
            ),
            Edit(
                "headrace.batches.redis_store:_CLAIM",
                "(ARGV[3] == '1' or (holder and not is_older))",
                "(holder and not is_older)",
            ),
        ),
    ),
    "a_batch_is_saved_without_a_claim": Fault(
        "double claim",
        "A server that comes back from a pause undoes the end of a batch.",
        (
            Edit(
                "headrace.batches.redis_store:RedisRecords.put",
                'claim = self._claims.value(holder) if holder else ""',
                'claim = self._claims.value(holder) if holder else ""',
            ),
            Edit(
                "headrace.batches.redis_store:_PUT",
                "if ARGV[1] ~= '' and redis.call('GET', KEYS[2]) ~= ARGV[1] then return -1 end",
                "",
            ),
        ),
    ),
    "a_repeated_write_is_stored_twice": Fault(
        "not idempotent",
        "Results whose write was not confirmed are stored twice.",
        (
            Edit(
                "headrace.batches.redis_store:RedisBlobs.append",
                "content = hashlib.sha256(data).hexdigest() if holder else number",
                "content = number",
            ),
        ),
    ),
}

FIXES: dict[str, Fault] = {**STREAMS, **FLEET, **BATCHES}
"""All faults that were fixed once, by name."""
