"""The store: built once under any number of processes, whole or absent, never damaged, bounded, private."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mstar_compile_cache import BuildTimeout, CacheKey, Store, StoreError

Key = Callable[[str], CacheKey]
OLD = 1_000_000_000.0

PROCESS = """
import sys, time
from pathlib import Path
from mstar_compile_cache import CacheKey, Machine, Store

root, log, go, seconds = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
machine = Machine(python="3.11", torch="2.9", compiler="g++ 12", processor="x86_64", accelerator="")

def build_for(name):
    def build(folder):
        with log.open("a") as file:
            file.write(name + "\\n")
        (folder / "part").write_text(name)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not Path(f"{log}.{name}").exists():
            time.sleep(0.01)
        (folder / "code.so").write_text("code of " + name)
    return build

print("ready", flush=True)
while not go.exists():
    time.sleep(0.005)
with Store(root) as store:
    for name in sys.argv[5:]:
        key = CacheKey(machine=machine, plugin="echo", plugin_version="1.0", name=name, source="ab",
                       dtype="float32", threads=1)
        path, was_built = store.get_or_build(key, build_for(name))
        assert (path / "code.so").read_text() == "code of " + name
    print(store.counters.builds, store.counters.hits + store.counters.misses, flush=True)
"""


def writer(size: int = 100) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "code.so").write_bytes(b"x" * size)

    return build


def never(folder: Path) -> None:
    raise AssertionError("built again")


def start(tmp_path: Path, *names: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, *map(str, (tmp_path / "store", tmp_path / "log", tmp_path / "go"))]
    process = subprocess.Popen([*command, str(seconds), *names], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def age(store: Store, key: CacheKey, last_use: float) -> None:
    os.utime(store.folder(key.digest) / "manifest.json", (last_use, last_use))


# ---- one process -------------------------------------------------------------------------------------------------


def test_an_artifact_is_built_once_and_found_by_the_next_store(tmp_path: Path, key: Key) -> None:
    with Store(tmp_path / "store") as store:
        assert store.get(key("a")) is None
        path, was_built = store.get_or_build(key("a"), writer())
        assert was_built
        assert (path / "sub" / "code.so").read_bytes() == b"x" * 100
        assert store.get_or_build(key("a"), never) == (path, False)
        assert (store.counters.builds, store.counters.misses, store.counters.hits) == (1, 2, 1)
    with Store(tmp_path / "store") as store:
        assert store.get_or_build(key("a"), never) == (path, False)
        assert store.get(key("b")) is None
        assert (store.counters.builds, store.counters.misses, store.counters.hits) == (0, 1, 1)


def test_the_manifest_tells_what_was_built_and_when_it_was_used(tmp_path: Path, key: Key) -> None:
    before = time.time() - 1
    with Store(tmp_path) as store:
        store.get_or_build(key("a"), writer())
        (entry,) = store.entries()
        assert entry.key["name"] == "a"
        assert entry.size_bytes == 100
        assert set(entry.files) == {"sub/code.so"}
        assert entry.created > before
        age(store, key("a"), OLD)
        assert store.entries()[0].last_use == OLD
        store.get(key("a"))
        assert store.entries()[0].last_use > before


def test_a_failed_build_leaves_nothing_and_the_next_one_builds(tmp_path: Path, key: Key) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("no compiler")

    with Store(tmp_path) as store:
        with pytest.raises(RuntimeError, match="no compiler"):
            store.get_or_build(key("a"), fail)
        assert not list((tmp_path / "aside").iterdir())
        assert store.digests() == []
        assert store.get_or_build(key("a"), writer())[1]


def test_builds_that_write_links_or_nothing_are_refused(tmp_path: Path, key: Key) -> None:
    with Store(tmp_path) as store:
        with pytest.raises(StoreError, match="links are refused"):
            store.get_or_build(key("a"), lambda folder: (folder / "link").symlink_to("/etc/passwd"))
        with pytest.raises(StoreError, match="links are refused"):
            store.get_or_build(key("a"), lambda folder: (folder / "link").symlink_to("/etc"))
        with pytest.raises(StoreError, match="must write files"):
            store.get_or_build(key("a"), lambda folder: None)
        with pytest.raises(StoreError, match=r"named manifest\.json"):
            store.get_or_build(key("a"), lambda folder: (folder / "manifest.json").touch())
        assert store.digests() == []


def test_threads_build_once(tmp_path: Path, key: Key) -> None:
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        time.sleep(0.1)
        writer()(folder)

    with Store(tmp_path) as store:
        threads = [threading.Thread(target=lambda: store.get_or_build(key("a"), build)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(built) == store.counters.builds == 1
        assert store.clear() == []  # however many asked, it is held
    with Store(tmp_path) as store:
        assert store.clear() == [key("a").digest]


# ---- damage ------------------------------------------------------------------------------------------------------


def flip(folder: Path) -> None:
    (folder / "sub" / "code.so").write_bytes(b"y" * 100)


def cut(folder: Path) -> None:
    (folder / "sub" / "code.so").write_bytes(b"x" * 99)


def lose(folder: Path) -> None:
    (folder / "sub" / "code.so").unlink()


def link(folder: Path) -> None:
    (folder / "extra").symlink_to("/etc/passwd")


def swap(folder: Path) -> None:
    (folder / "sub").rename(folder / "real")
    (folder / "sub").symlink_to("real")


def open_up(folder: Path) -> None:
    (folder / "sub" / "code.so").chmod(0o666)


def garble(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format":1,"files":[')


def reshape(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format":1,"files":[],"key":{},"created":0}')


def rename(folder: Path) -> None:
    said = json.loads((folder / "manifest.json").read_text())
    said["key"]["name"] = "b"
    (folder / "manifest.json").write_text(json.dumps(said))


@pytest.mark.parametrize("damage", [flip, cut, lose, link, swap, open_up, garble, reshape, rename])
def test_a_damaged_entry_is_a_miss_with_one_warning_and_is_built_again(
    damage: Callable[[Path], None], tmp_path: Path, key: Key, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(tmp_path) as store:
        path, _ = store.get_or_build(key("a"), writer())
    damage(path)
    with Store(tmp_path) as store:
        assert store.verify()[key("a").digest]
        with caplog.at_level(logging.WARNING):
            assert store.get(key("a")) is None
            assert store.get(key("a")) is None
        assert len(caplog.records) == store.counters.corrupt == 1
        assert not path.exists()
        assert not list((tmp_path / "aside").iterdir())
        assert store.get_or_build(key("a"), writer()) == (path, True)
        assert store.verify() == {key("a").digest: None}


def test_sizes_are_checked_even_of_what_was_loaded_before(tmp_path: Path, key: Key) -> None:
    with Store(tmp_path) as store:
        path, _ = store.get_or_build(key("a"), writer())
        cut(path)
        assert store.get_or_build(key("a"), writer()) == (path, True)
        assert store.counters.corrupt == 1


# ---- size --------------------------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, key: Key) -> None:
    with Store(tmp_path) as store:
        for number, name in enumerate("abc"):
            store.get_or_build(key(name), writer())
            age(store, key(name), OLD + number)
    with Store(tmp_path, max_bytes=300) as store:
        store.get(key("a"))
        store.close()
        store.get_or_build(key("d"), writer())
        assert set(store.digests()) == {key(name).digest for name in "acd"}
        assert store.counters.evictions == 1


def test_what_is_in_use_anywhere_or_just_built_stays(tmp_path: Path, key: Key) -> None:
    with Store(tmp_path) as user, Store(tmp_path, max_bytes=0) as other:
        user.get_or_build(key("a"), writer())
        path, _ = other.get_or_build(key("b"), writer())
        assert path.exists()
        assert len(other.digests()) == 2
        assert other.clear() == []
        user.close()
        assert other.prune() == [key("a").digest]
    with Store(tmp_path) as store:
        assert store.prune(0) == [key("b").digest]


def test_pruning_removes_what_cannot_be_read(tmp_path: Path, key: Key) -> None:
    with Store(tmp_path) as store:
        path, _ = store.get_or_build(key("a"), writer())
    garble(path)
    with Store(tmp_path) as store:
        assert store.prune() == [key("a").digest]


# ---- who may write -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("name", ["", "entries", "aside", "locks"])
def test_a_folder_that_others_can_write_is_refused(name: str, mode: int, tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    (tmp_path / "store" / name).chmod(mode)
    with pytest.raises(StoreError, match=f"mode {mode:o}.*chmod 700"):
        Store(tmp_path / "store")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    os.chown(tmp_path / "store", 12345, -1)
    with pytest.raises(StoreError, match="belongs to user 12345, not 0"):
        Store(tmp_path / "store")


def test_folders_are_private_from_the_start_whatever_the_mask(tmp_path: Path, key: Key) -> None:
    before = os.umask(0)
    try:
        with Store(tmp_path / "store") as store:
            path, _ = store.get_or_build(key("a"), writer())
    finally:
        os.umask(before)
    inside = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
    assert path in inside
    assert not [path for path in inside if path.stat().st_mode & 0o077]


def test_a_link_in_place_of_a_part_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    (tmp_path / "store" / "entries").rmdir()
    (tmp_path / "store" / "entries").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="not a folder"):
        Store(tmp_path / "store")


# ---- several processes -------------------------------------------------------------------------------------------


def test_four_processes_at_once_build_each_artifact_once(tmp_path: Path) -> None:
    processes = [start(tmp_path, *names, seconds=0.2) for names in ("abc", "cba", "bca", "acb")]
    (tmp_path / "go").touch()
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert sorted((tmp_path / "log").read_text().split()) == ["a", "b", "c"]
    assert sum(int(builds) for builds, _ in answers) == 3
    with Store(tmp_path / "store") as store:
        assert list(store.verify().values()) == [None, None, None]


def test_a_killed_builder_leaves_nothing_and_a_waiter_builds(tmp_path: Path, key: Key) -> None:
    (tmp_path / "go").touch()
    with start(tmp_path, "a", seconds=60) as doomed:
        try:
            until(lambda: list((tmp_path / "store").glob("aside/*/part")))
            store = Store(tmp_path / "store")
            with pytest.raises(BuildTimeout, match=r"building .* for 0\.2 s; wait for it"):
                store.get_or_build(key("a"), never, timeout_s=0.2)
            threading.Timer(0.3, doomed.send_signal, (signal.SIGKILL,)).start()
            path, was_built = store.get_or_build(key("a"), writer(), timeout_s=30)
        finally:
            doomed.kill()
    assert was_built
    assert path.exists()
    assert store.counters.waits >= 1
    assert not list((tmp_path / "store" / "aside").iterdir())
    store.close()


def test_waiting_is_reported(
    tmp_path: Path, key: Key, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mstar_compile_cache.store._REPORT_S", 0.1)
    (tmp_path / "go").touch()
    waited: list[float] = []

    def on_wait(seconds: float) -> None:
        waited.append(seconds)
        (tmp_path / "log.a").touch()  # the builder may go on

    def let_go_once_logged() -> None:
        until(lambda: "waiting for another process" in caplog.text)
        (tmp_path / "log.b").touch()

    with start(tmp_path, "a", "b", seconds=60) as builder, Store(tmp_path / "store") as store:
        with caplog.at_level(logging.INFO):
            until(lambda: list((tmp_path / "store").glob(f"aside/{key('a').digest}.*/part")))
            store.get_or_build(key("a"), never, on_wait=on_wait)
            assert waited[0] >= 0.1
            assert not caplog.records
            until(lambda: list((tmp_path / "store").glob(f"aside/{key('b').digest}.*/part")))
            thread = threading.Thread(target=let_go_once_logged)
            thread.start()
            store.get_or_build(key("b"), never)
            thread.join(30)
        assert store.counters.waits == 2
        assert builder.wait(30) == 0


def test_what_killed_processes_left_goes_when_old_and_unlocked(tmp_path: Path, key: Key) -> None:
    store = Store(tmp_path)
    left = [tmp_path / "aside" / f"{key(name).digest}.x" for name in "abc"]
    for folder in left:
        folder.mkdir()
    for folder in left[:2]:
        os.utime(folder, (OLD, OLD))
    lock = store.try_lock(key("b").digest, "build")
    assert lock is not None
    Store(tmp_path).close()
    assert [folder.exists() for folder in left] == [False, True, True]
    os.close(lock)
