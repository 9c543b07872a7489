"""One entry: a folder of files and the manifest that says what they were when built. Knows nothing of locks."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar_compile_cache.key import digest_of

MANIFEST = "manifest.json"
FORMAT = 1
UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError)  # what a broken manifest raises


class StoreError(Exception):
    """The cache cannot be used as asked; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a manifest says of an artifact. Its own time of change is the last use."""

    digest: str
    key: dict[str, Any]
    files: dict[str, dict[str, Any]]  # relative path -> size, sha256
    created: float
    last_use: float

    @property
    def size_bytes(self) -> int:
        return sum(file["size"] for file in self.files.values())


def read_entry(folder: Path) -> Entry:
    """Read the manifest of the entry that a folder is named for; raises one of UNREADABLE for a broken one."""
    said = json.loads((folder / MANIFEST).read_text())
    if said["format"] != FORMAT:
        raise ValueError(f"format {said['format']}, expected {FORMAT}")
    files = {str(name): {"size": int(f["size"]), "sha256": str(f["sha256"])} for name, f in said["files"].items()}
    last_use = (folder / MANIFEST).stat().st_mtime
    return Entry(folder.name, dict(said["key"]), files, float(said["created"]), last_use)


def find_problem(folder: Path, *, with_hashes: bool = True, is_new: bool = False) -> str | None:
    """What is wrong with an entry; None if its files are what was built.

    Files besides those listed are only wrong in a new entry: a compiler that loads its cache from one may add some.
    """
    try:
        found = {str(path.relative_to(folder)): status for path, status in walk(folder, is_new=is_new)}
        entry = read_entry(folder)
        if digest_of(entry.key) != entry.digest:
            return "its manifest belongs to another key"
        files = {name for name, status in found.items() if stat.S_ISREG(status.st_mode)}
        if is_new and (unlisted := files - {MANIFEST, *entry.files}):
            return f"{min(unlisted)} is not in its manifest"
        for name, file in entry.files.items():
            if name not in files or found[name].st_size != file["size"]:
                return f"{name} is missing or not {file['size']} bytes long"
            if with_hashes and _sha256(folder / name) != file["sha256"]:
                return f"{name} has other content"
    except StoreError as error:
        return str(error)
    except UNREADABLE as error:
        return f"it cannot be read: {error!r:.200}"
    return None


def seal(folder: Path, *, key: dict[str, Any]) -> None:
    """Write the manifest of a folder that was just filled, close its files to others, and put all of it on disk."""
    files = {}
    for path, status in list(walk(folder, is_new=True)):
        is_file = stat.S_ISREG(status.st_mode)
        path.chmod(0o600 if is_file and not status.st_mode & 0o100 else 0o700)
        if is_file:
            files[str(path.relative_to(folder))] = {"size": status.st_size, "sha256": _sha256(path)}
        sync(path)
    if not files or MANIFEST in files:
        raise StoreError(f"a build must write files, none of them named {MANIFEST}; it wrote {sorted(files)[:5]}")
    said = {"format": FORMAT, "key": key, "files": files, "created": time.time()}
    (folder / MANIFEST).write_text(json.dumps(said, indent=1, sort_keys=True))
    (folder / MANIFEST).chmod(0o600)
    sync(folder / MANIFEST)
    sync(folder)


def walk(folder: Path, *, is_new: bool) -> Iterator[tuple[Path, os.stat_result]]:
    """A folder's files and folders, itself included. StoreError for links, devices and what others can write."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for path in (Path(parent), *(Path(parent, name) for name in names + links)):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                raise StoreError(f"{path.name} is neither a file nor a folder; links are refused")
            if not is_new and (status.st_uid != os.getuid() or status.st_mode & 0o022):
                raise StoreError(f"{path.name} can be written by others")
            yield path, status


def sync(path: Path) -> None:
    """Put a file or folder on disk, as a rename alone does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
