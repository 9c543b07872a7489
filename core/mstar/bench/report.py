"""From samples to a report: distributions, throughput, failures by kind, goodput; as data, as a table, as a plot.

Pure: no clock, no server. A request that failed counts in no distribution, and is never left out of the counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from mstar.bench.measure import Sample

PERCENTILES = (50, 90, 95, 99)
CONTINUOUS_S = 0.05  # nobody hears pauses that are shorter in all
SERVER_LAG = "mstar_event_loop_lag_seconds"
_MEASURES: dict[str, Callable[[Sample], float | None]] = {
    "first_audio_s": lambda sample: sample.first_audio_s,
    "latency_s": lambda sample: sample.latency_s,
    "audio_s": lambda sample: sample.audio_s,
    "rtf": lambda sample: sample.rtf,
    "audio_s_per_wall_s": lambda sample: 1 / sample.rtf,
    "underrun_s": lambda sample: None if sample.first_audio_s is None else sample.underrun_s,
    "continuity": lambda sample: (
        None if sample.first_audio_s is None else 1 - sample.num_late_chunks / sample.num_chunks
    ),
}


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles (linear between samples) and extremes; empty for no values."""
    if not len(values):
        return {}
    percentiles = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(np.mean(values)), **percentiles, "min": float(min(values)), "max": float(max(values))}


def summarize(
    samples: Sequence[Sample], *, wall_s: float, max_first_audio_s: float | None, max_rtf: float | None
) -> dict[str, Any]:
    """What samples come to.

    Args:
        wall_s: from the first request to the end.
        max_first_audio_s, max_rtf: what a request must keep to count into the goodput.
    """
    good = [sample for sample in samples if sample.failure is None]
    summary: dict[str, Any] = {
        "num_requests": len(samples),
        "num_failed": len(samples) - len(good),
        "failures": dict(Counter(sample.failure for sample in samples if sample.failure is not None)),
        "wall_s": wall_s,
        "requests_per_s": len(good) / wall_s,
        "total_audio_s_per_wall_s": sum(sample.audio_s for sample in good) / wall_s,
        **{name: distribution([v for v in map(read, good) if v is not None]) for name, read in _MEASURES.items()},
    }
    if streamed := [sample for sample in good if sample.first_audio_s is not None]:
        summary["continuous_share"] = sum(sample.underrun_s <= CONTINUOUS_S for sample in streamed) / len(streamed)
    if max_first_audio_s is not None or max_rtf is not None:
        first, rtf = max_first_audio_s or math.inf, max_rtf or math.inf
        num_met = sum((sample.first_audio_s or sample.latency_s) <= first and sample.rtf <= rtf for sample in good)
        summary["goodput_per_s"] = num_met / wall_s
    return summary


def server_lag(before: str, after: str) -> dict[str, float]:
    """How late the server's event loop was between two readings of /metrics: upper bounds. Empty: it does not say."""
    first, last = _buckets(before), _buckets(after)
    counts = {bound: last[bound] - first.get(bound, 0) for bound in sorted(last)}
    if not any(counts.values()):
        return {}
    total = max(counts.values())
    return {f"p{p}": next(bound for bound, n in counts.items() if n >= total * p / 100) for p in PERCENTILES}


def _buckets(text: str) -> dict[float, float]:
    families = text_string_to_metric_families(text) if SERVER_LAG in text else ()  # other servers say anything
    samples = [s for family in families for s in family.samples if s.name == f"{SERVER_LAG}_bucket"]
    return {float(sample.labels["le"]): sample.value for sample in samples}


# ---- for people -------------------------------------------------------------------------------------------------


def table(report: Mapping[str, Any]) -> Table:
    """The distributions of a report, those of server and client among them."""
    columns = ("mean", "min", *(f"p{p}" for p in PERCENTILES), "max")
    result = Table("", *columns)
    for prefix, part in (("", "summary"), ("server ", "server"), ("client ", "client")):
        for name, numbers in report[part].items():
            if isinstance(numbers, Mapping) and "p50" in numbers:
                result.add_row(prefix + name, *(f"{numbers[c]:.4g}" if c in numbers else "" for c in columns))
    return result


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """What the table does not hold."""
    for part in ("summary", "client"):
        numbers = {name: value for name, value in report[part].items() if isinstance(value, int | float)}
        yield ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    for kind, number in report["summary"]["failures"].items():
        detail = next(sample["detail"] for sample in report["samples"] if sample["failure"] == kind)
        yield f"failed: {number} x {kind}, such as: {detail}"


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Draw, for the requests that ended well, what share of them stayed below each value."""
    from matplotlib.figure import Figure

    good = [sample for sample in samples if sample.failure is None]
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), ("first_audio_s", "rtf", "underrun_s"), strict=True):
        values = sorted(value for sample in good if (value := _MEASURES[name](sample)) is not None)
        axes.step(values, [(n + 1) / len(values) for n in range(len(values))], where="post")
        axes.set(xlabel=name, ylabel="share of requests", ylim=(0, 1.02))
    figure.suptitle(f"{len(good)} of {len(samples)} requests ended well")
    figure.savefig(path)
