"""The store's SQL. Each function runs a few statements of one transaction.

Each row has a checksum, and the event numbers of a log have no gap. If either check fails, the
functions return or raise LogUnsound.
"""

import contextlib
import hashlib
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.streams.events import AnyEvent, frees_key, is_terminal
from headrace.streams.log import LogConflict, LogGone, LogUnsound
from headrace.streams.record import Record
from headrace.streams.store import (
    ByConversation,
    ById,
    ByItem,
    ByKey,
    ConversationLocked,
    Name,
)
from headrace.streams.stores.sweep import Kept
from headrace_common.ids import StreamId

NO_WRITER = 0
# Replaces the checksum of a stream that was found damaged.
SET_ASIDE = b""

_encode = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(Record).decode
_decode_events = msgspec.msgpack.Decoder(list[AnyEvent]).decode

_SEALED = "n, id, owner, conversation, key, epoch, next_seq, num_bytes, ended_at"
_COLUMNS = (
    f"SELECT {_SEALED}, streams.checksum, record, records.checksum "
    "FROM streams LEFT JOIN records USING (n)"
)
# This limit is far above any real row number. After a row with SQLite's largest number, no row
# could be added.
_MAX_ROW = 1 << 53
_PAGE = 256
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)

_FIND = {
    ById: "id = ?",
    ByConversation: "owner = ? AND conversation = ?",
    ByKey: "owner = ? AND key = ?",
    ByItem: "n = (SELECT max(n) FROM items WHERE owner = ? AND item = ?)",
}


class Row(msgspec.Struct, frozen=True):
    """A stream's stored values, as one transaction read them.

    `epoch` is set if the transaction claimed the stream for a writer.
    """

    n: int
    next_seq: int
    has_ended: bool
    record: Record
    epoch: int = NO_WRITER


class WriteBatch(msgspec.Struct, frozen=True):
    """The encoded events of one append.

    `frees_key` is true if the events end the stream with an error after which the key can be
    reused.
    """

    first_seq: int
    num_events: int
    data: bytes
    is_end: bool
    frees_key: bool


def checksum(*values: Any) -> bytes:
    """Return a checksum of a row and its key; it detects altered, moved and copied rows.

    64 bits of BLAKE2b take a microsecond and miss one change in 10^19. CRC-32 would miss one
    altered row in 4 billion. If the same change was made to many rows, CRC-32 would miss all of
    these rows or no row.
    """
    return hashlib.blake2b(_encode(values), digest_size=8).digest()


def make_batch(first_seq: int, events: Sequence[AnyEvent]) -> WriteBatch:
    last = events[-1]
    return WriteBatch(first_seq, len(events), _encode(events), is_terminal(last), frees_key(last))


def claim(db: sqlite3.Connection, record: Record, replaces: StreamId | None) -> Row:
    """Insert a new row, or return the row of an existing stream with one of the names."""
    names = record.names
    lookups: list[Name] = [ById(record.id)]
    if names.key is not None:
        lookups.append(ByKey(names.owner, names.key))
    for name in lookups:
        if isinstance(holder := find(db, name), Row):
            return holder
        if holder is not None:
            set_aside(db, [holder])
    if names.conversation is not None:
        holder = find(db, ByConversation(names.owner, names.conversation))
        if names.follows is not None:
            ended_id = holder.record.id if isinstance(holder, Row) and holder.has_ended else None
            if ended_id != names.follows:
                raise ConversationLocked
        if isinstance(holder, Row) and not holder.has_ended and holder.record.id != replaces:
            return holder
        if holder is not None:
            _free_conversation(db, holder)
    return _insert(db, record)


def find(db: sqlite3.Connection, name: Name) -> Row | LogUnsound | None:
    return next(iter(find_all(db, name)), None)


def find_all(db: sqlite3.Connection, name: Name) -> list[Row | LogUnsound]:
    """Return a list with the stream of this name, or an empty list if there is no such stream."""
    return _select(db, _FIND[type(name)], *msgspec.structs.astuple(name))


