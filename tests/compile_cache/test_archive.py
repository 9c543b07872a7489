"""Archives carry entries whole, and nothing that is not one."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mstar_compile_cache import CacheKey, Store, StoreError, export_archive, import_archive

Key = Callable[[str], CacheKey]
Files = dict[str, bytes]


def build(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "code.so").write_bytes(b"code")
    (folder / "sub" / "code.so").chmod(0o755)


@pytest.fixture
def exported(tmp_path: Path, key: Key) -> Path:
    with Store(tmp_path / "source") as store:
        for name in "ab":
            store.get_or_build(key(name), build)
        assert export_archive(store, tmp_path / "cache.tar.gz") == sorted(key(name).digest for name in "ab")
    return tmp_path / "cache.tar.gz"


def files_of(archive: Path) -> Files:
    with tarfile.open(archive) as file:
        return {member.name: file.extractfile(member).read() for member in file}  # type: ignore[union-attr]


def write(archive: Path, files: Files, *extra: tarfile.TarInfo) -> None:
    with tarfile.open(archive, "w:gz") as file:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
        for info in extra:
            file.addfile(info)


def test_entries_come_out_as_they_went_in(tmp_path: Path, key: Key, exported: Path) -> None:
    with Store(tmp_path / "target") as store:
        added, left_out = import_archive(store, exported)
        assert (len(added), left_out) == (2, [])
        path = store.get(key("a"))
        assert path is not None
        assert (path / "sub" / "code.so").read_bytes() == b"code"
        assert (path / "sub" / "code.so").stat().st_mode & 0o777 == 0o700
        assert import_archive(store, exported) == ([], added)
    assert exported.stat().st_mode & 0o077 == 0


def test_entries_are_chosen_by_digest_and_key(tmp_path: Path, key: Key, exported: Path) -> None:
    with Store(tmp_path / "target") as store:
        added, left_out = import_archive(store, exported, accept=lambda found: found["name"] == "b")
        assert (added, left_out) == ([key("b").digest], [key("a").digest])
        assert store.digests() == added
        assert export_archive(store, tmp_path / "one.tar.gz", digests=added) == added
    assert {name[:64] for name in files_of(tmp_path / "one.tar.gz")} == set(added)


def test_damaged_entries_are_not_exported(tmp_path: Path, key: Key, exported: Path) -> None:
    with Store(tmp_path / "source") as store:
        (store.folder(key("a").digest) / "sub" / "code.so").write_bytes(b"edoc")
        assert export_archive(store, tmp_path / "rest.tar.gz") == [key("b").digest]


def test_a_failed_export_leaves_no_file(tmp_path: Path, key: Key, exported: Path) -> None:
    with Store(tmp_path / "source") as store, pytest.raises(ValueError, match="abc"):
        (tmp_path / "out").mkdir()
        export_archive(store, tmp_path / "out" / "x.tar.gz", digests=iter_and_fail())  # type: ignore[arg-type]
    assert not list((tmp_path / "out").iterdir())


def iter_and_fail() -> object:
    yield "0" * 64
    raise ValueError("abc")


DIGEST = "0" * 64


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "bad",
    [
        entry("/etc/evil"),
        entry("../evil"),
        entry(f"{DIGEST}/../../../evil"),
        entry(f"{DIGEST}/../{'1' * 64}/evil"),
        entry(f"/{DIGEST}/evil"),
        entry("notes.txt"),
        entry(DIGEST),
        entry(""),
        entry(f"{DIGEST}/link", tarfile.SYMTYPE, "/etc/passwd"),
        entry(f"{DIGEST}/link", tarfile.LNKTYPE, "/etc/passwd"),
        entry(f"{DIGEST}/pipe", tarfile.FIFOTYPE),
        entry(f"{DIGEST}/device", tarfile.CHRTYPE),
        entry(f"{DIGEST}/folder", tarfile.DIRTYPE),
        entry(f"{DIGEST}/empty"),
    ],
    ids=lambda info: f"{info.name[-20:]} {info.type.decode()}",
)
def test_whatever_is_not_a_file_of_an_entry_is_refused_with_all_the_rest(
    bad: tarfile.TarInfo, tmp_path: Path, exported: Path
) -> None:
    write(tmp_path / "bad.tar.gz", files_of(exported), bad)
    with Store(tmp_path / "target") as store:
        with pytest.raises(StoreError, match="nothing was added"):
            import_archive(store, tmp_path / "bad.tar.gz")
        assert store.digests() == []
        assert not list((tmp_path / "target" / "aside").iterdir())
    assert not list(tmp_path.rglob("evil"))


def change_content(files: Files) -> None:
    name = next(name for name in files if name.endswith("code.so"))
    files[name] = b"evil"


def forge_key(files: Files) -> None:
    name = next(name for name in files if name.endswith("manifest.json"))
    said = json.loads(files[name])
    said["key"]["plugin"] = "another"
    files[name] = json.dumps(said).encode()


def add_file(files: Files) -> None:
    files[next(iter(files)).partition("/")[0] + "/more.so"] = b"code"


def lose_manifest(files: Files) -> None:
    del files[next(name for name in files if name.endswith("manifest.json"))]


def list_outside(files: Files) -> None:
    name = next(name for name in files if name.endswith("manifest.json"))
    said = json.loads(files[name])
    said["files"]["../../outside"] = said["files"]["sub/code.so"]
    files[name] = json.dumps(said).encode()


@pytest.mark.parametrize("change", [change_content, forge_key, add_file, lose_manifest, list_outside])
def test_entries_that_are_not_as_their_manifest_says_are_refused(
    change: Callable[[Files], None], tmp_path: Path, exported: Path
) -> None:
    files = files_of(exported)
    change(files)
    write(tmp_path / "bad.tar.gz", files)
    with Store(tmp_path / "target") as store:
        with pytest.raises(StoreError, match="damaged entry .*nothing was added"):
            import_archive(store, tmp_path / "bad.tar.gz")
        assert store.digests() == []


def test_a_member_twice_is_refused(tmp_path: Path, exported: Path) -> None:
    files = files_of(exported)
    twice = entry(next(iter(files)))
    write(tmp_path / "bad.tar.gz", files, twice)
    with Store(tmp_path / "target") as store, pytest.raises(StoreError, match="twice"):
        import_archive(store, tmp_path / "bad.tar.gz")


def test_what_is_too_large_cut_off_or_no_archive_is_refused(tmp_path: Path, exported: Path) -> None:
    (tmp_path / "cut.tar.gz").write_bytes(exported.read_bytes()[:-100])
    (tmp_path / "text.tar.gz").write_text("hello")
    with Store(tmp_path / "target") as store:
        for name in ("cut", "text", "missing"):
            with pytest.raises(StoreError, match="cannot be read as an archive"):
                import_archive(store, tmp_path / f"{name}.tar.gz")
        store.max_bytes = 100
        with pytest.raises(StoreError, match="more than 100 bytes"):
            import_archive(store, exported)
        assert store.digests() == []
