"""BlockBuilder: builds blocks of the change log from pgoutput messages. It does no I/O.

    builder = BlockBuilder(position)
    builder.add(payload)            # each message, in the order of arrival
    builder.note(position)          # the position of a keepalive, between transactions
    for block in builder.take():    # the blocks to write now
        …

Invariants.

- Blocks have whole transactions in commit order. A block that contains the end of a transaction ends there. So cutting
  off a torn tail does not remove a whole transaction.
- A transaction larger than LIMIT is returned in several blocks before it has ended.
- A reader can start at each RESTART block. The publisher describes a relation once in a session. So its description is
  repeated after each RESTART block, before the relation's first change.
- So it is after each CONTINUES block, so that several readers can share a large transaction.

Failure cases.

- Process killed before the end of a large transaction: the next writer cuts off its blocks.
"""

from __future__ import annotations

from subscriber.changelog.segment import BOUNDARY, CONTINUES, MESSAGES, POSITION, RESTART, Block
from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import Begin, Commit, LogicalMessage, Origin, Relation, Truncate, Type
from subscriber.protocol.stream_state import StreamState, next_state, out_of_order, require_finish_lsn

LIMIT = 1024 * 1024  # bytes of an open transaction that are buffered before take() returns them
RESTART_EVERY = 1024 * 1024  # bytes between two RESTART blocks
CONTINUE_EVERY = 4 * 1024 * 1024  # bytes of an open transaction after which a reader can start again
FULL = 256 * 1024  # bytes of whole transactions after which a new block starts

_ROWS = {0x49: "INSERT", 0x55: "UPDATE", 0x44: "DELETE"}


