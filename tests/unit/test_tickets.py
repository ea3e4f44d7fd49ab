"""Tickets: what a signature covers, how keys change, and what a node refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.api.inference.v1 import inference_pb2
from stoker.common.ticket_keys import KeyFile
from stoker.common.tickets import HEADER, BadKeys, Keys, Ticket, TicketRefused, parse
from stoker.node_agent.config import TicketsConfig
from stoker.node_agent.core.used import UsedTickets
from stoker.node_agent.gate import Gate, hold_to

NOW = 1_000_000.0
OLD, NEW = f"old {'0a' * 32}", f"new {'0b' * 32}"
TICKET = Ticket(b"nonce", NOW + 10, (("tiny-0", 7), ("tiny-2", 9)), "acme", 100, 16)


def keys(*lines: str) -> Keys:
    return parse("tickets.keys", "a file", "\n".join(lines))


def refused(by: Keys, text: str, now: float = NOW, skew_s: float = 0.0) -> str:
    with pytest.raises(TicketRefused) as caught:
        by.read(text, now, skew_s)
    return caught.value.reason


def test_a_ticket_comes_back_as_it_was_signed() -> None:
    assert keys(OLD).read(keys(OLD).sign(TICKET), NOW, 0.0) == TICKET


def test_any_change_is_noticed() -> None:
    text = keys(OLD).sign(TICKET)
    for at in range(text.index(".") + 1, len(text)):
        other = "A" if text[at] != "A" else "B"
        changed = text[:at] + other + text[at + 1 :]
        if text[at] == "." or text[at] == "=" or text[at + 1 : at + 2] in ("=", ".", ""):
            continue  # the last character of base64 has bits that say nothing
        assert refused(keys(OLD), changed) == "TICKET_INVALID", at


@pytest.mark.parametrize("text", ["", "old", "old.", "old..", "old.x.y", "old.é.é", "old." + "A" * 5000])
def test_what_is_no_ticket_is_refused(text: str) -> None:
    assert refused(keys(OLD), text) in ("TICKET_INVALID", "TICKET_KEY_UNKNOWN")


def test_a_key_is_renewed_without_a_moment_in_which_tickets_fail() -> None:
    routers, agents = keys(OLD), keys(OLD)
    agents = keys(OLD, NEW)
    assert agents.read(routers.sign(TICKET), NOW, 0.0)
    routers = keys(NEW, OLD)
    assert agents.read(routers.sign(TICKET), NOW, 0.0)
    agents = keys(NEW)
    assert agents.read(routers.sign(TICKET), NOW, 0.0)
    assert refused(agents, keys(OLD).sign(TICKET)) == "TICKET_KEY_UNKNOWN"


def test_the_id_of_a_key_does_not_open_another() -> None:
    text = keys(OLD).sign(TICKET)
    assert refused(keys(OLD, NEW), "new" + text[3:]) == "TICKET_INVALID"


def test_a_ticket_ends_but_for_the_skew_of_the_clocks() -> None:
    text = keys(OLD).sign(TICKET)
    assert refused(keys(OLD), text, NOW + 10.1) == "TICKET_EXPIRED"
    assert keys(OLD).read(text, NOW + 14.9, 5.0)
    assert refused(keys(OLD), text, NOW + 15.1, 5.0) == "TICKET_EXPIRED"


@pytest.mark.parametrize(
    "content", ["", "# none", "a", "a 0a0b", f"a {'0' * 65}", f"{OLD}\n{OLD}", f"a b {'0a' * 32}", "\n".join(
        f"k{n} {'0a' * 32}" for n in range(9)
    )]
)  # fmt: skip
def test_a_bad_file_of_keys_names_the_setting(content: str) -> None:
    with pytest.raises(BadKeys, match=r"tickets\.keys"):
        parse("tickets.keys", "a file", content)


def test_a_file_is_followed_and_a_broken_one_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# comment\n\n{OLD}\n")
    file = KeyFile(str(path))
    path.write_text("broken")
    file.look()
    assert file.keys == keys(OLD)
    path.write_text(f"{NEW}\n{OLD}\n")
    file.look()
    assert file.keys == keys(NEW, OLD)
    path.unlink()
    file.look()
    assert file.keys == keys(NEW, OLD)
    with pytest.raises(BadKeys, match="cannot read"):
        KeyFile(str(path))


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(tmp_path: Path, clock: Clock) -> Gate:
    path = tmp_path / "keys"
    path.write_text(OLD)
    return Gate(TicketsConfig(keys=str(path)), KeyFile(str(path)), clock)


def shown(ticket: Ticket) -> tuple[tuple[str, str], ...]:
    return ((HEADER, keys(OLD).sign(ticket)),)


def test_a_ticket_opens_each_of_its_places_once(gate: Gate) -> None:
    assert gate.check(shown(TICKET), "tiny-0", 7) == TICKET
    with pytest.raises(TicketRefused) as used:
        gate.check(shown(TICKET), "tiny-0", 7)
    assert used.value.reason == "TICKET_USED"
    assert gate.check(shown(TICKET), "tiny-2", 9) == TICKET, "at another place of the pick"


def test_a_ticket_opens_a_replica_as_often_as_it_names_a_rank_of_it(gate: Gate) -> None:
    ticket = msgspec.structs.replace(TICKET, places=(("tiny-0", 7), ("tiny-2", 9), ("tiny-0", 7)))
    for rank in ("0", "1"):
        assert gate.check((*shown(ticket), ("x-data-parallel-rank", rank)), "tiny-0", 7) == ticket
    for rank in ("2", "01", "whatever"):
        with pytest.raises(TicketRefused) as used:
            gate.check((*shown(ticket), ("x-data-parallel-rank", rank)), "tiny-0", 7)
        assert used.value.reason == "TICKET_USED"
    assert gate.check(shown(ticket), "tiny-2", 9) == ticket


@pytest.mark.parametrize(
    ("metadata", "replica", "epoch", "reason"),
    [
        ((), "tiny-0", 7, "TICKET_MISSING"),
        (((HEADER, b"bytes"),), "tiny-0", 7, "TICKET_MISSING"),
        (shown(TICKET), "tiny-1", 7, "TICKET_WRONG_REPLICA"),
        (shown(TICKET), "tiny-0", 8, "TICKET_STALE"),
    ],
)
def test_what_a_node_refuses(gate: Gate, metadata: object, replica: str, epoch: int, reason: str) -> None:
    with pytest.raises(TicketRefused) as refusal:
        gate.check(metadata, replica, epoch)  # type: ignore[arg-type] # as gRPC gives it
    assert refusal.value.reason == reason


def test_a_refused_ticket_is_not_used_up(gate: Gate) -> None:
    with pytest.raises(TicketRefused):
        gate.check(shown(TICKET), "tiny-1", 7)
    assert gate.check(shown(TICKET), "tiny-0", 7)


def test_a_routers_pass_is_good_for_any_replica_and_often(gate: Gate, clock: Clock) -> None:
    own = Ticket(b"x", NOW + 3600)
    assert gate.check(shown(own), "tiny-0", 7)
    assert gate.check(shown(own), "tiny-1", 9)
    clock.now += 4000
    with pytest.raises(TicketRefused):
        gate.check(shown(own), "tiny-1", 9)


def test_tickets_may_be_missing_while_routers_come_to_have_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(OLD)
    gate = Gate(TicketsConfig(keys=str(path), required=False), KeyFile(str(path)), Clock())
    assert gate.check((), "tiny-0", 7) is None
    with pytest.raises(TicketRefused):
        gate.check(shown(TICKET), "tiny-1", 7)


def test_without_keys_nothing_is_asked_for() -> None:
    assert Gate(TicketsConfig(), KeyFile("")).check((), "tiny-0", 7) is None


def request(tokens: int = 0, **sampling: Any) -> inference_pb2.GenerateRequest:
    asked = inference_pb2.GenerateRequest(sampling=inference_pb2.Sampling(**sampling))
    asked.token_ids.ids.extend(range(tokens))
    return asked


def test_a_request_may_not_be_larger_than_what_was_picked() -> None:
    hold_to(TICKET, request(100, max_tokens=16))
    hold_to(TICKET, request(100, max_tokens=8, n=2))
    hold_to(TICKET, request(500, max_tokens=8, truncate_prompt_tokens=90))
    hold_to(None, request(1000))
    hold_to(Ticket(b"", NOW, (("tiny-0", 7),)), request(1000))
    for larger in (request(max_tokens=17), request(max_tokens=9, n=2), request(), request(101, max_tokens=1)):
        with pytest.raises(TicketRefused) as refusal:
            hold_to(TICKET, larger)
        assert refusal.value.reason == "TICKET_EXCEEDED"


def test_used_tickets_are_remembered_until_they_end_and_never_without_bound() -> None:
    used = UsedTickets(most=3)
    assert used.use(b"a", 10.0, 0.0)
    assert not used.use(b"a", 10.0, 10.0)
    assert used.use(b"b", 20.0, 10.1)
    assert len(used) == 1
    for number in range(9):
        assert used.use(b"%d" % number, 30.0, 11.0)
    assert len(used) == 3
    assert not used.use(b"8", 30.0, 11.0)
