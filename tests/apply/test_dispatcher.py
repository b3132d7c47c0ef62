"""Every message in every state, and the sequences that real publishers sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.apply.dispatcher import Action, Change, Close, Dispatcher, Empty, Open
from subscriber.errors import MappingError, ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    OldPart,
    Origin,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)
from tests.apply.build import remote, row
from tests.captures import Capture, captures

FINISH, END = Lsn(100), Lsn(120)
BEGIN = Begin(FINISH, 1_000_000, 731)
COMMIT = Commit(FINISH, END, 1_000_000)
RELATION = remote("a*", "b")
INSERT = Insert(None, RELATION.relid, row("1", "x"))
PREPARED = (Lsn(1), Lsn(2), 3, 4, "gid")

EVERYTHING: dict[str, Message] = {
    "BEGIN": BEGIN,
    "COMMIT": COMMIT,
    "ORIGIN": Origin(Lsn(0), "o"),
    "RELATION": RELATION,
    "TYPE": Type(None, 20000, "s", "mood"),
    "INSERT": INSERT,
    "UPDATE": Update(None, RELATION.relid, None, None, row("1", "y")),
    "DELETE": Delete(None, RELATION.relid, OldPart.KEY, row("1", None)),
    "TRUNCATE": Truncate(None, False, False, (RELATION.relid,)),
    "MESSAGE": LogicalMessage(None, True, Lsn(99), "p", b"c"),
    "STREAM START": StreamStart(731, True),
    "STREAM STOP": StreamStop(),
    "STREAM COMMIT": StreamCommit(731, FINISH, END, 0),
    "STREAM ABORT": StreamAbort(731, 731, None, None),
    "BEGIN PREPARE": BeginPrepare(*PREPARED),
    "PREPARE": Prepare(*PREPARED),
    "COMMIT PREPARED": CommitPrepared(*PREPARED),
    "ROLLBACK PREPARED": RollbackPrepared(Lsn(1), Lsn(2), 3, 4, 5, "gid"),
    "STREAM PREPARE": StreamPrepare(*PREPARED),
}
# How to get into each state, and the messages that may come in it.
STATES: dict[str, tuple[list[Message], set[str]]] = {
    "idle": ([], {"BEGIN"}),
    "idle after an empty transaction": ([BEGIN, COMMIT], {"BEGIN"}),
    "idle after a transaction": ([BEGIN, INSERT, COMMIT], {"BEGIN"}),
    "just begun": (
        [BEGIN],
        {"COMMIT", "ORIGIN", "RELATION", "TYPE", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "MESSAGE"},
    ),
    **{
        f"in a transaction, after {message.message_type}": (
            [BEGIN, message],
            {"COMMIT", "RELATION", "TYPE", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "MESSAGE"},
        )
        for name, message in EVERYTHING.items()
        if name in ("ORIGIN", "RELATION", "TYPE", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "MESSAGE")
    },
}


def fed(messages: list[Message]) -> Dispatcher:
    dispatcher = Dispatcher()
    for message in messages:
        dispatcher.receive(message)
    return dispatcher


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("state", STATES)
def test_what_may_come_and_what_may_not(state: str, name: str) -> None:
    before, allowed = STATES[state]
    dispatcher = fed(before)
    if name in allowed:
        dispatcher.receive(EVERYTHING[name])
    else:
        transaction = dispatcher.transaction
        with pytest.raises(ProtocolError, match=f"{name} message sent out of order"):
            dispatcher.receive(EVERYTHING[name])
        assert dispatcher.transaction is transaction


def test_what_is_done_about_a_transaction() -> None:
    dispatcher = Dispatcher()
    opened = dispatcher.receive(BEGIN)
    assert isinstance(opened, Open)
    transaction = opened.transaction
    assert (transaction.xid, transaction.finish_lsn, transaction.commit_time) == (731, FINISH, 1_000_000)
    assert not transaction.changed
    for name in ("ORIGIN", "TYPE", "RELATION", "MESSAGE"):
        assert dispatcher.receive(EVERYTHING[name]) is None
    for name in ("INSERT", "UPDATE", "DELETE"):
        change = dispatcher.receive(EVERYTHING[name])
        assert isinstance(change, Change)
        assert change.transaction is transaction
        assert change.message is EVERYTHING[name]
    truncate = dispatcher.receive(EVERYTHING["TRUNCATE"])
    assert isinstance(truncate, Empty)
    assert truncate.message is EVERYTHING["TRUNCATE"]
    assert dispatcher.transaction is transaction
    close = dispatcher.receive(COMMIT)
    assert isinstance(close, Close)
    assert close.transaction is transaction
    assert close.end_lsn == END
    assert dispatcher.transaction is None


def test_a_commit_must_be_that_of_the_transaction() -> None:
    dispatcher = fed([BEGIN])
    with pytest.raises(ProtocolError) as caught:
        dispatcher.receive(Commit(Lsn(0x1_0000_0000), END, 0))
    assert caught.value.message == "incorrect commit LSN 1/0 in commit message (expected 0/64)"
    assert dispatcher.transaction is not None


@pytest.mark.parametrize("before", [[], [BEGIN]], ids=["idle", "in a transaction"])
def test_a_message_of_no_transaction_may_come_at_any_time(before: list[Message]) -> None:
    assert fed(before).receive(LogicalMessage(None, False, Lsn(1), "p", b"")) is None


def test_an_error_says_where_it_was() -> None:
    with pytest.raises(ProtocolError) as caught:
        Dispatcher().receive(COMMIT)
    assert caught.value.detail == "It came outside a transaction."
    with pytest.raises(ProtocolError) as caught:
        fed([BEGIN]).receive(BEGIN)
    assert caught.value.detail == "It came in transaction 731."


def test_relations_outlive_transactions() -> None:
    dispatcher = fed([BEGIN, RELATION, INSERT, COMMIT])
    assert dispatcher.relations.relation(RELATION.relid) is RELATION
    with pytest.raises(MappingError, match=r"^no relation map entry for remote relation ID 4711$"):
        dispatcher.relations.relation(4711)


# --- recordings -----------------------------------------------------------------------------------

WHOLE = [c for c in captures() if not {"streaming", "two_phase"} & c.options.keys()]


def decoded(capture: Capture) -> list[Message]:
    decoder = Decoder()
    return [decoder.decode(data) for _, data in capture.messages]


def check(messages: list[Message]) -> list[Action]:
    """Receive until the first error; nothing but a ProtocolError is raised, and what is done is well formed."""
    dispatcher = Dispatcher()
    actions: list[Action] = []
    opened = None
    for message in messages:
        try:
            action = dispatcher.receive(message)
        except ProtocolError:
            break
        actions.append(action)
        match action:
            case Open():
                assert opened is None
                opened = action.transaction
            case Change() | Empty():
                assert action.transaction is opened
            case Close():
                assert action.transaction is opened
                opened = None
        assert dispatcher.transaction is opened
    return actions


def test_there_are_recordings() -> None:
    assert len(WHOLE) >= 5


@pytest.mark.parametrize("capture", WHOLE, ids=lambda c: c.name)
def test_a_recording_is_in_order(capture: Capture) -> None:
    messages = decoded(capture)
    actions = check(messages)
    assert len(actions) == len(messages)
    assert sum(isinstance(a, Change) for a in actions) == sum(isinstance(m, Insert | Update | Delete) for m in messages)
    assert sum(isinstance(a, Close) for a in actions) == sum(isinstance(m, Commit) for m in messages)


@given(capture=st.sampled_from(WHOLE), data=st.data())
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


@pytest.mark.parametrize("capture", [c for c in captures() if c not in WHOLE], ids=lambda c: c.name)
def test_streamed_and_prepared_transactions_are_refused_for_now(capture: Capture) -> None:
    decoder = Decoder(parallel=capture.parallel)
    messages = [decoder.decode(data) for _, data in capture.messages]
    with pytest.raises(ProtocolError, match="sent out of order"):
        fed(messages)