class BlockBuilder:
    """Builds the blocks of one replication stream. Each connection needs a new builder.

    Attributes:
        position: the end of the last added transaction, or the last noted position.
        state: the state of the stream after the last added message.
    """

    def __init__(self, position: Lsn) -> None:
        """Create a builder. `position` is the end of the log: add() rejects transactions that were committed before."""
        self.position = position
        self.state = StreamState.IDLE
        self._decoder = Decoder()
        self._described: dict[int, list[bytes]] = {}  # relid → its TYPE messages and its RELATION
        self._types: list[bytes] = []  # TYPE messages since the last RELATION
        self._present: set[int] = set()  # OIDs of relations described since the last RESTART block
        self._ready: list[Block] = []
        self._buffer = bytearray()
        self._whole = 0  # bytes of _buffer up to the end of the last whole transaction
        self._finish_lsn = Lsn(0)  # of the open transaction
        self._transactions = 0
        self._changes = self._whole_changes = 0
        self._noted = False
        self._since_restart = 0
        self._restart = True  # the next block becomes a RESTART block
        self._since_described = 0  # bytes since the last RESTART or CONTINUES block
        self._continues = False  # the next block becomes a CONTINUES block

    @property
    def in_transaction(self) -> bool:
        """True if the last added message is inside a transaction."""
        return self.state is not StreamState.IDLE

    @property
    def finish_lsn(self) -> Lsn:
        """The start of the commit record of the open transaction."""
        return self._finish_lsn

    @property
    def size(self) -> int:
        """Bytes that take() has not returned yet."""
        return len(self._buffer) + sum(len(block.body) for block in self._ready)

    def restart(self) -> None:
        """Start a RESTART block with the next transaction."""
        self._since_restart = RESTART_EVERY
        if not self._buffer and not self.in_transaction:  # the part of an open transaction may have been taken
            self._begin_restart()

    def add(self, payload: bytes) -> None:
        """Add the next message of the stream.

        Raises:
            ProtocolError: the message is damaged or out of order, or its transaction is in the log already.
        """
        letter = payload[0] if payload else 0
        if letter in _ROWS:
            if self.state is StreamState.IDLE:
                raise out_of_order(_ROWS[letter], self.state)
            self.state = StreamState.TRANSACTION
            relid = int.from_bytes(payload[1:5], "big")
            if relid not in self._present:
                self._describe(relid)
            self._changes += 1
            self._put(payload)
        else:
            self._add_rare(payload)

    def note(self, position: Lsn) -> None:
        """Record that the publisher has sent everything before `position`. Does nothing inside a transaction."""
        if position > self.position and not self.in_transaction:
            self.position = position
            self._noted = True

    def take(self) -> list[Block]:
        """Return the blocks to write now, in order. A small open transaction remains in the builder."""
        blocks, self._ready = self._ready, []
        if self._whole:
            blocks.append(self._cut(self._whole, BOUNDARY))
        elif self._noted:
            blocks.append(Block(POSITION, BOUNDARY, self.position, 0, 0, b""))
        self._noted = False
        if len(self._buffer) > LIMIT:
            blocks.append(self._cut(len(self._buffer), 0))
            if self._since_described >= CONTINUE_EVERY:
                self._continues = True
                self._describe_again()
        return blocks

    def _cut(self, length: int, flags: int) -> Block:
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        if self._restart:
            flags |= RESTART
            self._restart = False
        if self._continues:
            flags |= CONTINUES
            self._continues = False
        self._since_restart += length
        self._since_described += length
        whole = bool(flags & BOUNDARY)
        changes = self._whole_changes if whole else self._changes
        transactions = self._transactions if whole else 0
        self._changes -= changes
        if whole:
            self._whole = self._whole_changes = self._transactions = 0
        return Block(MESSAGES, flags, self.position if whole else Lsn(0), transactions, changes, body)

    def _begin_restart(self) -> None:
        self._restart = True
        self._since_restart = 0
        self._describe_again()

    def _describe_again(self) -> None:
        self._since_described = 0
        self._present.clear()

    def _put(self, payload: bytes) -> None:
        self._buffer += len(payload).to_bytes(4, "big")
        self._buffer += payload

    def _describe(self, relid: int) -> None:
        try:
            described = self._described[relid]
        except KeyError:
            raise ProtocolError(f"no relation with OID {relid} has been described") from None
        for payload in described:
            self._put(payload)
        self._present.add(relid)

    def _add_rare(self, payload: bytes) -> None:
        message = self._decoder.decode(payload)
        before, self.state = self.state, next_state(self.state, message)
        match message:
            case Begin():
                self._begin(message)
            case Commit():
                self._put(payload)
                self._commit(message)
                return
            case LogicalMessage(transactional=False):
                return  # outside of transactions, and repeated after a reconnect
            case Relation():
                self._described[message.relid] = [*self._types, payload]
                self._types.clear()
                self._present.discard(message.relid)  # written before the next change of the relation
                return
            case Type():
                self._types.append(payload)
                return
            case Truncate():
                for relid in message.relids:
                    if relid not in self._present:
                        self._describe(relid)
                self._changes += len(message.relids)
            case LogicalMessage():
                self._changes += 1
            case Origin():
                pass
            case _:  # the publisher sends no streamed and no prepared transactions to a change log
                raise out_of_order(message, before)
        self._put(payload)

    def _begin(self, message: Begin) -> None:
        if message.final_lsn < self.position:
            raise ProtocolError(
                f"transaction {message.xid} at {message.final_lsn} came again",
                detail=f"The change log has everything before {self.position}.",
            )
        due = self._since_restart + len(self._buffer) >= RESTART_EVERY
        if self._buffer and (due or len(self._buffer) >= FULL):
            self._ready.append(self._cut(len(self._buffer), BOUNDARY))
        if due:
            self._begin_restart()
        self._finish_lsn = message.final_lsn

    def _commit(self, message: Commit) -> None:
        require_finish_lsn(message, self._finish_lsn)
        self.position = message.end_lsn
        self._transactions += 1
        self._whole = len(self._buffer)
        self._whole_changes = self._changes
        self._noted = False
