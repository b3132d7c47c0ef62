"""The initial copy by ranges: which transactions a range of a table already contains.

Purpose. A table is copied in ranges of its key. Each range is read in a snapshot of its own, while the apply worker
applies the changes of the ranges that are copied. The table has no slot, and no snapshot is older than one range takes.

A snapshot of a primary has no position in WAL: a transaction is decoded as soon as its commit record is flushed, but a
snapshot sees it only after the synchronous standbys have acknowledged it. So a change is decided by visibility:

    range of the key               change of transaction X
    not read                       skipped; a later snapshot has to see X
    being read in snapshot S       skipped if S sees X; otherwise the apply worker waits for the range
    copied in snapshot S           skipped if S sees X; otherwise applied

Invariants.

- A range is read only in a snapshot that sees all transactions whose changes of the range were skipped before. In one
  process, the set of these transactions is in memory. A new process does not know it. The transaction holds its lock of
  the table until snapshots see it. So the copy waits once until the locks of writers are gone (`writers_query()`).
- A transaction that S sees has its commit record before S.lsn, the WAL insert position that was read after S. So a
  transaction that finishes at S.lsn or later is applied without a comparison, and the table is ready when the stream
  has reached the highest S.lsn. Positions have no other meaning here.
- S.lsn is flushed on the publisher before the range is committed. Otherwise a crash of the publisher could undo
  transactions of the range, and use their numbers again.
- An UPDATE that changes the key is a DELETE of the old key and an INSERT of the new one, each decided by its own range.
  If only the INSERT applies and a large value was not sent, the value is nowhere on the target. Then the key is a range
  of one, which is read later.
- The lock ACCESS SHARE precedes the snapshot, because rows that a TRUNCATE removes are missing in older snapshots, too.
  A TRUNCATE that no range contains is a TRUNCATE. Otherwise it is a DELETE of the ranges that do not contain it.
- Keys are compared in the publisher's order. Python has that of most types (key_types.py). The publisher is asked for
  the range of a key of texts with other collations, and of enums. Such a table is read only after the apply worker has
  executed each TRUNCATE, because the target could not delete the rows of a range.
- Subtransactions and streamed transactions are decided by the top-level transaction. Transactions are not prepared on
  the target while tables are copied, because two-phase commit is enabled afterwards.

Failure cases. worker/tablesync/range_copy.py has them.

This package is pure: it does no I/O, and its state is rebuilt from the catalog (catalog/store/copied_ranges.py).
"""
