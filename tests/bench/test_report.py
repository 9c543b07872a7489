"""Numbers from samples: nothing is dropped, nothing failed counts as good."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from rich.console import Console

from mstar.bench.measure import Sample
from mstar.bench.report import SERVER_LAG, distribution, lines, plot, server_lag, summarize, table

UNBOUND: dict[str, Any] = {"max_first_audio_s": None, "max_rtf": None}


def sample(number: int = 0, **fields: Any) -> Sample:
    base = {"start_s": 0.0, "latency_s": 2.0, "first_audio_s": 0.5, "audio_s": 4.0, "num_chunks": 4}
    return Sample(number=number, **(base | fields))


def test_percentiles_are_numpy_s() -> None:
    values = list(np.random.default_rng(0).gamma(2, size=101))
    found = distribution(values)
    assert found == {
        "mean": pytest.approx(np.mean(values)), "p50": sorted(values)[50], "p90": sorted(values)[90],
        "p95": sorted(values)[95], "p99": sorted(values)[99], "min": min(values), "max": max(values),
    }  # fmt: skip
    assert distribution([]) == {}


def test_both_ways_round_of_the_real_time_factor_are_named() -> None:
    summary = summarize([sample(), sample(latency_s=8.0)], wall_s=10.0, **UNBOUND)
    assert summary["rtf"]["max"] == 2.0 and summary["rtf"]["min"] == 0.5
    assert summary["audio_s_per_wall_s"]["max"] == 2.0 and summary["audio_s_per_wall_s"]["min"] == 0.5
    assert summary["total_audio_s_per_wall_s"] == 0.8 and summary["requests_per_s"] == 0.2


def test_failures_are_counted_by_kind_and_count_in_nothing_else() -> None:
    failed = [sample(failure=kind, latency_s=99.0, audio_s=9.0) for kind in ("http_429", "short", "http_429")]
    summary = summarize([sample(), *failed], wall_s=4.0, **UNBOUND)
    assert (summary["num_requests"], summary["num_failed"]) == (4, 3)
    assert summary["failures"] == {"http_429": 2, "short": 1}
    assert summary["latency_s"]["max"] == 2.0 and summary["total_audio_s_per_wall_s"] == 1.0


def test_all_failed_is_a_report_too() -> None:
    summary = summarize([sample(failure="timeout", audio_s=0.0)], wall_s=1.0, max_first_audio_s=1.0, max_rtf=1.0)
    assert summary["num_failed"] == 1 and summary["latency_s"] == {} and summary["goodput_per_s"] == 0
    assert summarize([], wall_s=1.0, **UNBOUND)["num_requests"] == 0


def test_continuity_is_of_chunks_and_of_requests() -> None:
    samples = [sample(), sample(underrun_s=0.04, num_late_chunks=1), sample(underrun_s=3.0, num_late_chunks=2)]
    summary = summarize(samples, wall_s=1.0, **UNBOUND)
    assert summary["continuity"]["mean"] == pytest.approx(0.75) and summary["continuity"]["min"] == 0.5
    assert summary["continuous_share"] == pytest.approx(2 / 3)
    whole = summarize([sample(first_audio_s=None)], wall_s=1.0, **UNBOUND)
    assert whole["continuity"] == whole["underrun_s"] == whole["first_audio_s"] == {}
    assert "continuous_share" not in whole


@pytest.mark.parametrize(
    ("goal", "num_good"),
    [
        ({"max_first_audio_s": 0.5, "max_rtf": None}, 3),
        ({"max_first_audio_s": 0.4, "max_rtf": None}, 1),
        ({"max_first_audio_s": None, "max_rtf": 0.5}, 2),
        ({"max_first_audio_s": 0.5, "max_rtf": 0.4}, 0),
    ],
)
def test_goodput_counts_requests_that_keep_all_bounds(goal: dict[str, Any], num_good: int) -> None:
    samples = [
        sample(), sample(latency_s=4.0), sample(first_audio_s=None), sample(first_audio_s=0.3, latency_s=3.0),
        sample(failure="short", first_audio_s=0.1, latency_s=0.1),
    ]  # fmt: skip
    assert summarize(samples, wall_s=2.0, **goal)["goodput_per_s"] == num_good / 2.0


def metrics(*lags: float) -> str:
    registry = CollectorRegistry()
    histogram = Histogram(SERVER_LAG, "lag", registry=registry, buckets=(0.001, 0.01, 0.1))
    for lag in lags:
        histogram.observe(lag)
    return generate_latest(registry).decode()


def test_the_server_s_lag_is_that_of_this_run_alone() -> None:
    before, after = metrics(*[0.05] * 500), metrics(*[0.05] * 500, *[0.0005] * 98, 0.005, 0.005)
    assert server_lag(before, after) == {"p50": 0.001, "p90": 0.001, "p95": 0.001, "p99": 0.01}
    assert server_lag(after, after) == {} == server_lag("", "")
    assert server_lag("<html>{\0", "<html>{\0") == {}


def test_the_table_shows_every_distribution_and_the_lines_every_failure() -> None:
    bad = sample(failure="http_503", detail="no room")
    report = {
        "summary": summarize([sample(), bad], wall_s=1.0, **UNBOUND),
        "server": {"event_loop_lag_s": {"p50": 0.25, "p99": 0.75}},
        "client": {"event_loop_lag_s": distribution([0.125]), "cpu_s": 0.5},
        "samples": [{"failure": "http_503", "detail": "no room"}],
    }
    file = io.StringIO()
    Console(width=140, file=file).print(table(report))
    text = file.getvalue()
    assert all(word in text for word in ("first_audio_s", "rtf", "p99", "server event_loop_lag_s", "0.75", "0.125"))
    shown = "\n".join(lines(report))
    assert "num_failed 1" in shown and "1 x http_503, such as: no room" in shown and "cpu_s 0.5" in shown


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot([sample(), sample(first_audio_s=1.0), sample(failure="short")], tmp_path / "x.svg")
    assert "<svg" in (tmp_path / "x.svg").read_text()
    plot([], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_samples_are_json() -> None:
    assert json.loads(json.dumps(dataclasses.asdict(sample())))["audio_s"] == 4.0
