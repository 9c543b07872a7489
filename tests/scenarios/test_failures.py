"""A request that goes wrong fails alone, with its own error; whoever shares its batch never notices."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from mstar.errors import RequestError

KINDS = {
    # kind -> status, code
    "method": (500, None),
    "prepare": (500, None),
    "finish": (500, None),
    "predicate": (500, None),
    "shape": (500, None),
    "missing": (500, None),
    "memory": (503, "out_of_memory"),
    "request": (422, "told_to_fail"),
    "lane": (500, None),
    "encode": (400, "told_to_fail"),
    "encode_crash": (500, None),
    "decode": (500, None),
    "kv": (400, "context_length_exceeded"),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_request_fails_with_its_own_error(both: Any, make: Callable[..., Any], kind: str) -> None:
    with pytest.raises(RequestError) as caught:
        both.ask(make("trouble", "t", kind=kind, watch=True))
    assert (caught.value.status, caught.value.code) == KINDS[kind]


@pytest.mark.parametrize("setting", ["default", "overlap", "batch_invariant", "chunked", "overlap_swap"])
def test_bystanders_of_every_failure_get_what_they_get_alone(
    engines: Callable[[str], Any], make: Callable[..., Any], setting: str
) -> None:
    served = engines(setting)
    bystanders = [
        make("trouble", "bystander", watch=True, steps=6),
        make("generate", "sampled beside", seed=9, temperature=1.1, repetition_penalty=1.2, max_tokens=12),
        make("generate", "two of them", seed=3, temperature=0.8, n=2, presence_penalty=0.5, max_tokens=9),
        make("nested", "frames beside", seed=4, temperature=0.7, depth_temperature=0.9, max_frames=6),
    ]
    failing = [make("trouble", "t", kind=kind, watch=True, at=at) for kind in KINDS for at in (0, 2)]
    answers = served.ask_all([*failing[::2], *bystanders, *failing[1::2]])
    for ask, answer in zip(bystanders, answers[len(KINDS) : -len(KINDS)], strict=True):
        assert not isinstance(answer, Exception), f"{ask}: {answer!r}"
        served.oracle.check(ask, answer)
    errors = [*answers[: len(KINDS)], *answers[-len(KINDS) :]]
    assert [(error.status, error.code) for error in errors] == list(KINDS.values()) * 2
    served.assert_clean()


def test_rows_that_share_a_sampler_with_a_failing_request_draw_the_same(both: Any, make: Callable[..., Any]) -> None:
    # The bias names no token of the vocabulary: only the worker, which knows it, can find out.
    wrong = make("generate", "wrong", logit_bias={"99999": 1.0})
    sampled = [make("generate", "beside it", seed=seed, temperature=1.0, max_tokens=10) for seed in range(6)]
    answers = both.ask_all([*sampled[:3], wrong, *sampled[3:]])
    error = answers.pop(3)
    assert isinstance(error, RequestError)
    assert error.status == 400 and "99999" in error.message
    for ask, answer in zip(sampled, answers, strict=True):
        both.oracle.check(ask, answer)


def test_a_failing_step_between_walks_fails_its_request(both: Any, make: Callable[..., Any]) -> None:
    asks = [make("states", "draft", fail_step=True), make("states", "draft"), make("generate", "beside")]
    failed, *good = both.ask_all(asks)
    assert isinstance(failed, RequestError) and failed.status == 500
    for ask, answer in zip(asks[1:], good, strict=True):
        both.oracle.check(ask, answer)


def test_a_slow_request_holds_up_only_its_own_steps(both: Any, make: Callable[..., Any]) -> None:
    slow = make("trouble", "slow", kind="sleep", sleep_s=0.05, steps=4)
    quick = [make("branches", "quick", seed=seed) for seed in range(3)]
    for ask, answer in zip([slow, *quick], both.ask_all([slow, *quick]), strict=True):
        both.oracle.check(ask, answer)


def test_a_request_with_more_kv_than_the_pool_is_refused_at_once(
    engines: Callable[[str], Any], make: Callable[..., Any]
) -> None:
    served = engines("swap")
    with pytest.raises(RequestError, match="reaches|need") as caught:
        served.ask(make("generate", "x" * 40, max_tokens=40))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    with pytest.raises(RequestError, match="KV cache") as caught:  # each label fits, both together do not
        served.ask(make("states", "y" * 30, draft_tokens=20, max_tokens=10))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    served.assert_clean()


@pytest.mark.parametrize("overlap", [False, True])
def test_when_memory_locks_up_the_youngest_fails_and_the_others_go_on(
    fresh: Callable[..., Any], make: Callable[..., Any], overlap: bool
) -> None:
    # Frames cannot be recomputed from ids, and there is no swap space: two that both grow cannot both end.
    served = fresh(overlap=overlap, block_size=4, max_model_len=64, kv_cache_memory_bytes=64 * 256, swap_space_bytes=0)
    asks = [make("nested", "abcdefg" * 2, seed=seed, max_frames=45) for seed in range(3)]
    first, *others = served.ask_all(asks)
    served.oracle.check(asks[0], first)
    errors = [answer for answer in others if isinstance(answer, RequestError)]
    assert errors, "three such requests do not fit"
    assert {(error.status, error.code) for error in errors} == {(503, "kv_cache_exhausted")}
    for ask, answer in zip(asks[1:], others, strict=True):
        if not isinstance(answer, RequestError):
            served.oracle.check(ask, answer)
    served.assert_clean()
    served.check_all(asks[:1])


def test_the_loop_survives_a_thousand_failures(both: Any, make: Callable[..., Any]) -> None:
    started = time.monotonic()
    rounds = 0
    while rounds < 10 and time.monotonic() - started < 3:
        both.ask_all([make("trouble", "t", kind=kind, at=rounds % 3) for kind in ("method", "finish", "shape")] * 4)
        rounds += 1
    both.check_all([make("generate", "afterwards"), make("nested", "afterwards")])


def test_an_output_that_cannot_leave_its_process_fails_its_request_alone(
    fresh: Callable[..., Any], make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = fresh()
    send = served.worker.end.send

    def refuse_some(message: Any) -> None:
        if getattr(message, "name", None) == "x":
            raise TypeError("numpy.float32 cannot cross to another process")
        send(message)

    monkeypatch.setattr(served.worker.end, "send", refuse_some)
    failed, good = served.ask_all([make("trouble", "t"), make("generate", "beside")])
    assert isinstance(failed, RequestError) and failed.status == 500
    assert "numpy.float32 cannot cross" in failed.message
    served.oracle.check(make("generate", "beside"), good)
    served.assert_clean()
