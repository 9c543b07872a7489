"""A session's life: open, busy, idle, expired or evicted."""

from __future__ import annotations

import pytest

from mstar.errors import RequestError
from mstar.plugin import session as session_module
from mstar.plugin.session import SessionTable


def table(*, ttl_s: float = 10, max_sessions: int = 2) -> SessionTable:
    return SessionTable(ttl_s=ttl_s, max_sessions=max_sessions)


def opened(sessions: SessionTable, name: str, *, now: float) -> list[str]:
    dropped = sessions.open(name, now=now) + sessions.make_room()
    sessions.release(name, now=now)
    return dropped


def refused(error: pytest.ExceptionInfo[RequestError]) -> tuple[int, str | None, str | None]:
    return error.value.status, error.value.code, error.value.param


def test_a_session_goes_on_where_it_was_left() -> None:
    sessions = table()
    assert sessions.open("a", now=0) == []
    sessions.release("a", now=1)
    assert sessions.is_open("a", now=2)
    sessions.resume("a", now=2)
    sessions.release("a", now=3)
    assert sessions.idle() == ["a"]


def test_a_busy_session_refuses_a_second_request() -> None:
    sessions = table()
    sessions.open("a", now=0)
    for act in (sessions.resume, sessions.close):
        with pytest.raises(RequestError, match="'a' is busy") as error:
            act("a", now=100)
        assert refused(error) == (409, "session_busy", "session")


def test_an_open_session_is_not_opened_again() -> None:
    sessions = table()
    opened(sessions, "a", now=0)
    with pytest.raises(RequestError, match="open already") as error:
        sessions.open("a", now=1)
    assert refused(error) == (409, "session_open", "session")


def test_an_unknown_session_is_404() -> None:
    with pytest.raises(RequestError, match="no session 'a'") as error:
        table().resume("a", now=0)
    assert refused(error) == (404, "session_not_found", "session")


def test_an_idle_session_expires_and_is_410_from_then_on() -> None:
    sessions = table()
    opened(sessions, "a", now=0)
    assert sessions.expire(now=10) == []
    with pytest.raises(RequestError, match="kept for 10 s"):
        sessions.resume("a", now=10.1)  # even before anybody asked what has expired
    assert sessions.expire(now=10.1) == ["a"]
    assert sessions.expire(now=10.2) == []
    with pytest.raises(RequestError) as error:
        sessions.close("a", now=11)
    assert refused(error) == (410, "session_expired", "session")


def test_a_busy_session_does_not_expire() -> None:
    sessions = table()
    sessions.open("a", now=0)
    assert sessions.expire(now=1000) == []


def test_the_time_to_live_starts_anew_at_each_release() -> None:
    sessions = table()
    opened(sessions, "a", now=0)
    sessions.resume("a", now=9)
    sessions.release("a", now=15)
    assert sessions.expire(now=24) == []
    assert sessions.expire(now=26) == ["a"]


def test_an_expired_name_can_be_opened_anew_and_its_old_state_is_dropped() -> None:
    sessions = table()
    opened(sessions, "a", now=0)
    assert sessions.open("a", now=20) == ["a"]
    sessions.release("a", now=21)
    assert sessions.is_open("a", now=22)


def test_a_new_session_takes_the_place_of_the_one_idle_longest() -> None:
    sessions = table()
    opened(sessions, "a", now=0)
    opened(sessions, "b", now=1)
    sessions.resume("a", now=2)
    sessions.release("a", now=3)
    assert opened(sessions, "c", now=4) == ["b"]
    assert sessions.idle() == ["a", "c"]
    with pytest.raises(RequestError) as error:
        sessions.resume("b", now=5)
    assert error.value.status == 410


def test_a_session_that_is_not_opened_after_all_takes_nobodys_place() -> None:
    sessions = table()
    for name in ("gone", "a", "b"):
        opened(sessions, name, now=1)
    assert sessions.open("gone", now=2) == []
    sessions.discard("gone")
    assert sessions.make_room() == [] and sessions.idle() == ["a", "b"]
    assert sessions.missing("gone").status == 410  # as it was before


def test_no_new_session_while_all_are_busy() -> None:
    sessions = table(max_sessions=1)
    sessions.open("a", now=0)
    with pytest.raises(RequestError, match="all 1 sessions are busy.*--max-sessions") as error:
        sessions.open("b", now=1)
    assert refused(error) == (429, "too_many_sessions", "session")
    with pytest.raises(RequestError, match="switched off"):
        table(max_sessions=0).open("a", now=0)


def test_what_is_refused_before_it_begins_evicts_nobody() -> None:
    sessions = table(max_sessions=1)
    opened(sessions, "a", now=0)
    assert sessions.open("b", now=1) == []
    sessions.discard("b")
    assert sessions.make_room() == [] and sessions.is_open("a", now=2)
    assert sessions.open("c", now=2) == [] and sessions.make_room() == ["a"]


def test_a_closed_or_failed_session_is_unknown() -> None:
    sessions = table()
    opened(sessions, "a", now=0)
    sessions.close("a", now=1)
    sessions.open("b", now=1)
    sessions.discard("b")
    sessions.discard("b")
    assert len(sessions) == 0
    assert {sessions.missing(name).status for name in "ab"} == {404}


def test_only_so_many_expired_names_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_REMEMBERED", 2)
    sessions = table(max_sessions=3)
    for name in "abc":
        opened(sessions, name, now=0)
    sessions.expire(now=20)
    assert [sessions.missing(name).status for name in "abc"] == [404, 410, 410]
