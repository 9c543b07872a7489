"""What /metrics says, and that documents, dashboard and alert rules name what there is."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from mstar.errors import RequestError
from mstar.ipc.messages import Beat, Compiled, Ready, Stats
from mstar.plugin.session import SessionTable
from mstar.plugin.spec import ModelSpec
from mstar.server.metrics import Metrics, Timeline
from mstar.server.native import GenerateRequest, TextInput
from mstar.server.requests import EngineState, Limits
from mstar.server.results import Result
from mstar.types import AudioChunk, TextChunk

DOCS = Path(__file__).resolve().parents[2] / "docs"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",), "gauge": ("",)}


def audio(seconds: float, *, index: int = 0) -> AudioChunk:
    return AudioChunk(np.zeros(round(seconds * 1000), dtype=np.float32), 1000, index=index)


@pytest.fixture
def state(parrot_spec: ModelSpec) -> EngineState:
    sessions = SessionTable(ttl_s=10, max_sessions=2)
    return EngineState(graph=parrot_spec.graph(None), limits=Limits(max_running=4, max_queue=8), sessions=sessions)


@pytest.fixture
def metrics(state: EngineState, parrot_spec: ModelSpec) -> Metrics:
    return Metrics(state, spec=parrot_spec, model="polly")


def result(*, usage: dict[str, int] | None = None, counts: dict[str, int] | None = None) -> Result:
    return Result(
        finish_reason="stop", indices={0: "stop"}, usage=usage or {}, counts=counts or {}, counters={},
        prompt_token_ids=[], seed=0, timings={},
    )  # fmt: skip


def samples(metrics: Metrics) -> dict[str, float]:
    """Sample with labels, as the text has it -> value."""
    text = metrics.render()[0].decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


# ---- one request's times ----------------------------------------------------------------------------------------


def test_a_player_starves_when_audio_comes_after_what_it_had_was_played() -> None:
    timeline = Timeline(task="speech", is_stream=True, submitted=0)
    timeline.add([TextChunk("hi")], now=1)
    timeline.add([audio(0.5)], now=2)  # played until 2.5
    timeline.add([audio(0.5)], now=2.25)  # until 3
    assert timeline.underrun_s == 0
    timeline.add([audio(1.0)], now=3.75)  # 0.75 late; until 4.75
    timeline.add([audio(0.25), audio(0.25)], now=5)  # 0.25 late; until 5.5
    timeline.add([audio(0.25)], now=5.25)
    assert (timeline.first_output, timeline.first_audio) == (1, 2)
    assert timeline.audio_s == pytest.approx(2.75) and timeline.underrun_s == pytest.approx(1.0)


def test_outputs_side_by_side_are_played_side_by_side() -> None:
    timeline = Timeline(task="speech", is_stream=True, submitted=0)
    timeline.add([audio(1, index=0), audio(1, index=1)], now=1)
    timeline.add([audio(1, index=0)], now=2)
    timeline.add([audio(1, index=1)], now=2.5)
    assert timeline.underrun_s == pytest.approx(0.5)


def test_audio_without_samples_is_no_first_audio() -> None:
    timeline = Timeline(task="speech", is_stream=True, submitted=0)
    timeline.add([audio(0)], now=1)
    assert timeline.first_audio is None and timeline.audio_s == 0


# ---- what is recorded -------------------------------------------------------------------------------------------


def test_a_stream_that_ended_well_is_counted_and_timed(metrics: Metrics) -> None:
    timeline = Timeline(task="speech", is_stream=True, submitted=0)
    metrics.record_start("speech", queued_s=0.2)
    metrics.record_chunks(timeline, [audio(0.5)], now=0.3)
    metrics.record_chunks(timeline, [audio(0.5)], now=1.3)
    usage = {"prompt_tokens": 5, "completion_tokens": 7}
    metrics.record_end(timeline, now=1.5, result=result(usage=usage, counts={"bad_frames": 2}))
    found = samples(metrics)
    assert found['mstar_requests_total{outcome="stop",task="speech"}'] == 1
    assert found['mstar_queue_seconds_sum{task="speech"}'] == pytest.approx(0.2)
    assert found['mstar_time_to_first_output_seconds_sum{task="speech"}'] == pytest.approx(0.3)
    assert found['mstar_time_to_first_audio_seconds_sum{task="speech"}'] == pytest.approx(0.3)
    assert found['mstar_audio_seconds_total{task="speech"}'] == pytest.approx(1.0)
    assert found['mstar_audio_underrun_seconds_sum{task="speech"}'] == pytest.approx(0.5)
    assert found['mstar_audio_underrun_seconds_bucket{le="0.0",task="speech"}'] == 0
    assert found['mstar_tokens_total{kind="prompt",task="speech"}'] == 5
    assert found['mstar_tokens_total{kind="completion",task="speech"}'] == 7
    assert found['mstar_counts_total{name="bad_frames"}'] == 2
    assert found['mstar_request_seconds_sum{task="speech"}'] == pytest.approx(1.5)
    assert found['mstar_real_time_factor_sum{task="speech"}'] == pytest.approx(1.5 / 1.0)


def test_numbers_no_counter_can_take_are_left_out(metrics: Metrics) -> None:
    timeline = Timeline(task="chat", is_stream=False, submitted=0)
    counts: Any = {"nan": float("nan"), "text": "many", "negative": -1, "zero": 0, "good": 1}
    metrics.record_end(timeline, now=1, result=result(counts=counts))
    assert [name for name in samples(metrics) if name.startswith("mstar_counts")] == ['mstar_counts_total{name="good"}']


def test_whole_answers_have_no_underrun(metrics: Metrics) -> None:
    timeline = Timeline(task="speech", is_stream=False, submitted=0)
    metrics.record_chunks(timeline, [audio(0.5)], now=1)
    metrics.record_chunks(timeline, [audio(0.5)], now=9)
    metrics.record_end(timeline, now=10, result=result())
    assert not [name for name in samples(metrics) if name.startswith("mstar_audio_underrun")]


def test_errors_are_told_apart_by_status_and_code_and_from_aborts(metrics: Metrics) -> None:
    timeline = Timeline(task="chat", is_stream=False, submitted=0)
    metrics.record_end(timeline, now=2, error=RequestError("gone", status=499, code="aborted"))
    metrics.record_end(timeline, now=2, error=RequestError("full", status=429, code="queue_full"))
    metrics.record_end(timeline, now=2, error=RequestError("broken", status=500))
    found = samples(metrics)
    assert found['mstar_requests_total{outcome="aborted",task="chat"}'] == 1
    assert found['mstar_requests_total{outcome="error",task="chat"}'] == 2
    assert found['mstar_request_errors_total{code="queue_full",status="429"}'] == 1
    assert found['mstar_request_errors_total{code="none",status="500"}'] == 1
    assert not [name for name in found if "499" in name]


def test_labels_that_others_fill_are_bounded(metrics: Metrics) -> None:
    for number in range(1000):
        metrics.record_response(f"/v1/{number}", method=f"M{number}", status=200)
        timeline = Timeline(task="chat", is_stream=False, submitted=0)
        metrics.record_end(timeline, now=2, error=RequestError("no", code=f"code {number}"))
    families = {family.name: family for family in text_string_to_metric_families(metrics.render()[0].decode())}
    assert len(families["mstar_http_responses"].samples) == 65
    assert len(families["mstar_request_errors"].samples) == 65
    assert {sample.labels["method"] for sample in families["mstar_http_responses"].samples} == {"other"}


def test_two_engines_do_not_share_a_registry(state: EngineState, parrot_spec: ModelSpec) -> None:
    one, other = (Metrics(state, spec=parrot_spec, model="polly") for _ in range(2))
    one.record_response("/health", method="GET", status=200)
    assert 'mstar_http_responses_total{method="GET",route="/health",status="200"}' in samples(one)
    assert not [name for name in samples(other) if name.startswith("mstar_http_responses")]


def test_the_state_is_read_at_a_scrape(state: EngineState, metrics: Metrics) -> None:
    assert samples(metrics)["mstar_ready"] == 0
    assert samples(metrics)["mstar_compiled_methods"] == 0
    compiled = Compiled(num_methods=3, num_built=4, seconds=0.5)
    state.receive(Ready(plan=[], max_model_len=9, compiled=compiled), now=0)
    state.submit("r", session=None, now=0)
    stats = Stats(
        running=1, waiting=2, steps=3, pools={"lm": (4, 50)}, slots_used=6, swapped=1, swaps=7, cache_hit_tokens=8,
        cache_queried_tokens=9, method_s={"lm.decode": (10, 30, 0.5)},
    )  # fmt: skip
    state.receive(stats, now=0)
    state.receive(Beat(step="lm.decode", seconds=12), now=0)
    found = samples(metrics)
    assert {name: found[f"mstar_{name}"] for name in ("ready", "requests_running", "requests_waiting")} == {
        "ready": 1, "requests_running": 0, "requests_waiting": 1,
    }  # fmt: skip
    assert (found["mstar_requests_running_limit"], found["mstar_requests_waiting_limit"]) == (4, 8)
    assert found['mstar_kv_pages_used{pool="lm"}'] == 4 and found['mstar_kv_pages{pool="lm"}'] == 50
    assert found["mstar_slot_rows_used"] == 6
    assert (found["mstar_compiled_methods"], found["mstar_compile_builds_total"]) == (3, 4)
    assert found["mstar_compile_seconds"] == 0.5
    assert (found["mstar_kv_swaps_total"], found["mstar_kv_swapped"]) == (7, 1)
    assert (found["mstar_prefix_cache_hit_tokens_total"], found["mstar_prefix_cache_queried_tokens_total"]) == (8, 9)
    assert found["mstar_steps_total"] == 3 and found["mstar_long_step_seconds"] == 12
    for name, value in (("calls", 10), ("rows", 30), ("seconds", 0.5)):
        assert found[f'mstar_method_{name}_total{{method="lm.decode"}}'] == value
    assert found["process_resident_memory_bytes"] > 0 and found["process_open_fds"] > 0
    assert any(name.startswith("mstar_build_info{") and 'model="polly"' in name for name in found)


# ---- in the engine ----------------------------------------------------------------------------------------------


def wire(text: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(inputs=[TextInput(text=text)], **fields)


def test_the_engine_records_what_becomes_of_requests(serving: Callable[..., Any]) -> None:
    async def scenario() -> dict[str, float]:
        async with serving(max_num_seqs=1, max_queue=0, step_s=0.002) as served:
            engine = served.engine
            async for _ in await engine.submit(wire("hello", task="speech", outputs=["audio"], stream=True)):
                pass
            async for _ in await engine.submit(wire("hello", params={"max_tokens": 3})):
                pass
            for task in ("chat", "no such task"):
                with pytest.raises(RequestError):
                    await engine.submit(wire("BOOM", task=task))
            running = await engine.submit(wire("x" * 500))
            with pytest.raises(RequestError, match="the limit is 1"):
                await engine.submit(wire("one too many"))
            running.abort()
            await served.settled()
            await asyncio.sleep(0.15)  # the event loop's lag is measured twice
            return samples(engine.metrics)

    found = asyncio.run(asyncio.wait_for(scenario(), 20))
    requests = {name: value for name, value in found.items() if name.startswith("mstar_requests_total")}
    assert requests == {
        'mstar_requests_total{outcome="stop",task="speech"}': 1,
        'mstar_requests_total{outcome="length",task="chat"}': 1,
        'mstar_requests_total{outcome="error",task="chat"}': 1,
        'mstar_requests_total{outcome="error",task="unknown"}': 2,  # without a task, or with one there is not
        'mstar_requests_total{outcome="aborted",task="chat"}': 1,
    }
    assert found['mstar_request_errors_total{code="queue_full",status="429"}'] == 1
    assert found['mstar_request_errors_total{code="unknown_task",status="400"}'] == 1
    assert found['mstar_request_errors_total{code="none",status="500"}'] == 1
    assert found['mstar_queue_seconds_count{task="chat"}'] == 2
    assert found['mstar_time_to_first_output_seconds_count{task="chat"}'] >= 1
    assert found['mstar_time_to_first_audio_seconds_count{task="speech"}'] == 1
    assert found['mstar_audio_seconds_total{task="speech"}'] == pytest.approx(5 * 80 / 8000)
    assert found['mstar_audio_underrun_seconds_count{task="speech"}'] == 1
    assert found['mstar_counts_total{name="squawks"}'] == 2
    assert found["mstar_event_loop_lag_seconds_count"] >= 1


def test_a_held_up_event_loop_shows_as_lag(serving: Callable[..., Any]) -> None:
    async def scenario() -> float:
        async with serving() as served:
            await asyncio.sleep(0.06)
            time.sleep(0.3)  # on the loop, which is the point
            await asyncio.sleep(0.06)
            return samples(served.engine.metrics)["mstar_event_loop_lag_seconds_sum"]

    assert asyncio.run(scenario()) > 0.2


# ---- documents --------------------------------------------------------------------------------------------------


def series(metrics: Metrics) -> dict[str, tuple[str, ...]]:
    """Metric as the documents name it -> the names of its series."""
    found = {}
    for family in metrics.collect():
        suffixes = SUFFIXES[family.type]
        found[family.name + (suffixes[0] if len(suffixes) == 1 else "")] = tuple(family.name + s for s in suffixes)
    return found


def test_serving_lists_every_metric_and_no_other(metrics: Metrics) -> None:
    section = re.split(r"^## ", (DOCS / "serving.md").read_text(), flags=re.MULTILINE)
    (table,) = [part for part in section if part.startswith("Metrics\n")]
    listed = re.findall(r"^\| `([a-z_]+)` \| (\w+) \|", table, flags=re.MULTILINE)
    kinds = {family.name: family.type for family in metrics.collect()}
    assert sorted(name for name, _ in listed) == sorted(series(metrics))
    for name, kind in listed:
        base = name.removesuffix("_total") if kind == "counter" else name.removesuffix("_info")
        assert kinds[base] == kind.replace("gauge", "info" if name.endswith("_info") else "gauge"), name


def test_metric_names_follow_the_conventions(metrics: Metrics) -> None:
    for family in metrics.collect():
        assert family.name.startswith(("mstar_", "process_")) and family.documentation
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_factor"))


def expressions(node: Any) -> Iterator[str]:
    """PromQL anywhere in a dashboard or rules file."""
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "expr" and isinstance(value, str))
        node = list(node.values())
    for child in node if isinstance(node, list) else ():
        yield from expressions(child)


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yml"])
def test_dashboard_and_alerts_use_metrics_there_are(metrics: Metrics, name: str) -> None:
    text = (DOCS / name).read_text()
    found = list(expressions(json.loads(text) if name.endswith(".json") else yaml.safe_load(text)))
    known = {each for names in series(metrics).values() for each in names}
    used = {word for expr in found for word in re.findall(r"\b(?:mstar|process)_[a-z_]+", expr)}
    assert len(found) >= 7 and used <= known, used - known
    for expr in found:
        for opening, closing in ("()", "{}", "[]"):
            assert expr.count(opening) == expr.count(closing), expr


def test_the_dashboard_can_be_imported() -> None:
    board = json.loads((DOCS / "grafana.json").read_text())
    assert board["title"] and board["schemaVersion"] >= 36 and board["uid"]
    inputs = [one["name"] for one in board["__inputs"] if one["pluginId"] == "prometheus"]
    assert inputs == ["DS_PROMETHEUS"]
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels:
        assert panel["title"] and panel["targets"] and panel["datasource"]["uid"] == "${DS_PROMETHEUS}"


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    groups = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
