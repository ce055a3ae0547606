"""What the store says to its database: each function is a few statements of one transaction."""

import logging
import sqlite3
import time
from collections.abc import Sequence

import msgspec

from headrace.core.ids import StreamId
from headrace.streams.events import AnyEvent, Error, is_terminal
from headrace.streams.log import LogConflict
from headrace.streams.record import Record
from headrace.streams.store import ByConversation, ById, ByKey, Name
from headrace.streams.sweep import Kept

logger = logging.getLogger(__name__)

NO_WRITER = 0

_encode = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(Record).decode
_decode_events = msgspec.msgpack.Decoder(list[AnyEvent]).decode

_COLUMNS = "SELECT n, next_seq, ended_at IS NOT NULL, record FROM streams JOIN records USING (n)"

_NAME_COLUMNS = {ById: ("id",), ByConversation: ("owner", "conversation"), ByKey: ("owner", "key")}


class Row(msgspec.Struct, frozen=True):
    """A stream as it was in one transaction; `epoch` is that of a writer who just got it."""

    n: int
    next_seq: int
    has_ended: bool
    record: Record
    epoch: int = NO_WRITER


class Batch(msgspec.Struct, frozen=True):
    """What one append adds; `frees_key`: it ends in an error after which the same key may retry."""

    first_seq: int
    num_events: int
    data: bytes
    is_end: bool
    frees_key: bool


def make_batch(first_seq: int, events: Sequence[AnyEvent]) -> Batch:
    last = events[-1]
    frees_key = isinstance(last, Error) and last.retryable
    return Batch(first_seq, len(events), _encode(events), is_terminal(last), frees_key)


def claim(db: sqlite3.Connection, record: Record, replaces: StreamId | None) -> Row:
    """A new row, or that of the stream which holds one of the names."""
    names = record.names
    lookups: list[Name] = [ById(record.id)]
    if names.key is not None:
        lookups.append(ByKey(names.owner, names.key))
    for name in lookups:
        if (holder := find(db, name)) is not None:
            return holder
    if names.conversation is not None:
        holder = find(db, ByConversation(names.owner, names.conversation))
        if holder is not None and not holder.has_ended and holder.record.id != replaces:
            return holder
        _free_conversation(db, names.owner, names.conversation)
    return _insert(db, record)


def find(db: sqlite3.Connection, name: Name) -> Row | None:
    return next(iter(find_all(db, name)), None)


def find_all(db: sqlite3.Connection, name: Name) -> list[Row]:
    """One or none."""
    where = " AND ".join(f"{column} = ?" for column in _NAME_COLUMNS[type(name)])
    values = msgspec.structs.astuple(name)
    return [_row(*row) for row in db.execute(f"{_COLUMNS} WHERE {where}", values)]


def find_family(db: sqlite3.Connection, name: ByConversation) -> list[Row]:
    owner, conversation = name.owner, name.conversation
    where = "owner = ? AND (conversation = ? OR conversation >= ? AND conversation < ?)"
    bounds = (owner, conversation, f"{conversation}::", f"{conversation}:;")
    return [_row(*row) for row in db.execute(f"{_COLUMNS} WHERE {where} ORDER BY n", bounds)]


def claim_unfinished(db: sqlite3.Connection) -> list[Row]:
    db.execute("UPDATE streams SET epoch = epoch + 1 WHERE ended_at IS NULL")
    columns = _COLUMNS.replace(" FROM", ", epoch FROM")
    return [_row(*row) for row in db.execute(f"{columns} WHERE ended_at IS NULL ORDER BY n")]


def append(db: sqlite3.Connection, n: int, epoch: int, batch: Batch) -> None:
    """Raises LogConflict, before anything is changed, unless this writer's append is the next."""
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
    db.execute("INSERT INTO batches VALUES (?, ?, ?)", (n, batch.first_seq, batch.data))


def read(db: sqlite3.Connection, n: int, after: int, limit: int) -> list[AnyEvent]:
    """Up to `limit` events that follow number `after`; none if the stream is gone."""
    rows = db.execute(
        """SELECT first_seq, events FROM batches WHERE n = ?1 AND first_seq >= coalesce(
            (SELECT max(first_seq) FROM batches WHERE n = ?1 AND first_seq <= ?2), 0)
            ORDER BY first_seq LIMIT ?3""",
        (n, after + 1, limit),
    )
    events: list[AnyEvent] = []
    for first_seq, data in rows.fetchall():
        if len(events) < limit:
            events.extend(_decode_events(data)[max(0, after + 1 - first_seq) :])
    return events[:limit]


def delete(db: sqlite3.Connection, stream_ids: Sequence[StreamId]) -> None:
    for stream_id in stream_ids:
        row = db.execute("DELETE FROM streams WHERE id = ? RETURNING n", (stream_id,)).fetchone()
        if row is not None:
            db.execute("DELETE FROM records WHERE n = ?", row)
            db.execute("DELETE FROM batches WHERE n = ?", row)


def touch(db: sqlite3.Connection, read_at: dict[int, float]) -> None:
    db.executemany(
        "UPDATE streams SET read_at = ? WHERE n = ?", [(at, n) for n, at in read_at.items()]
    )


def kept(db: sqlite3.Connection) -> list[Kept]:
    return [
        Kept(*row) for row in db.execute("SELECT id, num_bytes, read_at, ended_at FROM streams")
    ]


def live(db: sqlite3.Connection) -> list[tuple[StreamId, int]]:
    """Id and next seq of every stream without an end."""
    return db.execute("SELECT id, next_seq FROM streams WHERE ended_at IS NULL").fetchall()


def delete_unreadable(db: sqlite3.Connection) -> None:
    """Forgets live streams whose record means nothing to this version: nobody could end them."""
    rows = db.execute(
        "SELECT id, record FROM streams JOIN records USING (n) WHERE ended_at IS NULL"
    )
    for stream_id, data in rows.fetchall():
        try:
            _decode_record(data)
        except msgspec.DecodeError:
            logger.warning("A stream of an earlier run cannot be read and is forgotten")
            delete(db, [stream_id])


def _row(n: int, next_seq: int, has_ended: int, record: bytes, epoch: int = NO_WRITER) -> Row:
    return Row(n, next_seq, bool(has_ended), _decode_record(record), epoch)


def _free_conversation(db: sqlite3.Connection, owner: str, conversation: str) -> None:
    db.execute(
        "UPDATE streams SET conversation = NULL WHERE owner = ? AND conversation = ?",
        (owner, conversation),
    )


def _insert(db: sqlite3.Connection, record: Record) -> Row:
    names, data = record.names, _encode(record)
    inserted = db.execute(
        """INSERT INTO streams (id, owner, conversation, key, epoch, next_seq, num_bytes, read_at)
            VALUES (?, ?, ?, ?, 1, 0, ?, ?)""",
        (record.id, names.owner, names.conversation, names.key, len(data), time.time()),
    )
    n = inserted.lastrowid
    assert n is not None
    db.execute("INSERT INTO records VALUES (?, ?)", (n, data))
    return Row(n, 0, False, record, epoch=1)
