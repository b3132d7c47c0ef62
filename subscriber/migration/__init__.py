"""Move a database to another server: its definitions, its rows, and its applications.

**Purpose.** The *source* is the server that a database moves away from, the *target* is the server that it moves to. A
subscription on the target replicates the source. `cutover` moves the applications to the target, and `back` moves them
back. Both are the same procedure (plan.py) with the servers exchanged: one server is *serving*, the other is
*following*. After each of them the following server replicates the serving one, so no commit is lost on the way back.

**Invariants.**

- The following server is fenced (fence.py): no application writes there. At no time are both servers open.
- Each server has a row about the move in `subscriber.migration` (record.py). A row changes in the same transaction as
  the fence of its server, so row and fence agree after any crash.
- Opening the following server is the point of no return. Before, the serving server stores the phase SWITCHING. So a
  serving server in an earlier phase can be opened again without the other one, which may be unreachable.
- Only the command that has the advisory lock of both servers opens the following one, in the session with the lock.
- A subscription sends nothing back to the server where a change was made. Publishers since PostgreSQL 16 filter such
  changes (origin = none). For other publishers, a slot is created while both servers are fenced, after all changes are
  applied; so it contains none of them.

**Failure cases.**

- Command killed before the servers are fenced: applications notice nothing. The next command continues.
- Command killed during the pause: both servers stay fenced. `cutover` continues, `abort` opens the serving server.
- Command killed after it has sent the statement that opens the following server: the row of that server says whether it
  was executed. `cutover` continues, and `abort` is refused if it was.
- Pause longer than its limit, an error, or Ctrl-C before the switch: the command opens the serving server.
- Serving server crashes during the pause: it stays fenced, because fence and row are durable. The command waits for it
  RECONNECT_PATIENCE seconds to open it again; after that, `abort` does.
- Following server crashes before the switch: the serving server opens again.
- Following server crashes during the switch: its row decides. The serving server stays fenced until it is known.
- A session prepares a transaction while it is ended: the pause ends with an error that names the transaction.
- DDL during the move: it is not replicated. A table that is added to the publication later has no fence until the next
  `cutover`, which looks for tables again.
"""
