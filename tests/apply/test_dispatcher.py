"""Every message in every state, and the message sequences of real publishers."""

from __future__ import annotations

from types import UnionType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.apply.dispatcher import (
    AbortStreamed,
    Action,
    ApplyChange,
    ApplySpooled,
    BeginStreamBlock,
    BeginTransaction,
    Dispatcher,
    EndStreamBlock,
    EndTransaction,
    FinishPrepared,
    TruncateTables,
)
from subscriber.apply.transaction import RemoteTransaction
from subscriber.errors import MappingError, ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import (
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    Update,
)
from tests.captures import Capture, captures
from tests.protocol.order import (
    BEGIN,
    BEGIN_PREPARE,
    BLOCK,
    CHANGES,
    COMMIT,
    END,
    EVERYTHING,
    FINISH,
    FIRST_BLOCK,
    INSERT,
    PREPARE,
    RELATION,
    STATES,
    STOP,
)


def fed(messages: list[Message]) -> Dispatcher:
    dispatcher = Dispatcher()
    for message in messages:
        dispatcher.receive(message)
    return dispatcher


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("state", STATES)
def test_a_message_is_accepted_exactly_in_its_legal_states(state: str, name: str) -> None:
    before, allowed = STATES[state]
    dispatcher = fed(before)
    if name in allowed:
        dispatcher.receive(EVERYTHING[name])
    else:
        before_it = dispatcher.transaction, dispatcher.block
        with pytest.raises(ProtocolError, match=f"^{name} message sent out of order"):
            dispatcher.receive(EVERYTHING[name])
        assert (dispatcher.transaction, dispatcher.block) == before_it


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_replay_accepts_only_changes_and_commit(name: str) -> None:
    """Only changes: the beginning and end of a streamed transaction were handled when they arrived."""
    dispatcher = Dispatcher.replaying(RemoteTransaction(731, FINISH, 0))
    if name in CHANGES | {"COMMIT"}:
        dispatcher.receive(EVERYTHING[name])
    else:
        with pytest.raises(ProtocolError, match=f"^{name} message sent out of order"):
            dispatcher.receive(EVERYTHING[name])


@pytest.mark.parametrize("state", STATES)
def test_an_open_block_keeps_changes_and_nothing_else_does(state: str) -> None:
    dispatcher = fed(STATES[state][0])
    kept = {name for name, message in EVERYTHING.items() if dispatcher.must_spool(encode(message)[0])}
    assert kept == (CHANGES if "block" in state and "idle" not in state else set())


def test_messages_of_a_transaction_become_steps() -> None:
    dispatcher = Dispatcher()
    opened = dispatcher.receive(BEGIN)
    assert isinstance(opened, BeginTransaction)
    transaction = opened.transaction
    assert (transaction.xid, transaction.finish_lsn, transaction.commit_time) == (731, FINISH, 1_000_000)
    assert not transaction.is_open_on_target
    for name in ("ORIGIN", "TYPE", "RELATION", "MESSAGE"):
        assert dispatcher.receive(EVERYTHING[name]) is None
    for name in ("INSERT", "UPDATE", "DELETE"):
        change = dispatcher.receive(EVERYTHING[name])
        assert isinstance(change, ApplyChange)
        assert change.transaction is transaction
        assert change.message is EVERYTHING[name]
    truncate = dispatcher.receive(EVERYTHING["TRUNCATE"])
    assert isinstance(truncate, TruncateTables)
    assert truncate.message is EVERYTHING["TRUNCATE"]
    assert dispatcher.transaction is transaction
    close = dispatcher.receive(COMMIT)
    assert isinstance(close, EndTransaction)
    assert close.transaction is transaction
    assert close.end_lsn == END
    assert dispatcher.transaction is None


def test_messages_of_a_prepared_transaction_become_steps() -> None:
    dispatcher = Dispatcher()
    opened = dispatcher.receive(BEGIN_PREPARE)
    assert isinstance(opened, BeginTransaction)
    assert (opened.transaction.finish_lsn, opened.transaction.gid) == (FINISH, "gid")
    close = dispatcher.receive(PREPARE)
    assert close == EndTransaction(opened.transaction, END)
    for name in ("COMMIT PREPARED", "ROLLBACK PREPARED"):
        action = dispatcher.receive(EVERYTHING[name])
        assert isinstance(action, FinishPrepared)
        assert action.message is EVERYTHING[name]
        assert dispatcher.idle


def test_messages_of_a_streamed_transaction_become_steps() -> None:
    dispatcher = Dispatcher()
    assert dispatcher.receive(FIRST_BLOCK) == BeginStreamBlock(731, first=True)
    assert not dispatcher.idle
    assert dispatcher.receive(EVERYTHING["ORIGIN"]) is None
    assert dispatcher.receive(STOP) == EndStreamBlock(731)
    assert fed([FIRST_BLOCK, STOP]).idle
    assert dispatcher.receive(BLOCK) == BeginStreamBlock(731, first=False)
    assert dispatcher.receive(STOP) == EndStreamBlock(731)
    for name in ("STREAM ABORT", "STREAM COMMIT", "STREAM PREPARE"):
        action = dispatcher.receive(EVERYTHING[name])
        if isinstance(action, AbortStreamed):
            assert action.message is EVERYTHING[name]
        else:
            gid = "gid" if name == "STREAM PREPARE" else None
            assert action == ApplySpooled(RemoteTransaction(731, FINISH, 1_000_000, gid), END)


