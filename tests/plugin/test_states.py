"""How states choose walks."""

from __future__ import annotations

from mstar.plugin.states import RequestView, Start, States, Then

STATES = States(
    starts=(
        Start(walk="draw", when=lambda request: "image" in request.outputs),
        Start(walk="write"),
        Start(walk="voice", lane="voice", task="speech"),
    ),
    thens=(
        Then(after="write", walk="review", task="essay", when=lambda request: request.fields["reviews"] > 0),
        Then(after="write", walk="close", step="summarise"),
    ),
)


def view(task: str, *outputs: str, reviews: int = 0) -> RequestView:
    return RequestView(task=task, outputs=outputs, params=None, fields={"reviews": reviews})


def walks(request: RequestView) -> dict[str, str]:
    return {start.lane: start.walk for start in STATES.start(request)}


def test_the_first_start_that_applies_wins_on_each_lane() -> None:
    assert walks(view("essay", "text")) == {"main": "write"}
    assert walks(view("essay", "image")) == {"main": "draw"}
    assert walks(view("speech", "text")) == {"main": "write", "voice": "voice"}


def test_the_first_then_that_applies_is_taken() -> None:
    follows = STATES.after("write", view("essay", reviews=1))
    assert follows is not None
    assert follows.walk == "review"
    follows = STATES.after("write", view("essay"))
    assert follows is not None
    assert (follows.walk, follows.step) == ("close", "summarise")
    follows = STATES.after("write", view("speech", reviews=1))
    assert follows is not None
    assert follows.walk == "close"


def test_a_lane_ends_when_nothing_follows() -> None:
    assert STATES.after("close", view("essay")) is None
