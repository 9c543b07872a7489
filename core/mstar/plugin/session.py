"""Which sessions are open, busy, idle, expired. Sans-IO: the server's engine passes `now` and acts on the answers.

Knows names and times only; the sequences and outputs a session keeps lie with the workers, which drop them when
told to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mstar.errors import RequestError

MAX_REMEMBERED = 10_000
"""How many expired names are remembered, to answer 410 instead of 404."""


@dataclass(slots=True)
class SessionTable:
    """The server's sessions. A session is busy from `open` or `resume` until `release`, and expires when idle.

    Args:
        ttl_s: seconds an idle session is kept.
        max_sessions: most sessions at once; a new one takes the place of the one idle longest.

    Whatever `open`, `make_room` and `expire` return, the workers must drop.
    """

    ttl_s: float
    max_sessions: int
    _idle_since: dict[str, float | None] = field(default_factory=dict)  # None: busy; idle ones in order of time
    _gone: dict[str, None] = field(default_factory=dict)  # expired or evicted, oldest first

    def __len__(self) -> int:
        return len(self._idle_since)

    def is_open(self, name: str, *, now: float) -> bool:
        return name in self._idle_since and not self._is_stale(name, now)

    def open(self, name: str, *, now: float) -> list[str]:
        """Open a session that is not open, busy with its first request; an expired name may be used anew.

        Returns the sessions to drop before, which may include an expired one of this name; whose place it takes,
        `make_room` says once its request is known to be in order.
        Raises RequestError 409 if it is open, 429 if every session is busy.
        """
        dropped = self.expire(now=now)
        if name in self._idle_since:
            raise _error(
                409, "session_open", f"session {name!r} is open already; send only what continues it, or delete it"
            )
        if len(self._idle_since) - len(self.idle()) >= self.max_sessions:
            reason = f"all {self.max_sessions} sessions are busy" if self.max_sessions else "sessions are switched off"
            raise _error(429, "too_many_sessions", f"{reason}; try again later, or raise --max-sessions")
        self._idle_since[name] = None
        return dropped

    def make_room(self, *, num_opening: int = 0) -> list[str]:
        """Forget those idle longest while there are more than may be, and return them.

        Args:
            num_opening: busy sessions that take nobody's place yet, as their first request may be refused.
        """
        evicted = self.idle()[: max(0, len(self._idle_since) - num_opening - self.max_sessions)]
        for name in evicted:
            self._forget(name)
        return evicted

    def resume(self, name: str, *, now: float) -> None:
        """Make an open session busy. Raises RequestError 409 if it is busy, 410 if it has expired, 404 if unknown."""
        self._take(name, now)
        self._idle_since[name] = None

    def release(self, name: str, *, now: float) -> None:
        """Its request has ended; from now on the session is idle."""
        assert self._idle_since.get(name, now) is None, f"session {name!r} is not busy"
        self._gone.pop(name, None)
        del self._idle_since[name]  # to the end of the order
        self._idle_since[name] = now

    def close(self, name: str, *, now: float) -> None:
        """Forget an idle session, as its client asks. Raises RequestError as `resume` does."""
        self._take(name, now)

    def discard(self, name: str) -> None:
        """Forget a session whose request failed: what it kept cannot be continued. No error if it is not open."""
        self._idle_since.pop(name, None)

    def expire(self, *, now: float) -> list[str]:
        """Forget idle sessions past their time, and return them."""
        expired = [name for name in self._idle_since if self._is_stale(name, now)]
        for name in expired:
            self._forget(name)
        return expired

    def idle(self) -> list[str]:
        """Idle sessions, the one idle longest first: the order in which to swap out or evict."""
        return [name for name, since in self._idle_since.items() if since is not None]

    def missing(self, name: str) -> RequestError:
        """The error for a request that would continue a session which is not open: 410 or 404."""
        if name in self._gone or name in self._idle_since:  # the latter: past its time, about to be expired
            kept = f"kept for {self.ttl_s:g} s when idle, at most {self.max_sessions} at once"
            return _error(410, "session_expired", f"session {name!r} has expired ({kept}); open it with all inputs")
        return _error(404, "session_not_found", f"there is no session {name!r}; open it with all inputs")

    def _is_stale(self, name: str, now: float) -> bool:
        since = self._idle_since[name]
        return since is not None and now - since > self.ttl_s

    def _take(self, name: str, now: float) -> None:
        """Remove an open session that is idle."""
        if not self.is_open(name, now=now):
            raise self.missing(name)
        if self._idle_since[name] is None:
            raise _error(409, "session_busy", f"session {name!r} is busy with another request; wait until it has ended")
        del self._idle_since[name]

    def _forget(self, name: str) -> None:
        del self._idle_since[name]
        self._gone[name] = None
        if len(self._gone) > MAX_REMEMBERED:
            del self._gone[next(iter(self._gone))]


def _error(status: int, code: str, message: str) -> RequestError:
    return RequestError(message, status=status, param="session", code=code)