def find_family(db: sqlite3.Connection, name: ByConversation) -> list[Row | LogUnsound]:
    owner, conversation = name.owner, name.conversation
    where = "owner = ? AND (conversation = ? OR conversation >= ? AND conversation < ?)"
    return _select(db, where, owner, conversation, f"{conversation}::", f"{conversation}:;")


def claim_unfinished(db: sqlite3.Connection) -> list[Row | LogUnsound]:
    """Read all live streams completely and claim the undamaged streams.

    Damaged streams are ended with `set_aside`.
    """
    found = [_read_through(db, row) for row in _select(db, "ended_at IS NULL")]
    set_aside(db, [row for row in found if isinstance(row, LogUnsound)])
    return [_claim_again(db, row) if isinstance(row, Row) else row for row in found]


def append(db: sqlite3.Connection, n: int, epoch: int, batch: WriteBatch) -> None:
    """Append a batch.

    Raises LogConflict, and changes nothing, if this is not the writer's next append.
    """
    now = time.time()
    changed = db.execute(
        """UPDATE streams SET next_seq = next_seq + ?, num_bytes = num_bytes + ?, read_at = ?,
            ended_at = ?, key = CASE WHEN ? THEN NULL ELSE key END
            WHERE n = ? AND epoch = ? AND next_seq = ? AND ended_at IS NULL""",
        (
            *(batch.num_events, len(batch.data), now),
            *(now if batch.is_end else None, batch.frees_key),
            *(n, epoch, batch.first_seq),
        ),
    )
    if changed.rowcount == 0:
        raise LogConflict(f"append at {batch.first_seq} by writer {epoch}")
    _seal(db, n)
    row_key = (n, batch.first_seq, batch.data)
    db.execute("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?)", (*row_key, checksum(*row_key)))


def read(db: sqlite3.Connection, row: Row, after: int, num: int) -> list[AnyEvent]:
    """Return the `num` events that follow number `after`.

    Raises LogGone if the stream was deleted, and LogUnsound if the events are damaged.
    """
    batches = db.execute(
        """SELECT first_seq, events, checksum FROM batches WHERE n = ?1 AND first_seq >= coalesce(
            (SELECT max(first_seq) FROM batches WHERE n = ?1 AND first_seq <= ?2), 0)
            ORDER BY first_seq LIMIT ?3""",
        (row.n, after + 1, num),
    )
    events: list[AnyEvent] = []
    for batch in batches.fetchall():
        if not events or events[-1].seq < after + num:
            events.extend(_open_batch(row, *batch))
    wanted = [event for event in events if after < event.seq <= after + num]
    if [event.seq for event in wanted] == list(range(after + 1, after + 1 + num)):
        return wanted
    if db.execute("SELECT 1 FROM streams WHERE n = ?", (row.n,)).fetchone() is None:
        raise LogGone
    raise _unsound(row, "its events have a gap")


def delete(db: sqlite3.Connection, stream_ids: Sequence[StreamId]) -> None:
    for stream_id in stream_ids:
        row = db.execute("DELETE FROM streams WHERE id = ? RETURNING n", (stream_id,)).fetchone()
        if row is not None:
            db.execute("DELETE FROM records WHERE n = ?", row)
            db.execute("DELETE FROM batches WHERE n = ?", row)
            db.execute("DELETE FROM items WHERE n = ?", row)


def touch(db: sqlite3.Connection, read_at: dict[int, float]) -> None:
    db.executemany(
        "UPDATE streams SET read_at = ? WHERE n = ?", [(at, n) for n, at in read_at.items()]
    )


def kept(db: sqlite3.Connection) -> list[Kept]:
    """Return all streams but those with damage that `set_aside` has not handled yet."""
    rows = db.execute(f"SELECT {_SEALED}, checksum, CAST(read_at AS REAL) FROM streams")
    return [
        Kept(row[1], row[7], row[10], row[8])
        for row in rows
        if row[9] in (SET_ASIDE, checksum(*row[:9]))
    ]


