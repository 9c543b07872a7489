"""What other workers say of requests that are not here: not yet, or no more.

Messages of one sender keep their order, those of two have none: a worker may speak of a request before the engine has,
and of what its session keeps after the engine has closed it. Owned by the worker's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from mstar.ipc.messages import Between, Open, ScopeStep
from mstar.worker.state import RequestState

MOST_REQUESTS = 4096


class Strays:
    """Those of one worker.

    Args:
        requests: those that are here.
        is_alone: there are no other workers.

    Attributes:
        early: request -> what waits for it to open, or for the walks that it is about to begin.
        behind: idle session -> steps on what it keeps that the end of their request overtook.
    """

    def __init__(self, requests: Mapping[str, RequestState], *, is_alone: bool) -> None:
        self.early: dict[str, list[Between]] = {}
        self.behind: dict[str, list[ScopeStep]] = {}
        self._requests = requests
        self._is_alone = is_alone
        self._ended: dict[str, str | None] = {}  # the last requests that have ended -> the session that goes on

    def wait(self, message: Between) -> None:
        """Keep a message until its request opens, or begins its next walks."""
        self.early.setdefault(message.request_id, []).append(message)
        _bound(self.early)

    def place(self, message: Between) -> Between | None:
        """A message as it concerns a request that is here; None: it waits for that, or is of no use any more."""
        if message.request_id not in self._ended:
            self.wait(message)
        elif isinstance(message, ScopeStep) and message.path == () and (session := self._ended[message.request_id]):
            heir = next((name for name, other in self._requests.items() if other.info.session == session), None)
            if heir is not None:
                return replace(message, request_id=heir)
            self.behind.setdefault(session, []).append(message)
        return None

    def opened(self, info: Open) -> Iterable[Between]:
        """A request has opened: what is to be done at once."""
        behind = self.behind.pop(info.session, ()) if info.session is not None else ()
        return (*(replace(step, request_id=info.request_id) for step in behind), *self.begun(info.request_id))

    def begun(self, request_id: str) -> Iterable[Between]:
        """A request has begun walks: what is to be tried again."""
        return self.early.pop(request_id, ())

    def ended(self, request_id: str, *, session: str | None = None) -> None:
        """A request has ended: what is still said of it is dropped, but for what a session goes on with."""
        self.early.pop(request_id, None)
        if not self._is_alone:
            self._ended[request_id] = session
            _bound(self._ended)

    def dropped(self, session: str) -> None:
        """A session has ended."""
        self.behind.pop(session, None)
        self._ended |= {name: None for name, own in self._ended.items() if own == session}


def _bound(by_request: dict[str, Any]) -> None:
    """Forget the oldest: what was for one whose place this worker has taken never opens here."""
    if len(by_request) > MOST_REQUESTS:
        del by_request[next(iter(by_request))]
