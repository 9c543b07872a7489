from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from mstar.config import EngineConfig
from mstar.errors import ConfigError, RequestError
from mstar.ipc.channel import memory_channel
from mstar.ipc.messages import Abort, Close, Dead, DropSession, Open, StopAt
from mstar.plugin.processor import Processor
from mstar.plugin.spec import Limits, ModelSpec
from mstar.server.engine import Engine, RequestHandle, served_names
from mstar.server.native import GenerateRequest, TextInput, TokensInput
from mstar.types import TextChunk


def wire(text: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(inputs=[TextInput(text=text)], **fields)


async def collect(handle: RequestHandle) -> str:
    return "".join([chunk.text async for chunk in handle if isinstance(chunk, TextChunk)])


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


def test_a_request_goes_all_the_way(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving() as served:
            handle = await served.engine.submit(wire("hello", seed=7))
            assert await collect(handle) == "hello"
            result = handle.result
            assert result.finish_reason == "stop" and result.seed == 7
            assert result.usage == {"prompt_tokens": 5, "completion_tokens": 5}
            assert result.counts == {"squawks": 1} and result.counters == {"lm.decode": 5}
            assert result.prompt_token_ids == list(b"hello") and result.extra == {"parrot": True}
            assert 0 <= result.timings["queued_s"] <= result.timings["first_output_s"] <= result.timings["total_s"]
            await served.settled()
            assert isinstance(served.worker.seen[-1], Close)

    run(scenario())


def test_a_drawn_seed_is_reported_and_sent(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving() as served:
            handles = [await served.engine.submit(wire("a")) for _ in range(2)]
            for handle in handles:
                await collect(handle)
            seeds = [handle.result.seed for handle in handles]
            assert seeds[0] != seeds[1] and all(0 <= seed < 2**63 for seed in seeds)
            assert [m.seed for m in served.worker.seen if isinstance(m, Open)] == seeds

    run(scenario())


def test_no_more_requests_are_open_than_may_run(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving(max_num_seqs=2) as served:
            handles = [await served.engine.submit(wire(f"request {i}")) for i in range(8)]
            assert await asyncio.gather(*map(collect, handles)) == [f"request {i}" for i in range(8)]
            assert served.worker.most_open == 2
            await served.settled()

    run(scenario())


def test_a_full_queue_refuses_with_429(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving(max_num_seqs=1, max_queue=1, step_s=0.01) as served:
            handles = [await served.engine.submit(wire("x" * 20)) for _ in range(2)]
            with pytest.raises(RequestError, match="the limit is 2") as caught:
                await served.engine.submit(wire("third"))
            assert caught.value.status == 429 and served.engine.state.retry_after_s >= 1
            assert await asyncio.gather(*map(collect, handles)) == ["x" * 20] * 2

    run(scenario())


def test_length_is_told_from_stop(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving() as served:
            handle = await served.engine.submit(wire("hello", params={"max_tokens": 3}))
            assert await collect(handle) == "hel"
            assert handle.result.finish_reason == "length"

    run(scenario())


def test_a_stop_string_cuts_text_tokens_and_usage(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving(step_s=0.002) as served:
            text = "one two three four five" * 20
            handle = await served.engine.submit(wire(text, params={"stop": ["thr", "zzz"]}))
            chunks = [chunk async for chunk in handle]
            assert "".join(chunk.text for chunk in chunks) == "one two "
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            assert tokens == list(b"one two thr")
            assert handle.result.finish_reason == "stop"
            assert handle.result.usage["completion_tokens"] == len(tokens)
            assert any(isinstance(message, StopAt) for message in served.worker.seen)

    run(scenario())


def test_held_back_text_is_released_at_the_end(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving() as served:
            handle = await served.engine.submit(wire("abcST", params={"stop": "STOP"}))
            assert await collect(handle) == "abcST"

    run(scenario())


def test_each_of_n_outputs_has_its_own_text_and_reason(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving() as served:
            handle = await served.engine.submit(wire("ab", params={"n": 2}))
            chunks = [chunk async for chunk in handle]
            for index in (0, 1):
                assert "".join(chunk.text for chunk in chunks if chunk.index == index) == "ab"
            assert handle.result.indices == {0: "stop", 1: "stop"}

    run(scenario())


def test_a_processor_step_runs_between_walks(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving() as served:
            handle = await served.engine.submit(wire("abc", params={"again": True}))
            assert await collect(handle) == "abccba"

    run(scenario())


def test_a_failing_request_fails_alone(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving() as served:
            texts = ["good one", "bad # node", "bad ! decode", "good two"]
            handles = [await served.engine.submit(wire(text)) for text in texts]
            found = await asyncio.gather(*map(collect, handles), return_exceptions=True)
            assert found[0] == "good one" and found[3] == "good two"
            assert isinstance(found[1], RequestError) and found[1].message == "the node failed"
            assert isinstance(found[2], RequestError) and found[2].status == 500
            assert "ZeroDivisionError" in found[2].message and "a fault" not in found[2].message
            with pytest.raises(RequestError, match="ZeroDivisionError"):
                await served.engine.submit(wire("BOOM"))
            await served.settled()
            assert await collect(await served.engine.submit(wire("after"))) == "after"

    run(scenario())


def test_a_result_that_cannot_be_read_fails_its_request_alone(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving() as served:
            handles = [await served.engine.submit(wire(text)) for text in ("good one", "bad ~", "good two")]
            found = await asyncio.gather(*map(collect, handles), return_exceptions=True)
            assert (found[0], found[2]) == ("good one", "good two")
            assert isinstance(found[1], RequestError) and found[1].status == 500 and "TypeError" in found[1].message
            await served.settled()

    run(scenario())


def test_chunks_before_a_failure_are_delivered(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving(step_s=0.02) as served:
            handle = await served.engine.submit(wire("ab#"))
            got = []
            with pytest.raises(RequestError):
                async for chunk in handle:
                    got.append(chunk.text)
            assert got == ["a", "b"]

    run(scenario())


@pytest.mark.parametrize("when", ["encoding", "queued", "running"])
def test_an_aborted_request_frees_what_it_holds(serving: Callable[..., Any], when: str) -> None:
    async def scenario() -> None:
        async with serving(max_num_seqs=1, step_s=0.01) as served:
            engine = served.engine
            blocker = await engine.submit(wire("x" * 30)) if when == "queued" else None
            if when == "encoding":
                submitting = asyncio.ensure_future(engine.submit(wire("slow encode")))
                await asyncio.sleep(0.05)
                submitting.cancel()
            else:
                handle = await engine.submit(wire("y" * 900))
                if when == "running":
                    await anext(handle)
                handle.abort()
                with pytest.raises(RequestError, match="aborted"):
                    await collect(handle)
            if blocker is not None:
                assert await collect(blocker) == "x" * 30
            await served.settled()
            assert any(isinstance(m, Abort) for m in served.worker.seen) == (when == "running")
            assert await collect(await engine.submit(wire("after"))) == "after"

    run(scenario())


def test_a_dead_worker_fails_all_and_refuses_more(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving(step_s=0.005) as served:
            handles = [await served.engine.submit(wire(text)) for text in ("x" * 500, "12^")]
            for found in await asyncio.gather(*map(collect, handles), return_exceptions=True):
                assert isinstance(found, RequestError) and found.status == 503 and "device is gone" in found.message
            assert "device is gone" in served.engine.state.unready
            with pytest.raises(RequestError) as caught:
                await served.engine.submit(wire("more"))
            assert caught.value.status == 503

    run(scenario())


def test_a_request_past_its_deadline_is_ended(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving(step_s=0.01, request_timeout_s=0.3) as served:
            handle = await served.engine.submit(wire("x" * 900))
            with pytest.raises(RequestError, match="was running when its 0.3 s were over") as caught:
                await collect(handle)
            assert caught.value.status == 504
            await served.settled()

    run(scenario())


def test_what_can_never_fit_is_refused_at_once(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving() as served:
            with pytest.raises(RequestError, match=r"needs up to 1024 tokens .* holds 1000") as caught:
                await served.engine.submit(wire("x" * 1001))
            assert caught.value.status == 400
            with pytest.raises(RequestError, match=r"needs up to 2001 tokens .* the limit is 2000; .* --max-model-len"):
                await served.engine.submit(wire("x" * 2001))
            await served.settled()

    run(scenario())


def test_sessions_are_opened_continued_and_lost(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving() as served:
            engine = served.engine
            with pytest.raises(RequestError) as caught:
                await engine.submit(wire("continue", session="s"))
            assert caught.value.status == 404 and "no session 's'" in caught.value.message
            await collect(first := await engine.submit(wire("frames", session="s")))
            assert first.request.session == "s" and not first.request.resumed
            second = await engine.submit(wire("continue", session="s"))
            with pytest.raises(RequestError) as caught:
                await engine.submit(wire("continue", session="s"))
            assert caught.value.status == 409
            await collect(second)
            assert second.request.resumed
            engine.close_session("s")
            with pytest.raises(RequestError) as caught:
                engine.close_session("s")
            assert caught.value.status == 404

    run(scenario())


def test_clients_ask_for_the_served_names_or_else_the_model_and_the_plugin(parrot_spec: ModelSpec) -> None:
    def names(**settings: Any) -> tuple[str, ...]:
        return served_names(EngineConfig(plugin="parrot", **settings), parrot_spec)

    assert names() == ("tiny", parrot_spec.name)
    assert names(model="a/b") == ("a/b", parrot_spec.name)
    assert names(model="a/b", served_model_name=("x", "y")) == ("x", "y")


def test_a_request_that_fails_when_the_worker_is_done_with_it_ends_its_session(serving: Callable[..., Any]) -> None:
    """The worker's side has gone on by what the client never got."""

    async def scenario() -> None:
        async with serving() as served:
            await collect(await served.engine.submit(wire("frames", session="s")))
            with pytest.raises(RequestError, match="internal error"):
                await collect(await served.engine.submit(wire("continue~", session="s")))
            with pytest.raises(RequestError) as caught:
                await served.engine.submit(wire("continue", session="s"))
            assert caught.value.status == 404
            await served.settled()
            assert served.worker.seen.count(DropSession(session="s")) == 1

    run(scenario())


def test_a_model_that_cannot_load_stops_the_start(parrot_spec: ModelSpec) -> None:
    def make_processor(limits: Limits) -> Processor:
        raise AssertionError("the worker never said Ready")

    async def scenario() -> None:
        engine_end, worker_end = memory_channel(check=True)
        worker_end.send(Dead(reason="ConfigError: no weights"))
        engine = Engine(
            spec=parrot_spec,
            graph=parrot_spec.graph(None),
            make_processor=make_processor,
            config=EngineConfig(plugin="parrot"),
            end=engine_end,
        )
        with pytest.raises(ConfigError, match="no weights"):
            await engine.start()

    run(scenario())


@pytest.mark.parametrize("said", ["EXIT", "ab%c"])
def test_a_model_that_would_end_the_process_fails_its_request_only(serving: Callable[..., Any], said: str) -> None:
    async def scenario() -> None:
        async with serving() as served:
            with pytest.raises(RequestError, match="internal error") as caught:
                await collect(await served.engine.submit(wire(said)))
            assert caught.value.status == 500
            assert await collect(await served.engine.submit(wire("hello"))) == "hello"
            await served.settled()

    run(scenario())


def test_each_of_n_has_a_finish_reason_even_if_it_gives_nothing(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving() as served:
            handle = await served.engine.submit(GenerateRequest(inputs=[TokensInput(ids=[])], params={"n": 3}))
            assert await collect(handle) == ""
            assert handle.result.indices == {0: "stop", 1: "stop", 2: "stop"}

    run(scenario())


def test_closing_ends_what_runs(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving(step_s=0.01) as served:
            handle = await served.engine.submit(wire("x" * 900))
            await anext(handle)
        with pytest.raises(RequestError) as caught:
            await collect(handle)
        assert caught.value.status == 503

    run(scenario())


@pytest.mark.parametrize("phase", ["being encoded", "queued", "running", "being decoded"])
def test_a_deadline_ends_a_request_in_every_phase_and_says_which(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    async def scenario() -> None:
        async with serving(max_num_seqs=1, step_s=0.01) as served:
            engine = served.engine
            blocker = await engine.submit(wire("x" * 900)) if phase == "queued" else None
            if phase == "being decoded":
                monkeypatch.setattr(type(engine._processor), "finish", lambda *_: time.sleep(0.6))
            text = {"being encoded": "slow encode", "being decoded": "ab"}.get(phase, "y" * 900)
            started = time.monotonic()
            with pytest.raises(RequestError, match=f"was {phase} when its 0.3 s were over; .*'timeout_s'") as caught:
                await collect(await engine.submit(wire(text, timeout_s=0.3)))
            assert 0.3 <= time.monotonic() - started < 1.1
            assert (caught.value.status, caught.value.code) == (504, "deadline_exceeded")
            if blocker is not None:
                blocker.abort()
            assert engine.num_active == 0 and engine.state.num_running == engine.state.num_waiting == 0
            await served.settled()

    run(scenario())


def test_a_stream_past_its_deadline_has_given_what_there_was(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving(step_s=0.02) as served:
            handle = await served.engine.submit(wire("x" * 900, stream=True, timeout_s=0.5))
            got = []
            with pytest.raises(RequestError, match="running when its 0.5 s"):
                async for chunk in handle:
                    got.append(chunk)
            assert got
            await served.settled()

    run(scenario())


def test_requests_being_encoded_fill_the_queue_and_leave_it_when_their_clients_go(serving: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with serving(max_num_seqs=1, max_queue=7) as served:
            engine = served.engine
            encoding = [asyncio.ensure_future(engine.submit(wire("slow encode"))) for _ in range(8)]
            await asyncio.sleep(0.05)
            with pytest.raises(RequestError, match="8 requests are running or waiting; the limit is 8") as caught:
                await engine.submit(wire("one too many"))
            assert caught.value.status == 429
            for task in encoding:
                task.cancel()
            await asyncio.wait(encoding)
            assert engine.num_active == 0 and engine.state.num_waiting == 0
            assert await collect(await engine.submit(wire("after"))) == "after"

    run(scenario())