def live(db: sqlite3.Connection) -> list[tuple[int, StreamId, int]]:
    """Return row number, stream id and next event number of all live streams."""
    return db.execute("SELECT n, id, next_seq FROM streams WHERE ended_at IS NULL").fetchall()


def unsound(db: sqlite3.Connection) -> list[LogUnsound]:
    """Return the streams whose row was altered.

    Records and events are checked later, when a stream is read.
    """
    rows = db.execute(f"SELECT {_SEALED}, checksum FROM streams").fetchall()
    changed = [row[0] for row in rows if row[9] not in (SET_ASIDE, checksum(*row[:9]))]
    found = [row for n in changed for row in _select(db, "n = ?", n)]
    return [row for row in found if isinstance(row, LogUnsound)]


def set_aside(db: sqlite3.Connection, unsound: Sequence[LogUnsound]) -> None:
    """End damaged streams: they can be found and deleted, but not read.

    The keys of these streams become free. All other names stay if the stored names can be trusted.
    """
    # First remove the names from all rows, because a damaged row may have another row's name.
    for one in unsound:
        db.execute(
            """UPDATE streams SET id = 'unsound-' || n, owner = x'', conversation = NULL,
                key = NULL, num_bytes = 0, ended_at = ?, checksum = ? WHERE n = ?""",
            (time.time(), SET_ASIDE, one.row),
        )
    for one in unsound:
        owner = b"" if one.owner is None else one.owner
        db.execute(
            "UPDATE OR IGNORE streams SET id = ?, owner = ? WHERE n = ?",
            (one.stream_id, owner, one.row),
        )
        db.execute(
            "UPDATE OR IGNORE streams SET conversation = ? WHERE n = ?",
            (one.conversation, one.row),
        )
        if not 0 < one.row < _MAX_ROW:
            delete(db, [one.stream_id])


def drop_orphans(db: sqlite3.Connection) -> int:
    """Delete logs that belong to no stream; return their number."""
    db.execute(
        """UPDATE sqlite_sequence SET seq = (SELECT coalesce(max(n), 0) FROM streams)
            WHERE name = 'streams' AND NOT (typeof(seq) = 'integer' AND seq BETWEEN 0 AND ?)""",
        (_MAX_ROW,),
    )
    orphans = db.execute(
        """WITH RECURSIVE logs (n) AS (
            SELECT min(n) FROM batches UNION ALL
            SELECT (SELECT min(n) FROM batches WHERE n > logs.n) FROM logs WHERE logs.n IS NOT NULL)
            SELECT n FROM logs WHERE n NOT IN (SELECT n FROM streams) AND n IS NOT NULL UNION
            SELECT n FROM records WHERE n NOT IN (SELECT n FROM streams)"""
    ).fetchall()
    db.executemany("DELETE FROM records WHERE n = ?", orphans)
    db.executemany("DELETE FROM batches WHERE n = ?", orphans)
    db.execute("DELETE FROM items WHERE n NOT IN (SELECT n FROM streams)")
    return len(orphans)


def seal_all(db: sqlite3.Connection) -> None:
    """Add a checksum to every row."""
    db.create_function("checksum", -1, checksum, deterministic=True)
    db.execute("UPDATE records SET checksum = checksum(n, CAST(record AS BLOB))")
    db.execute("UPDATE batches SET checksum = checksum(n, first_seq, CAST(events AS BLOB))")
    for (n,) in db.execute("SELECT n FROM streams").fetchall():
        _seal(db, n)


def _select(db: sqlite3.Connection, where: str, *values: Any) -> list[Row | LogUnsound]:
    return [_row(*row) for row in db.execute(f"{_COLUMNS} WHERE {where} ORDER BY n", values)]


