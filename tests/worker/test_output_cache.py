"""The cache of encoders' outputs: equal answers with it and without, whatever comes together, ends early or is thrown
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from asking import Answer, Asked, ask_for, image, text
from torch import Tensor

from mstar.errors import PluginError, RequestError
from mstar.plugin.graph import KV, Call, Graph, Method, Node, Port, Walk
from mstar.plugin.media import content_key
from mstar.plugin.states import Start, States
from mstar.plugin.validate import validate
from mstar.worker.output_cache import OutputCache
from mstar.worker.scheduler import Batch
from mstar.worker.state import Batched, Row

DOTS = [image(np.full((2, 3, 3), shade, np.uint8)) for shade in range(8)]


@pytest.fixture(scope="module", params=[{}, {"overlap": True}], ids=["plain", "overlap"])
def asked(request: pytest.FixtureRequest) -> Iterator[Asked]:
    found = Asked(plugin="echo", **request.param)
    yield found
    found.close()


@pytest.fixture(scope="module")
def uncached() -> Iterator[Asked]:
    found = Asked(plugin="echo", encoder_cache_bytes=0)
    yield found
    found.close()


def ask(served: Asked, *parts: Any, cache: bool = True) -> Answer:
    return served.ask(*parts, task="media", params={"cache": cache})


def looks(answer: Answer) -> tuple[int, int]:
    """(calls that ran, calls that were answered from the cache)."""
    return answer.result.counters.get("join.look", 0), answer.result.counts.get("cached_calls", 0)


def test_what_was_seen_is_not_looked_at_again_and_answers_are_equal(asked: Asked, uncached: Asked) -> None:
    first = ask(asked, DOTS[0], text("a"))
    again = ask(asked, text("a"), DOTS[0], DOTS[1])
    assert (looks(first), looks(again)) == ((2, 0), (1, 2))
    for answer, parts in ((first, (DOTS[0], text("a"))), (again, (text("a"), DOTS[0], DOTS[1]))):
        slow = ask(uncached, *parts)
        assert looks(slow) == (len(parts), 0)
        assert torch.equal(answer.tensors["facts"], slow.tensors["facts"]) and answer.result.usage == slow.result.usage
    assert looks(ask(asked, DOTS[0], cache=False)) == (1, 0)
    asked.assert_clean()


def test_requests_together_get_what_they_get_alone(asked: Asked, uncached: Asked) -> None:
    groups = [[DOTS[i % 8], text(str(i % 3)), DOTS[(i * 3) % 8]] for i in range(24)]
    wires = [ask_for(*parts, task="media", params={"cache": True}) for parts in groups]
    found = asked.ask_all(*wires)
    for parts, answer in zip(groups, found, strict=True):
        assert sum(looks(answer)) == 3
        assert torch.equal(answer.tensors["facts"], ask(uncached, *parts).tensors["facts"])
    assert all(looks(answer) == (0, 3) for answer in asked.ask_all(*wires))
    asked.assert_clean()


def test_a_request_that_is_aborted_spoils_nothing(asked: Asked, uncached: Asked) -> None:
    parts = [text(f"word {i}") for i in range(40)]
    wire = ask_for(*parts, task="media", params={"cache": True})

    async def begin() -> None:
        (await asked.engine.submit(wire)).abort()

    for _ in range(5):
        asked.run(begin())
    expected = ask(uncached, *parts).tensors["facts"]
    assert torch.equal(ask(asked, *parts).tensors["facts"], expected)
    again = ask(asked, *parts)
    assert torch.equal(again.tensors["facts"], expected) and looks(again) == (0, 40)
    asked.assert_clean()


def test_metrics_tell_hits_and_memory() -> None:
    served = Asked(plugin="echo", encoder_cache_bytes=200)
    try:
        for _ in range(2):
            ask(served, text("a"))
        for number in range(40):  # 24 bytes each: more than fits
            ask(served, text(str(number)))
        assert looks(ask(served, text("39"))) == (0, 1) and looks(ask(served, text("a"))) == (1, 0)
        stats = served.on_worker(served.worker.stats)
        queries, hits, held = stats.encoder_cache
        assert (queries, hits) == (44, 2) and 150 < held <= 200
        served.assert_clean()
        body = served.engine.metrics.render()[0].decode()
        assert "mstar_encoder_cache_hits_total" in body and "mstar_encoder_cache_bytes" in body
    finally:
        served.close()


# ---- by itself ----------------------------------------------------------------------------------------------------


def work(key: bytes | None, **fields: Any) -> Any:
    usual: dict[str, Any] = {"token_start": 0, "error": None, "stop_reason": None, "counts": {}, "is_cached": False}
    request = SimpleNamespace(is_dead=False)
    return SimpleNamespace(key=("m", "f"), content_key=key, request=request, **usual | fields)


def answered(cache: OutputCache, *works: Any) -> tuple[list[Any], Batch | None]:
    found: list[Any] = []
    rest = cache.rest(Batch(("m", "f"), list(works)), lambda one, values: found.append((one, values)))
    return found, rest


def test_entries_are_copies_and_rows_stay_rows() -> None:
    cache, batched = OutputCache(1000), torch.arange(6.0).view(3, 2)
    tokens = batched[1:]
    cache.keep(work(b"a"), {"row": Row(Batched(batched), 1), "tokens": tokens, "list": [{"x": tokens}], "none": None})
    batched.zero_()
    ((_, values),), rest = answered(cache, work(b"a"))
    assert rest is None and cache.has_answered and cache.num_bytes == 8 + 16 + 16
    assert type(values["row"]) is Row and values["row"].tensor.tolist() == [2, 3]
    assert values["row"].batch.host_row(0).tolist() == [2, 3] and values["none"] is None
    assert values["tokens"].tolist() == values["list"][0]["x"].tolist() == [[2, 3], [4, 5]]
    cache.check_integrity()


def test_the_least_recently_used_goes_and_what_is_too_large_never_comes() -> None:
    cache = OutputCache(40)
    for name in (b"a", b"b"):
        cache.keep(work(name), {"y": torch.zeros(4)})
    answered(cache, work(b"a"))
    cache.keep(work(b"c"), {"y": torch.zeros(4)})
    cache.keep(work(b"d"), {"y": torch.zeros(11)})
    found = {name: len(answered(cache, work(name))[0]) for name in (b"a", b"b", b"c", b"d")}
    assert found == {b"a": 1, b"b": 0, b"c": 1, b"d": 0}
    cache.check_integrity()


@pytest.mark.parametrize(
    "odd", [{"error": RequestError("no")}, {"stop_reason": "stop"}, {"content_key": None}], ids=["error", "stop", "key"]
)
def test_what_ends_or_fails_is_not_kept(odd: dict[str, Any]) -> None:
    cache = OutputCache(100)
    own = work(b"a")
    vars(own).update(odd)
    cache.keep(own, {"y": torch.zeros(1)})
    assert answered(cache, work(b"a"))[0] == [] and cache.num_bytes == 0


def test_what_is_not_kept_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, value = OutputCache(8), torch.zeros(2)
    cache.keep(work(b"a"), {"y": value})
    monkeypatch.setattr(Tensor, "clone", None)
    cache.keep(work(b"a"), {"y": value})
    cache.keep(work(b"large"), {"y": torch.zeros(3)})
    cache.keep(work(b"bare"), {"y": None, "z": ["no tensor"]})
    assert cache.num_bytes == 8 and len(cache._entries) == 1


def test_only_whole_works_of_live_requests_are_answered() -> None:
    cache = OutputCache(100)
    cache.keep(work(b"a", counts={"seen": 2}), {"y": torch.zeros(1)})
    begun, keyless, fresh, dead = work(b"a", token_start=5), work(None), work(b"a"), work(b"a")
    dead.request.is_dead = True
    found, rest = answered(cache, begun, keyless, fresh, dead)
    assert [one for one, _ in found] == [fresh] and rest is not None and rest.works == [begun, keyless]
    assert fresh.counts == {"seen": 2, "cached_calls": 1} and fresh.is_cached
    assert answered(OutputCache(0), work(b"a"))[1] is not None


def test_keys_tell_content_apart() -> None:
    array = np.arange(6, dtype=np.int32)
    contents: list[Any] = [
        (array,), (array.reshape(2, 3),), (array.astype(np.int64),), (array[::-1],), (array, 1), (array, "1"),
        ((array, 1),), (array.tobytes(),), ({"fps": 2.0},), ({"fps": 2},), (None,), ("a", "b"), ("ab",), (["a"], "b"),
        (array[:0],), (),
    ]  # fmt: skip
    keys = [content_key(*content) for content in contents]
    assert len(set(keys)) == len(keys) and content_key(array.copy()) == keys[0]
    assert content_key(torch.arange(6, dtype=torch.int32)) == keys[0]


def test_a_cache_that_cannot_be_right_is_refused() -> None:
    x, y = Port("x"), Port("y", shape=(1,))
    plain = Method(name="f", inputs=(x,), outputs=(y,))

    def check(call: Call, method: Method = plain) -> None:
        walk = Walk(name="w", inputs=("x",), section=call)
        validate(Graph(nodes=(Node("m", (method,)),), walks=(walk,), states=States((Start(walk="w"),))))

    check(Call("m.f"))
    check(Call("m.f", cache="x"))
    with pytest.raises(PluginError, match="no value 'key' that is there"):
        check(Call("m.f", cache="key"))
    with pytest.raises(PluginError, match="which no key tells"):
        check(Call("m.f", cache="x"), replace(plain, kv=KV()))


def test_a_key_that_is_no_bytes_fails_its_request(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    import mstar_plugin_echo.processing as processing

    monkeypatch.setattr(processing, "content_key", lambda content: 5)
    with pytest.raises(RequestError, match="cache key 'key' is int, not bytes"):
        ask(asked, text("a"))
    asked.assert_clean()


def test_tensors_are_never_shared_with_a_batch(asked: Asked) -> None:
    ask(asked, *DOTS)
    held: list[Tensor] = asked.on_worker(
        lambda: [entry.values["seen"] for entry in asked.worker.cache._entries.values()]
    )
    assert held and all(one.untyped_storage().nbytes() == one.nbytes for one in held)
