"""Folders of compiled files that persist across processes: written aside and renamed, checked when loaded, bounded.

    root/entries/DIGEST/   the files and their manifest
    root/aside/            what is being built, imported or removed; nothing here is ever loaded
    root/locks/            DIGEST.build: held by who builds; DIGEST.use: shared by who has the entry loaded

The kernel frees a lock when its process ends, however it ends. Knows nothing of what is compiled.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar_compile_cache.entry import MANIFEST, UNREADABLE, Entry, StoreError, find_problem, read_entry, seal, sync
from mstar_compile_cache.key import CacheKey

DEFAULT_MAX_BYTES = 10 * 1024**3
_POLL_S = 0.05
_REPORT_S = 5.0
_STALE_S = 3600.0  # what lies aside is looked at after this, and removed if nobody holds its lock
_logger = logging.getLogger(__name__)


class BuildTimeout(StoreError):
    """Another process was still building when the time was over."""


@dataclass(slots=True)
class Counters:
    """What happened to a store in this process."""

    hits: int = 0
    misses: int = 0
    builds: int = 0
    waits: int = 0
    evictions: int = 0
    corrupt: int = 0


class Store:
    """Artifacts by key in one folder, shared by processes.

    An entry that was handed out stays locked against eviction until `close`, or until the process ends.

    Example:
        with Store(folder) as store:
            path, was_built = store.get_or_build(key, build)  # build(path) writes files into a folder
    """

    def __init__(self, root: Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root = root.resolve()
        self.max_bytes = max_bytes
        self.counters = Counters()
        self._held: dict[str, int] = {}  # digest -> descriptor of its shared lock; hashes have been checked
        self._mutex = threading.Lock()
        _check_private(self.root)
        for name in ("entries", "aside", "locks"):
            (self.root / name).mkdir(exist_ok=True, mode=0o700)
            _check_private(self.root / name)
        self._sweep()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what was handed out: it may be evicted from now on."""
        with self._mutex:
            while self._held:
                os.close(self._held.popitem()[1])

    # ---- one entry ----------------------------------------------------------------------------------------------

    def folder(self, digest: str) -> Path:
        return self.root / "entries" / digest

    def get(self, key: CacheKey) -> Path | None:
        """Folder of an artifact, or None if it is missing, being built or damaged (which removes it)."""
        path = self._open(key.digest)
        self._count("misses" if path is None else "hits")
        return path

    def get_or_build(
        self,
        key: CacheKey,
        build: Callable[[Path], None],
        *,
        on_wait: Callable[[float], None] | None = None,
        timeout_s: float = 1800.0,
    ) -> tuple[Path, bool]:
        """Folder of an artifact and whether it was built here: one process builds while others wait.

        Args:
            build: writes files into the folder it is given; what it raises is passed on and leaves nothing behind.
            on_wait: called every few seconds with the seconds waited so far; by default a line in the log.
            timeout_s: after so long a wait `BuildTimeout` is raised.
        """
        if (path := self.get(key)) is not None:
            return path, False
        digest = key.digest
        with self._building(digest, on_wait=on_wait or _log_wait, timeout_s=timeout_s):
            if (path := self._open(digest, is_builder=True)) is not None:
                return path, False
            with self.scratch(digest) as scratch:
                build(scratch)
                in_use = self.commit(scratch, digest, key=key.describe())
            with self._mutex:
                self._held[digest] = in_use
            self._count("builds")
        self.prune()
        return self.folder(digest), True

    @contextlib.contextmanager
    def _building(self, digest: str, *, on_wait: Callable[[float], None], timeout_s: float) -> Iterator[None]:
        started = reported = time.monotonic()
        while True:
            with self.locked(digest, "build") as is_ours:
                if is_ours:
                    yield
                    return
            now = time.monotonic()
            if now - started >= timeout_s:
                message = f"another process has been building {digest[:12]} in {self.root} for {timeout_s:g} s"
                raise BuildTimeout(f"{message}; wait for it, or end it and start again")
            if reported == started:
                self._count("waits")
                reported = now
            if now - reported >= _REPORT_S:
                reported = now
                on_wait(now - started)
            time.sleep(_POLL_S)

    def _open(self, digest: str, *, is_builder: bool = False) -> Path | None:
        """An entry's folder, held from now on. A damaged one is removed, under the lock of builders."""
        folder = self.folder(digest)
        with self._mutex:
            in_use = self._held.pop(digest, None)
        is_known = in_use is not None
        if in_use is None and folder.exists():
            in_use = self.try_lock(digest, "use", is_shared=True)
        if in_use is None:  # not there, or being evicted
            return None
        problem = find_problem(folder, with_hashes=not is_known) if folder.exists() else "it was removed"
        if problem is None:
            os.utime(folder / MANIFEST)
            with self._mutex:
                other = self._held.pop(digest, None)  # another thread's
                self._held[digest] = in_use
            if other is not None:
                os.close(other)
            return folder
        os.close(in_use)
        if is_builder:
            self._discard(digest, problem)
        else:
            with self.locked(digest, "build") as is_ours:  # not what another process has built since
                self._discard(digest, find_problem(folder) if is_ours else None)
        return None

    def _discard(self, digest: str, problem: str | None) -> None:
        if problem is not None and self.folder(digest).exists():
            self._remove(digest)
            self._count("corrupt")
            _logger.warning("compiled files %s were damaged and are removed: %s", digest[:12], problem)

    # ---- all entries --------------------------------------------------------------------------------------------

    def digests(self) -> list[str]:
        names = (path.name for path in (self.root / "entries").iterdir())
        return sorted(name for name in names if re.fullmatch("[0-9a-f]{64}", name))

    def entries(self) -> list[Entry]:
        """What can be read of the entries, last used first."""
        found = []
        for digest in self.digests():
            with contextlib.suppress(*UNREADABLE):
                found.append(read_entry(self.folder(digest)))
        return sorted(found, key=lambda entry: -entry.last_use)

    def prune(self, max_bytes: int | None = None) -> list[str]:
        """Remove what was used longest ago until the rest fits; entries in use stay. Returns digests removed."""
        limit = self.max_bytes if max_bytes is None else max_bytes
        entries = self.entries()
        removed = [name for name in set(self.digests()) - {entry.digest for entry in entries} if self._evict(name)]
        left = sum(entry.size_bytes for entry in entries)
        for entry in reversed(entries):
            if left > limit and self._evict(entry.digest):
                left -= entry.size_bytes
                removed.append(entry.digest)
        return removed

    def clear(self) -> list[str]:
        """Remove every entry that is not in use. Returns digests removed."""
        return [digest for digest in self.digests() if self._evict(digest)]

    def verify(self) -> dict[str, str | None]:
        """Digest -> what is wrong with the entry, or None, after reading all of it. Removes nothing."""
        return {digest: find_problem(self.folder(digest)) for digest in self.digests()}

    def _evict(self, digest: str) -> bool:
        with self.locked(digest, "use") as is_ours:
            if not is_ours or not self.folder(digest).exists():
                return False
            self._remove(digest)
        self._count("evictions")
        return True

    # ---- below the entries, also for `archive` -------------------------------------------------------------------

    def try_lock(self, name: str, kind: str, *, is_shared: bool = False, is_patient: bool = False) -> int | None:
        """Descriptor that holds a lock until closed; None if another has it, unless patient."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self.root / "locks" / f"{name}.{kind}", flags, 0o600)
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if is_patient else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    @contextlib.contextmanager
    def locked(self, name: str, kind: str, *, is_shared: bool = False, is_patient: bool = False) -> Iterator[bool]:
        """Hold a lock for a while; False if another has it."""
        lock = self.try_lock(name, kind, is_shared=is_shared, is_patient=is_patient)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                os.close(lock)

    @contextlib.contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """An empty folder aside, removed at the end; the caller holds the build lock of that name."""
        for left in (self.root / "aside").glob(f"{name}.*"):  # of a builder that was killed, as we have its lock
            shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=self.root / "aside"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def commit(self, scratch: Path, digest: str, *, key: dict[str, Any]) -> int:
        """Make a folder in scratch an entry, all at once. Returns a lock that keeps it from eviction until closed."""
        seal(scratch, key=key)
        in_use = self.try_lock(digest, "use", is_shared=True, is_patient=True)  # an eviction under way comes first
        assert in_use is not None
        if self.folder(digest).exists():
            self._remove(digest)
        scratch.rename(self.folder(digest))
        sync(self.root / "entries")
        return in_use

    def _remove(self, digest: str) -> None:
        aside = Path(tempfile.mkdtemp(prefix=f"{digest}.", dir=self.root / "aside"))
        self.folder(digest).rename(aside / "removed")
        shutil.rmtree(aside, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what killed processes left aside."""
        for left in (self.root / "aside").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.lstat().st_mtime > _STALE_S:
                    with self.locked(left.name.partition(".")[0], "build") as is_ours:
                        if is_ours:
                            shutil.rmtree(left, ignore_errors=True)

    def _count(self, name: str) -> None:
        with self._mutex:
            setattr(self.counters, name, getattr(self.counters, name) + 1)


def _log_wait(seconds: float) -> None:
    _logger.info("waiting for another process that compiles the same: %.0f s so far", seconds)


def _check_private(folder: Path) -> None:
    """Raise StoreError unless only we can write a folder: what lies there is run as code."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise StoreError(f"{folder} is not a folder; remove it or choose another place for the cache")
    if status.st_uid != os.getuid():
        raise StoreError(f"{folder} belongs to user {status.st_uid}, not {os.getuid()}; choose a folder of your own")
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        raise StoreError(f"{folder} has mode {mode:o}, so others can put code there; run: chmod 700 {folder}")
