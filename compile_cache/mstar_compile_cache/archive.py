"""Entries of a store as one file, to carry to another machine or bake into an image.

An archive holds code: hashes find damage, not malice, so import only what you trust.
"""

from __future__ import annotations

import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath
from typing import Any

from mstar_compile_cache.entry import MANIFEST, StoreError, find_problem, read_entry
from mstar_compile_cache.store import Store


def export_archive(store: Store, target: Path, *, digests: Collection[str] | None = None) -> list[str]:
    """Write entries (all by default) into a .tar.gz, damaged ones left out. Returns their digests."""
    written = []
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        try:
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive:
                for digest in store.digests() if digests is None else digests:
                    folder = store.folder(digest)
                    with store.locked(digest, "use", is_shared=True) as is_ours:
                        if is_ours and find_problem(folder) is None:
                            for name in (MANIFEST, *sorted(read_entry(folder).files)):
                                archive.add(folder / name, f"{digest}/{name}", recursive=False)
                            written.append(digest)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
    return written


def import_archive(
    store: Store, source: Path, *, accept: Callable[[dict[str, Any]], bool] = lambda key: True
) -> tuple[list[str], list[str]]:
    """Add the entries of an archive. Returns the digests added, and those left out.

    Nothing is added if anything in it is not as `export_archive` writes it. Left out are entries that are there
    already, that another process is building, and those whose described key is not accepted.
    """
    with store.locked("import", "build", is_patient=True), store.scratch("import") as scratch:
        _extract(source, scratch, max_bytes=store.max_bytes)
        folders = sorted(scratch.iterdir())
        for folder in folders:
            if (problem := find_problem(folder, is_new=True)) is not None:
                raise StoreError(f"{source} holds a damaged entry {folder.name[:12]}: {problem}; nothing was added")
        added = [folder.name for folder in folders if _add(store, folder, accept=accept)]
    store.prune()
    return added, [folder.name for folder in folders if folder.name not in added]


def _add(store: Store, folder: Path, *, accept: Callable[[dict[str, Any]], bool]) -> bool:
    key = read_entry(folder).key
    with store.locked(folder.name, "build") as is_ours:
        if not is_ours or store.folder(folder.name).exists() or not accept(key):
            return False
        (folder / MANIFEST).unlink()
        os.close(store.commit(folder, folder.name, key=key))
        return True


def _extract(source: Path, folder: Path, *, max_bytes: int) -> None:
    left = max_bytes
    try:
        with tarfile.open(source, mode="r:gz") as archive:
            for member in archive:
                is_plain = str(path := PurePosixPath(member.name)) == member.name and ".." not in path.parts
                if not (member.isreg() and is_plain and re.match("[0-9a-f]{64}/.", member.name)):
                    what = f"{source} holds {member.name!r}, which is not a file of an entry"
                    raise StoreError(f"{what}; nothing was added")
                left -= member.size
                if left < 0:
                    raise StoreError(f"{source} holds more than {max_bytes} bytes, the limit; raise --max-bytes")
                if os.path.lexists(folder / path):
                    raise StoreError(f"{source} holds {member.name!r} twice; nothing was added")
                archive.extract(member, folder, filter="data")
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise StoreError(
            f"{source} cannot be read as an archive of compiled files: {error}; nothing was added"
        ) from error
