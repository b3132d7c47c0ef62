"""The order of messages: every reader of a stream accepts the same messages in each state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import anyio
import pytest

from subscriber.apply.dispatcher import Dispatcher
from subscriber.archive.reassembly import StreamReassembler
from subscriber.changelog.encoder import BlockBuilder
from subscriber.errors import ProtocolError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import (
    Begin,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Prepare,
    Relation,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)
from subscriber.protocol.stream_state import StreamState, next_state
from subscriber.testing import FIRST, FakePublisher
from tests.apply.build import row
from tests.protocol.order import CHANGES, END, EVERYTHING, RELATION, STATES

XID = 731
Change = Insert | Update | Delete | Truncate | Relation | Type | LogicalMessage
DESCRIBED: list[Message] = [
    Begin(Lsn(FIRST + 10), 0, 730),
    RELATION,
    Insert(None, RELATION.relid, row("0", "x")),
    Commit(Lsn(FIRST + 10), Lsn(FIRST + 20), 0),
]
# Each is out of order after the messages before it, or has the position of another transaction.
WRONG_COMMIT, WRONG_PREPARE = Commit(Lsn(1), END, 0), Prepare(Lsn(1), END, 0, XID, "gid")


def in_stream(sent: list[Message]) -> list[Message]:
    """Return the messages as a publisher sends them: a change in a block has the ID of its transaction.

    An earlier transaction describes the table.
    """
    copy, in_block = DESCRIBED.copy(), False
    for message in sent:
        in_block = isinstance(message, StreamStart) or (in_block and not isinstance(message, StreamStop))
        copy.append(replace(message, xid=XID) if in_block and isinstance(message, Change) else message)
    return copy


def states_after(sent: list[Message]) -> StreamState:
    state = StreamState.IDLE
    for message in sent:
        state = next_state(state, message, XID)
    return state


async def dispatch(sent: list[Message], _: Path) -> None:
    dispatcher = Dispatcher()
    for message in sent:
        if not dispatcher.must_spool(encode(message)[0]):
            dispatcher.receive(message)


async def archive(sent: list[Message], folder: Path) -> None:
    builder, reassembler = BlockBuilder(Lsn(0)), StreamReassembler(folder / "spool")
    await reassembler.open()
    try:
        for message in sent:
            payload = encode(message)
            if reassembler.passes(payload):
                builder.add(payload)
                continue
            async for plain in reassembler.receive(payload, builder.state):
                builder.add(plain)
    finally:
        await reassembler.close()


async def deliver(sent: list[Message], in_progress: Literal["spool", "blocks"]) -> None:
    publisher = FakePublisher()
    publisher.play([(END, encode(message)) for message in sent])
    async with publisher.stream(in_progress=in_progress, follow=True) as stream:
        async for transaction in stream:
            async for _ in transaction:
                pass


async def spool(sent: list[Message], _: Path) -> None:
    await deliver(sent, "spool")


async def deliver_blocks(sent: list[Message], _: Path) -> None:
    await deliver(sent, "blocks")


READERS: dict[str, Callable[[list[Message], Path], Awaitable[None]]] = {
    "apply worker": dispatch,
    "change log": archive,
    "change stream": spool,
    "change stream in blocks": deliver_blocks,
}


def test_the_table_has_every_message() -> None:
    assert {type(message) for message in EVERYTHING.values()} == set(get_args(Message))


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("state", STATES)
def test_a_message_is_accepted_exactly_in_its_legal_states(state: str, name: str) -> None:
    """Changes are legal in a block too. A dispatcher does not receive them, because it spools them."""
    sent, legal = STATES[state]
    before = states_after(sent)
    in_block = before in (StreamState.FIRST_BLOCK, StreamState.BLOCK)
    if name in legal or (in_block and name in CHANGES):
        next_state(before, EVERYTHING[name], XID)
    else:
        with pytest.raises(ProtocolError, match=f"^{name} message sent out of order"):
            next_state(before, EVERYTHING[name], XID)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("state", STATES)
async def test_all_readers_agree(state: str, reader: str, tmp_path: Path) -> None:
    sent, _ = STATES[state]
    for name, message in EVERYTHING.items():
        if reader == "change log" and "PREPARE" in f"{sent} {name}".upper():
            continue  # the publisher does not send prepared transactions to a change log
        refused = False
        try:
            next_state(states_after(sent), message)
        except ProtocolError:
            refused = True
        last = WRONG_PREPARE if name == "COMMIT" else WRONG_COMMIT
        with pytest.raises(SubscriberError) as caught:
            with anyio.fail_after(5):
                await READERS[reader](in_stream([*sent, message, last]), tmp_path)
        assert caught.value.message.startswith(f"{name} message sent out of order") == refused, (name, caught.value)