@pytest.mark.parametrize(
    ("begin", "end", "words"),
    [
        (BEGIN, Commit(Lsn(1 << 32), END, 0), "incorrect commit LSN 1/0 in commit message (expected 0/1000064)"),
        (
            BEGIN_PREPARE,
            Prepare(Lsn(1 << 32), END, 0, 731, "gid"),
            "incorrect prepare LSN 1/0 in prepare message (expected 0/1000064)",
        ),
    ],
    ids=["commit", "prepare"],
)
def test_a_commit_of_another_transaction_is_refused(begin: Message, end: Message, words: str) -> None:
    dispatcher = fed([begin])
    with pytest.raises(ProtocolError) as caught:
        dispatcher.receive(end)
    assert caught.value.message == words
    assert dispatcher.transaction is not None


@pytest.mark.parametrize("before", [[], [BEGIN]], ids=["idle", "in a transaction"])
def test_a_message_of_no_transaction_may_come_at_any_time(before: list[Message]) -> None:
    assert fed(before).receive(LogicalMessage(None, False, Lsn(1), "p", b"")) is None


def test_an_error_names_the_transaction_and_its_position() -> None:
    with pytest.raises(ProtocolError) as caught:
        Dispatcher().receive(COMMIT)
    assert caught.value.detail == "It came outside a transaction."
    with pytest.raises(ProtocolError) as caught:
        fed([BEGIN]).receive(BEGIN)
    assert caught.value.detail == "It came in transaction 731."
    with pytest.raises(ProtocolError) as caught:
        fed([FIRST_BLOCK]).receive(BEGIN)
    assert caught.value.detail == "It came in a block of streamed transaction 731."


def test_relations_outlive_transactions() -> None:
    dispatcher = fed([BEGIN, RELATION, INSERT, COMMIT])
    assert dispatcher.relations.relation(RELATION.relid) is RELATION
    with pytest.raises(MappingError, match=r"^no relation map entry for remote relation ID 4711$"):
        dispatcher.relations.relation(4711)


# --- recordings -----------------------------------------------------------------------------------

ROWS = Insert | Update | Delete


def decoded(capture: Capture) -> list[Message]:
    decoder = Decoder(parallel=capture.parallel)
    return [decoder.decode(data) for _, data in capture.messages]


def check(messages: list[Message]) -> list[Action]:
    """Receive until the first error. Only a ProtocolError may be raised, and the actions must be well formed.

    Messages that a block spools are skipped, as by a caller of must_spool().
    """
    dispatcher = Dispatcher()
    actions: list[Action] = []
    opened, block = None, None
    for message in messages:
        if dispatcher.must_spool(encode(message)[0]):
            actions.append(None)
            continue
        try:
            action = dispatcher.receive(message)
        except ProtocolError:
            break
        actions.append(action)
        match action:
            case BeginTransaction():
                assert (opened, block) == (None, None)
                opened = action.transaction
            case ApplyChange() | TruncateTables():
                assert action.transaction is opened
            case EndTransaction():
                assert action.transaction is opened
                opened = None
            case BeginStreamBlock():
                assert (opened, block) == (None, None)
                block = action.xid
            case EndStreamBlock():
                assert action.xid == block
                block = None
            case AbortStreamed() | ApplySpooled() | FinishPrepared():
                assert (opened, block) == (None, None)
        assert (dispatcher.transaction, dispatcher.block) == (opened, block)
    return actions


def number(things: list[Action] | list[Message], kind: type | UnionType) -> int:
    return sum(isinstance(thing, kind) for thing in things)


def test_recordings_exist_with_and_without_streaming_and_two_phase() -> None:
    kinds = {frozenset({"streaming", "two_phase"} & capture.options.keys()) for capture in captures()}
    assert len(kinds) == 4


@pytest.mark.parametrize("capture", captures(), ids=lambda c: c.name)
def test_a_recording_is_in_order(capture: Capture) -> None:
    messages = decoded(capture)
    actions = check(messages)
    assert len(actions) == len(messages)
    outside = [m for m in messages if getattr(m, "xid", None) is None]
    assert number(actions, ApplyChange) == number(outside, ROWS)
    assert number(actions, EndTransaction) == number(messages, Commit | Prepare)
    assert number(actions, FinishPrepared) == number(messages, CommitPrepared | RollbackPrepared)
    assert number(actions, BeginStreamBlock) == number(actions, EndStreamBlock) == number(messages, StreamStart)
    assert number(actions, AbortStreamed) == number(messages, StreamAbort)
    assert number(actions, ApplySpooled) == number(messages, StreamCommit | StreamPrepare)
    assert any(action.first for action in actions if isinstance(action, BeginStreamBlock)) == (
        number(actions, BeginStreamBlock) > 0
    )


@given(capture=st.sampled_from(captures()), data=st.data())
def test_a_recording_in_disorder_is_a_protocol_error_or_in_order_again(capture: Capture, data: st.DataObject) -> None:
    messages = decoded(capture)
    start = data.draw(st.integers(0, len(messages) - 1))
    piece = messages[start : start + 60]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(piece) - 1))
        match data.draw(st.sampled_from(["drop", "repeat", "swap"])):
            case "drop" if len(piece) > 1:
                del piece[place]
            case "repeat":
                piece.insert(place, piece[place])
            case _:
                piece[place], piece[-1] = piece[-1], piece[place]
    check(piece)
