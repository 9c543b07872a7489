"""Results that calls in another worker than the walk's home give: they go to the server from there, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mstar.ipc.messages import Parcel
from mstar.worker import remote


@pytest.fixture(params=[("three", "default"), ("decode apart", "overlap"), ("components", "swap")], ids="-".join)
def meshed(
    meshes: Callable[[str, str], Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """An engine where every tensor counts as large."""
    monkeypatch.setattr(remote, "INLINE_BYTES", 1)
    found = meshes(*request.param)
    yield found
    found.assert_clean()


def test_large_results_are_the_same_and_leave_nothing(meshed: Any, cases: Callable[..., Any]) -> None:
    routing, parcels = meshed.engine._end.routing, list[Parcel]()
    heard = routing.from_worker

    def listen(worker: int, message: Any) -> Any:
        parcels.extend([message] if isinstance(message, Parcel) else [])
        return heard(worker, message)

    routing.from_worker = listen
    try:
        for ask in cases():
            meshed.oracle.check(ask, meshed.ask(ask))
        meshed.check_all(cases())
    finally:
        del routing.from_worker
    assert parcels and not routing._routed
