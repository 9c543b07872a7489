"""What leaves a worker: the engine's messages, with each request's output in item order.

Owned by the worker's thread; knows cursors' Each groups, not programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mstar.ipc.messages import Between, Emit, FromWorker
from mstar.worker.state import Cursor, EachGroup, GroupKeys, Groups, Lane, Parceled, Row


class Output:
    """Collects `messages`; output of later items waits until the earlier ones have ended.

    Attributes:
        posts: (worker, message) for other workers, in order.
    """

    def __init__(self) -> None:
        self.messages: list[FromWorker] = []
        self.posts: list[tuple[int, Between]] = []

    def post(self, worker: int, message: Between) -> None:
        """Send a message to another worker."""
        self.posts.append((worker, message))

    def take_back(self, request_id: str) -> None:
        """Send other workers no more of what is still here of a request."""
        self.posts[:] = [post for post in self.posts if post[1].request_id != request_id]

    def emit(
        self, cursor: Cursor, name: str, *, value: Any = None, final: bool = False, reason: str | None = None
    ) -> None:
        """Send a value, or the end of an item, to the client's side."""
        request_id, path = cursor.lane.request.info.request_id, cursor.scope.path
        more: dict[str, Any] = {"parcel": value} if type(value) is Parceled else {"value": value}
        message = Emit(request_id=request_id, name=name, path=path, final=final, reason=reason, **more)
        self._deliver(message, cursor.groups)

    def item_ended(self, groups: Groups) -> None:
        """The innermost item of these groups has ended: whatever waited for it goes out."""
        if not groups:
            return
        group, index = groups[-1]
        group.done.add(index)
        while group.next in group.done:
            group.done.discard(group.next)
            group.next += 1
            for message in group.held.pop(group.next, ()):
                self._deliver(message, groups[:-1])

    def settle(self, lane: Lane, groups: Groups) -> None:
        """In a fed lane an item has ended when what fed it has, and no cursor of the lane is left in it."""
        for level in range(len(groups), 0, -1):
            group, index = groups[level - 1]
            if index not in group.fed or any((group, index) in cursor.groups for cursor in lane.live.values()):
                return
            self.item_ended(groups[:level])

    def _deliver(self, message: Emit, groups: Groups) -> None:
        for group, index in groups[::-1]:
            if group.next != index:
                group.held.setdefault(index, []).append(message)
                return
        self.messages.append(message)


def mirrored(lane: Lane, groups: GroupKeys) -> Groups:
    """A fed lane's own groups for those of the lane that feeds it."""
    own = lane.groups
    for worker, number, size, _ in groups:
        if (worker, number) not in own:
            own[(worker, number)] = EachGroup(size)
    return tuple((own[(worker, number)], index) for worker, number, _, index in groups)


def to_host(value: Any) -> Any:
    """A value that can leave the worker: no batch behind a row, no device."""
    if type(value) is Parceled:  # it has left
        return value
    if type(value) is Row:
        return value.batch.host_row(value.at)
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {key: to_host(item) for key, item in value.items()}
    return [to_host(item) for item in value] if isinstance(value, list | tuple) else value


def to_device(value: Any, device: torch.device) -> Any:
    """A value from the engine, its tensors on the device."""
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_device(item, device) for item in value]
    return value.to(device) if isinstance(value, Tensor) else value
