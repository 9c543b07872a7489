"""A served model whose language model is split between two processes gives what one gives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from ranks import split_worker
from serve_process import ServeProcess

from mstar.errors import ConfigError
from mstar.worker.team import Team

SETTINGS = {"threads": 1, "block_size": 4, "max_model_len": 128, "max_num_seqs": 8}
TEXTS = ["How are you today?", "All is well.", "The same words begin this one.", "The same words begin that one."]


def split(folder: Path, **settings: Any) -> contextlib.AbstractContextManager[Team]:
    return split_worker(plugin="orpheus", model=str(folder), **settings)


@pytest.mark.parametrize("swap_space", [1 << 30, 0], ids=["swap", "recompute"])
def test_two_processes_speak_what_one_does(
    serving: Any, tiny_folder: Path, speech: Callable[..., dict[str, Any]], swap_space: int
) -> None:
    asked = [speech(text, seed=n, max_tokens=42) for n, text in enumerate(TEXTS)]
    asked += [speech(text, temperature=0, max_tokens=35) for text in TEXTS[:2]]
    with serving(tiny_folder, **SETTINGS) as one:
        whole = one.ask_all(asked)
    small = {**SETTINGS, "swap_space_bytes": swap_space, "kv_cache_memory_bytes": 1 << 15}
    with split(tiny_folder, **small), serving(tiny_folder, **small) as two:
        assert two.worker.modules["lm"].is_split and not two.worker.modules["snac"].is_split
        for abort_after in ([None] * 6, [None, 3, None, None, 1, None]):
            found = two.ask_all(asked, abort_after=abort_after)
            for answer, right, aborts in zip(found, whole, abort_after, strict=True):
                if not aborts:
                    assert answer.ids == right.ids
                    np.testing.assert_allclose(answer.samples, right.samples, atol=1e-4)
        assert two.worker.scheduler.num_swaps if swap_space else two.worker.scheduler.num_rebuilds
        two.assert_clean()


def test_a_call_that_fails_on_all_ranks_fails_its_request_alone(
    serving: Any, tiny_folder: Path, speech: Callable[..., dict[str, Any]]
) -> None:
    with split(tiny_folder, **SETTINGS) as team, serving(tiny_folder, **SETTINGS) as two:
        right = two.ask(speech(TEXTS[0], max_tokens=21))
        methods = two.worker.modules["lm"].methods
        with pytest.MonkeyPatch.context() as patch:  # nobody has such a method
            patch.setitem(methods, "prefill", team.split("lm", "missing", lambda *_, **__: {}["missing"]))
            (failed,) = two.ask_all([speech(TEXTS[1])])
            assert isinstance(failed, Exception) and "missing" in str(failed)
        assert two.ask(speech(TEXTS[0], max_tokens=21)).ids == right.ids
        two.assert_clean()


def test_a_rank_out_of_step_ends_the_team(
    serving: Any, tiny_folder: Path, speech: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []
    monkeypatch.setattr("mstar.worker.team.SETTLE_S", 0.5)
    with split(tiny_folder, lost=lost, **SETTINGS) as team, serving(tiny_folder, **SETTINGS) as two:
        raising = team.split("lm", "prefill", lambda *_, **__: {}["missing"])
        monkeypatch.setitem(two.worker.modules["lm"].methods, "prefill", raising)
        (failed,) = two.ask_all([speech(TEXTS[0], max_tokens=7)])
        assert isinstance(failed, Exception)
    assert lost == ["rank 1 does not answer: timed out"]


def test_a_killed_rank_is_told(serving: Any, tiny_folder: Path, speech: Callable[..., dict[str, Any]]) -> None:
    lost: list[str] = []
    with split(tiny_folder, lost=lost, **SETTINGS) as team, serving(tiny_folder, **SETTINGS) as two:
        assert two.ask(speech(TEXTS[0], max_tokens=7)).ids and not lost
        os.kill(team.pids[0], signal.SIGKILL)
        deadline = time.monotonic() + 5
        while not lost and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lost == ["rank 1 has ended: SIGKILL"]
        (failed,) = two.ask_all([speech(TEXTS[0], max_tokens=7)])
        assert isinstance(failed, Exception)
    assert len(lost) == 1


def test_what_a_rank_cannot_load_for_is_told(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="rank 1: "), split(tiny_folder.parent, **SETTINGS):
        pass


# ---- a server -------------------------------------------------------------------------------------------


def child_pids(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_restarts_a_worker_one_of_whose_ranks_is_killed(tmp_path: Path, tiny_folder: Path) -> None:
    placement = tmp_path / "two.yaml"
    placement.write_text("groups:\n  - nodes: ['*']\n    tensor_parallel: 2\n    threads: 1\n")
    body = {
        "task": "speech", "inputs": [{"type": "text", "text": TEXTS[0]}], "seed": 1, "outputs": ["tensors"],
        "params": {"max_tokens": 21},
    }  # fmt: skip

    def ask() -> Any:
        return httpx.post(f"{server.url}/v1/generate", json=body, timeout=60)

    def workers() -> list[dict[str, Any]]:
        response = httpx.get(f"{server.url}/health", timeout=10)
        return list(response.json()["workers"]) if response.status_code == 200 else []

    flags = ("--plugin", "orpheus", "--model", str(tiny_folder), "--placement", str(placement), "--threads", "1")
    with ServeProcess(*flags, start_s=110) as server:
        right = ask().json()["outputs"]
        (worker,) = workers()
        first, (second,) = worker["pid"], worker["ranks"]
        assert child_pids(first) == [second]
        os.kill(second, signal.SIGKILL)
        deadline = time.monotonic() + 90
        while not any(w["state"] == "ready" and w["restarts"] == 1 for w in workers()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert any("rank 1 has ended: SIGKILL" in line for line in server.log)
        assert ask().json()["outputs"] == right
        (worker,) = workers()
        processes = [first, second, worker["pid"], *child_pids(worker["pid"])]
        assert len(set(processes)) == 4
        server.process.kill()
        deadline = time.monotonic() + 10
        while any(map(is_alive, processes)):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("prefill", "decode", "way"), [(2, 1, "layers"), (1, 2, "layers"), (1, 2, "end")])
def test_prompts_read_by_more_or_fewer_processes_than_go_on(
    tmp_path: Path, tiny_folder: Path, prefill: int, decode: int, way: str
) -> None:
    placement = tmp_path / "apart.yaml"
    groups = [
        {"nodes": ["lm.prefill"], "tensor_parallel": prefill, "threads": 1},
        {"nodes": ["*"], "tensor_parallel": decode, "threads": 1},
    ]
    placement.write_text(json.dumps({"groups": groups}))
    flags = ["--plugin", "orpheus", "--model", str(tiny_folder), "--threads", "1", "--block-size", "4"]
    apart = ["--placement", str(placement), "--kv-transfer", way, "--max-num-batched-tokens", "7"]
    right: list[Any] = []
    for more in ([], apart):
        with ServeProcess(*flags, *more, start_s=300) as server:
            found = [_speak(server.url, text, seed=seed) for seed, text in enumerate(TEXTS)]
            right = right or found
    assert found == right


def _speak(url: str, text: str, *, seed: int) -> Any:
    body = {
        "task": "speech", "inputs": [{"type": "text", "text": text}], "seed": seed, "outputs": ["tensor:codes"],
        "params": {"max_tokens": 35},
    }  # fmt: skip
    return httpx.post(f"{url}/v1/generate", json=body, timeout=120).json()["outputs"]
