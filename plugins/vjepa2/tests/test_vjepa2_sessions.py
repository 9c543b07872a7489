"""Open-loop control on sessions: whatever happens between two requests, the next goes on rightly or says it cannot."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar.errors import RequestError

SAME = 1e-5
FRAME = 18  # tokens of a frame's block, and here of a page
ARMS = ("left", "right", "third")


@pytest.fixture
def world(serving: Callable[..., Any]) -> Iterator[Any]:
    found = serving(block_size=FRAME)
    yield found
    found.assert_clean()


class Arm:
    """A rollout on a session, piece by piece, and what it is as a whole."""

    def __init__(self, asks: Any, world: Any, name: str, *, seed: int = 1, horizon: int = 8, context: int = 1) -> None:
        self.name, self.asks, self.world = name, asks, world
        self.whole = asks.rollout(seed, horizon, context=context)
        self.right = world.ask(self.whole)
        self.context, self.done = context, 0

    def next(self, steps: int) -> Any:
        """The request for the next steps."""
        start = self.context - 1 + self.done
        tensors = {"actions": self.whole.tensors["actions"][start : start + steps]}
        if not self.done:
            actions = self.whole.tensors["actions"][: start + steps]
            return self.asks.Ask("rollout", self.whole.tensors | {"actions": actions}, self.whole.params, 1, self.name)
        return self.asks.Ask("rollout", tensors, session=self.name)

    def check(self, answer: Any, steps: int) -> None:
        """The steps have been asked for: they must be those of the whole."""
        assert not isinstance(answer, BaseException), repr(answer)
        first = self.context - 1 + self.done
        states = self.right["states"][:, first : first + steps + 1] if self.done else answer["states"][:, first:]
        ends = self.right["latents"][:, self.done : self.done + steps], states
        for found, right in zip((answer["latents"], answer["states"][:, -steps - 1 :]), ends, strict=True):
            torch.testing.assert_close(found, right, atol=SAME, rtol=0)
        self.done += steps

    def go(self, steps: int) -> None:
        self.check(self.world.ask(self.next(steps)), steps)

    def refusal(self) -> tuple[int, str | None]:
        error = self.world.refusal(self.next(1))
        return error.status, error.code


@pytest.fixture
def arm(world: Any, asks: Any) -> Iterator[Callable[..., Arm]]:
    """`arm(name)`: an `Arm` of this world, whose session is deleted in the end."""
    made: list[Arm] = []

    def make(name: str, **how: Any) -> Arm:
        made.append(Arm(asks, world, name, **how))
        return made[-1]

    yield make
    for each in made:
        with contextlib.suppress(RequestError):  # it may have ended
            world.close_session(each.name)


def test_sessions_go_on_beside_each_other_and_beside_other_requests(
    world: Any, arm: Callable[..., Arm], asks: Any
) -> None:
    arms = [arm(name, seed=i, context=1 + i) for i, name in enumerate(ARMS)]
    for steps in (1, 2, 1, 4):
        others = [asks.rollout(9, 3), asks.plan(8), asks.rollout(7, 2, rows=3)]
        answers = world.ask_all([each.next(steps) for each in arms] + others)
        for each, answer in zip(arms, answers, strict=False):
            each.check(answer, steps)
    assert world.pages() == 8 + 9 + 10


def test_idle_sessions_that_were_moved_out_go_on_as_if_they_had_stayed(serving: Callable[..., Any], asks: Any) -> None:
    for settings in ({}, {"overlap": True}):
        world = serving(block_size=FRAME, kv_cache_memory_bytes=10 * FRAME * 768, **settings)
        arms = [Arm(asks, world, name, seed=i, horizon=10) for i, name in enumerate(ARMS)]
        for steps in (3, 1, 4):
            for each in arms:
                each.go(steps)
            world.ask(asks.rollout(9, 10))
            assert [scope.tenant.is_swapped for scope in kept(world)] == [True] * 3
        for each, answer in zip(arms, world.ask_all([each.next(2) for each in arms]), strict=True):
            each.check(answer, 2)  # of which only one has room at a time
        for each in arms:
            world.close_session(each.name)
        world.assert_clean()


def kept(world: Any) -> list[Any]:
    """The scopes of idle sessions."""
    holdings = world.worker.router.holdings
    scopes: list[Any] = world.on_worker(lambda: [s for own in holdings.sessions.values() for s in own.values()])
    return scopes


@pytest.mark.parametrize("steps", [1, 4])
def test_without_swap_space_idle_sessions_stay_and_others_are_refused(
    serving: Callable[..., Any], asks: Any, steps: int
) -> None:
    world = serving(block_size=FRAME, kv_cache_memory_bytes=10 * FRAME * 768, swap_space_bytes=0)
    one = Arm(asks, world, "left")
    one.go(4)
    assert world.refusal(asks.rollout(2, 8)).code == "kv_cache_exhausted"
    one.go(steps)
    world.close_session("left")
    world.assert_clean()
    assert world.ask(asks.rollout(2, 8))["latents"].shape[1] == 8


def test_the_session_idle_longest_makes_place_for_a_new_one(serving: Callable[..., Any], asks: Any) -> None:
    world = serving(block_size=FRAME, max_sessions=2)
    first, second, third = (Arm(asks, world, name, seed=i) for i, name in enumerate(ARMS))
    first.go(2)
    second.go(1)
    first.go(1)
    third.go(1)
    for _ in range(2):  # who asks in vain takes nobody's place
        assert second.refusal() == (410, "session_expired")
        assert world.refusal(asks.Ask("rollout", {"actions": torch.zeros(1, 7)}, session="typo")).status == 404
        first.go(1)
        third.go(1)
    second.done = 0
    second.go(2)
    assert first.refusal() == (410, "session_expired")
    third.go(2)
    for each in (second, third):
        world.close_session(each.name)
    world.assert_clean()


def test_sessions_expire(serving: Callable[..., Any], asks: Any) -> None:
    world = serving(block_size=FRAME, session_ttl_s=0.5)
    one = Arm(asks, world, "left")
    one.go(3)
    time.sleep(1.2)
    for _ in range(2):
        assert one.refusal() == (410, "session_expired")
    world.assert_clean()
    assert world.pages() == 0
    one.done = 0
    one.go(2)
    world.close_session("left")


def test_a_busy_session_is_not_touched(world: Any, arm: Callable[..., Arm], asks: Any) -> None:
    one = arm("left", horizon=31)
    one.go(1)

    async def meanwhile() -> Any:
        handle = await world.engine.submit(one.next(20).wire())
        errors = []
        for act in (lambda: world.engine.submit(one.next(1).wire()), lambda: delete(world, "left")):
            with pytest.raises(RequestError) as caught:
                await act()
            errors.append((caught.value.status, caught.value.code))
        async for _ in handle:
            pass
        return errors

    assert world.run(meanwhile()) == [(409, "session_busy")] * 2
    one.done += 20
    one.go(3)
    world.close_session("left")
    assert one.refusal() == (404, "session_not_found")
    assert world.refusal(asks.plan(1).on("left")).status == 400


async def delete(world: Any, name: str) -> None:
    world.engine.close_session(name)


def test_a_refused_request_leaves_its_session_as_it_was(world: Any, arm: Callable[..., Arm], asks: Any) -> None:
    one = arm("left", context=2)
    one.go(2)
    wrong: list[tuple[dict[str, Tensor], dict[str, Any], int]] = [
        ({}, {}, 400),
        ({"actions": torch.zeros(2, 6)}, {}, 400),
        ({"actions": torch.zeros(2, 7)}, {"horizon": 3}, 400),
        ({"actions": torch.zeros(30, 7)}, {}, 400),
        ({"actions": torch.zeros(2, 2, 7)}, {}, 400),
        ({"actions": torch.zeros(2, 7), "states": torch.zeros(1, 7)}, {}, 400),
        ({"actions": torch.zeros(2, 7), "goal": torch.zeros(3, 64)}, {}, 400),
        ({"actions": torch.zeros(2, 7), "state": torch.zeros(7)}, {}, 409),
        ({"actions": torch.zeros(2, 7), "frames": asks.frames(1)}, {}, 409),
        ({"actions": torch.zeros(2, 7)}, {"context_frames": 2}, 409),
    ]
    for tensors, params, status in wrong:
        assert world.refusal(asks.Ask("rollout", tensors, params, session="left")).status == status, (tensors, params)
        if one.done < 6:
            one.go(1)
    one.go(2)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_an_aborted_request_ends_its_session(world: Any, arm: Callable[..., Arm], after: int) -> None:
    one = arm("left", horizon=31)
    one.go(1)
    assert world.refusal(one.next(25), abort_after=after).code == "aborted"
    assert one.refusal() == (404, "session_not_found")
    world.assert_clean()
    one.done = 0
    one.go(2)
    one.go(1)


def test_a_request_aborted_in_the_queue_leaves_its_session_as_it_was(serving: Callable[..., Any], asks: Any) -> None:
    world = serving(block_size=FRAME, max_num_seqs=1)
    one = Arm(asks, world, "left")
    one.go(3)

    async def meanwhile() -> None:
        running = await world.engine.submit(asks.rollout(5, 31).wire())
        waiting = await world.engine.submit(one.next(2).wire())
        waiting.abort()
        async for _ in running:
            pass

    world.run(meanwhile())
    one.go(2)
    one.go(3)
    world.close_session("left")
    world.assert_clean()


def test_a_request_that_fails_ends_its_session(
    world: Any, arm: Callable[..., Arm], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = arm("left"), arm("right", seed=2)
    one.go(2)
    other.go(1)
    methods = world.worker.modules["ac"].methods
    step = methods["step"]

    def fails(context: Any, **inputs: Any) -> Any:
        if bool((inputs["given"] == 0).any()) and int(context.positions[0]) >= 4 * FRAME:
            raise RuntimeError("a step failed")
        return step(context, **inputs)

    monkeypatch.setitem(methods, "step", fails)
    assert world.refusal(one.next(4)).status == 500
    monkeypatch.undo()
    assert one.refusal() == (404, "session_not_found")
    other.go(3)


def test_states_may_be_measured_anew_on_the_way(world: Any, arm: Callable[..., Arm], asks: Any) -> None:
    """Given states take the place of integrated ones from there on, as in one request whose states are all given."""
    one = arm("left")
    one.go(3)
    measured = asks.draw(2, 7, seed=50, scale=0.5)
    tensors = {"actions": one.whole.tensors["actions"][3:5], "states": measured}
    found = world.ask(asks.Ask("rollout", tensors, session="left"))
    given = {"states": torch.cat([one.right["states"][0, :3], measured]), "actions": one.whole.tensors["actions"][:5]}
    right = world.ask(asks.Ask("rollout", {"frames": one.whole.tensors["frames"], **given}))
    torch.testing.assert_close(found["latents"], right["latents"][:, 3:], atol=SAME, rtol=0)
    torch.testing.assert_close(found["states"], right["states"][:, 3:], atol=SAME, rtol=0)


def test_a_worker_that_stopped_is_said_to_have(serving: Callable[..., Any], asks: Any) -> None:
    world = serving(block_size=FRAME, max_num_seqs=2)
    one = Arm(asks, world, "left", horizon=31)
    one.go(1)

    def stop(context: Any, **_: Any) -> Any:
        raise KeyboardInterrupt("the process ends")

    world.worker.modules["ac"].methods["step"] = stop
    errors = world.ask_all([one.next(9), asks.plan(1), asks.rollout(3, 2)])
    assert {(error.status, error.code) for error in errors} == {(503, "worker_dead")}, errors
    assert one.refusal() == (503, "unavailable")