def _row(*columns: Any) -> Row | LogUnsound:
    """Return the stream of a row; return LogUnsound if the row or its record is damaged."""
    sealed, (seal, data, record_seal) = columns[:9], columns[9:]
    n, stream_id, owner, conversation, key, _, next_seq, _, ended_at = sealed
    record = _open_record(n, data, record_seal)
    names = record.names if record else None
    if seal == SET_ASIDE:
        known_owner = owner if isinstance(owner, str) else None
        # The damage was reported when `set_aside` ended the stream.
        return LogUnsound(n, stream_id, "", known_owner, conversation)
    if seal != checksum(*sealed):
        if record and names:
            return LogUnsound(n, record.id, "its row is damaged", names.owner, names.conversation)
        known = StreamId(stream_id if isinstance(stream_id, str) else f"unsound-{n}")
        return LogUnsound(n, known, "its row and its record are damaged")
    if not record or not names:
        return LogUnsound(n, stream_id, "its record is damaged", owner, conversation)
    has_names = (stream_id, owner) == (record.id, names.owner)
    if has_names and conversation in (None, names.conversation) and key in (None, names.key):
        return Row(n, next_seq, ended_at is not None, record)
    return LogUnsound(n, record.id, "its row is damaged", names.owner, names.conversation)


def _open_record(n: int, data: Any, seal: Any) -> Record | None:
    """Decode a record; return None if the record is damaged or has an unknown version."""
    if seal == checksum(n, data):
        with contextlib.suppress(*_UNREADABLE):
            return _decode_record(data)
    return None


def _open_batch(row: Row, first_seq: Any, data: Any, seal: Any) -> list[AnyEvent]:
    """Decode one batch of events.

    Raises LogUnsound if the batch is damaged or has an unknown version.
    """
    if seal == checksum(row.n, first_seq, data):
        with contextlib.suppress(*_UNREADABLE):
            events = _decode_events(data)
            if events and [event.seq - first_seq for event in events] == list(range(len(events))):
                return events
    raise _unsound(row, f"its events from {first_seq} on are damaged")


def _unsound(row: Row, reason: str) -> LogUnsound:
    names = row.record.names
    return LogUnsound(row.n, row.record.id, reason, names.owner, names.conversation)


def _read_through(db: sqlite3.Connection, row: Row | LogUnsound) -> Row | LogUnsound:
    if isinstance(row, LogUnsound):
        return row
    try:
        for start in range(0, row.next_seq, _PAGE):
            read(db, row, start - 1, min(_PAGE, row.next_seq - start))
    except LogUnsound as unsound:
        return unsound
    return row


def _claim_again(db: sqlite3.Connection, row: Row) -> Row:
    claimed = db.execute(
        "UPDATE streams SET epoch = epoch + 1 WHERE n = ? RETURNING epoch", (row.n,)
    ).fetchone()
    _seal(db, row.n)
    return msgspec.structs.replace(row, epoch=claimed[0])


def _free_conversation(db: sqlite3.Connection, holder: Row | LogUnsound) -> None:
    n = holder.n if isinstance(holder, Row) else holder.row
    if isinstance(holder, LogUnsound):
        set_aside(db, [holder])
    db.execute("UPDATE streams SET conversation = NULL WHERE n = ?", (n,))
    if isinstance(holder, Row):
        _seal(db, n)


def _insert(db: sqlite3.Connection, record: Record) -> Row:
    names, data = record.names, _encode(record)
    inserted = db.execute(
        """INSERT INTO streams (id, owner, conversation, key, epoch, next_seq, num_bytes, read_at)
            VALUES (?, ?, ?, ?, 1, 0, ?, ?)""",
        (record.id, names.owner, names.conversation, names.key, len(data), time.time()),
    )
    n = inserted.lastrowid
    assert n is not None
    _seal(db, n)
    db.execute("INSERT INTO records VALUES (?, ?, ?)", (n, data, checksum(n, data)))
    db.executemany(
        "INSERT OR IGNORE INTO items VALUES (?, ?, ?)",
        [(names.owner, item, n) for item in names.items],
    )
    return Row(n, 0, False, record, epoch=1)


def _seal(db: sqlite3.Connection, n: int) -> None:
    """Update a row's checksum after this store changed the row."""
    sealed = db.execute(f"SELECT {_SEALED} FROM streams WHERE n = ?", (n,)).fetchone()
    db.execute("UPDATE streams SET checksum = ? WHERE n = ?", (checksum(*sealed), n))
