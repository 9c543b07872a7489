"""`mstar cache`: shows, checks, removes and carries entries; says what it did and why it could not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mstar import config
from mstar.cli import cli
from mstar.errors import ConfigError
from mstar_compile_cache import CacheKey, Store

Key = Callable[[str], CacheKey]
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`run(*arguments)` of `mstar cache`, with `tmp_path/cache` as the folder."""
    monkeypatch.setenv("MSTAR_CACHE", str(tmp_path / "cache"))
    config.environment.cache_clear()
    yield lambda *arguments: CliRunner().invoke(cli, ["cache", *arguments])
    config.environment.cache_clear()


@pytest.fixture
def filled(tmp_path: Path, key: Key) -> Path:
    """The folder of a store with two entries of 1 MiB."""
    root = tmp_path / "cache" / "compiled"
    with Store(root) as store:
        for name in ("llm.decode", "llm.prefill"):
            store.get_or_build(key(name), lambda folder: (folder / "code.so").write_bytes(bytes(2**20)))
    return root


def test_an_empty_cache_is_said_to_be_empty(run: Run, tmp_path: Path) -> None:
    assert run("list").output.split() == ["no", "entries", "in", str(tmp_path / "cache" / "compiled")]
    assert json.loads(run("list", "--json").output) == []
    assert run("verify").output == "0 of 0 entries are damaged\n"


def test_entries_are_listed(run: Run, filled: Path, key: Key) -> None:
    shown = run("list")
    assert shown.exit_code == 0
    for text in (key("llm.decode").digest[:12], "echo", "llm.decode", "llm.prefill", "float32", "1.0 MiB"):
        assert text in shown.output
    entries = json.loads(run("list", "--json").output)
    assert {entry["digest"] for entry in entries} == {key(name).digest for name in ("llm.decode", "llm.prefill")}
    assert entries[0]["size_bytes"] == 2**20
    assert entries[0]["key"]["machine"]["compiler"] == "g++ 12"


def test_the_cache_and_one_entry_are_described(run: Run, filled: Path, key: Key) -> None:
    whole = json.loads(run("info", "--json").output)
    assert whole == {"folder": str(filled), "entries": 2, "size_bytes": 2**21}
    assert "entries: 2" in run("info").output
    digest = key("llm.decode").digest
    assert json.loads(run("info", digest[:10], "--json").output)["key"]["name"] == "llm.decode"
    assert "name: llm.decode" in run("info", digest).output
    with pytest.raises(ConfigError, match="0 entries begin with 'xyz'"):
        raise run("info", "xyz").exception or AssertionError


def test_damage_is_shown_and_fails(run: Run, filled: Path, key: Key) -> None:
    assert run("verify").exit_code == 0
    digest = key("llm.decode").digest
    (filled / "entries" / digest / "code.so").write_bytes(b"\1" * 2**20)
    answer = run("verify")
    assert answer.exit_code == 1
    assert answer.output.startswith(f"{digest[:12]}  code.so has other content")
    assert answer.output.endswith("1 of 2 entries are damaged\n")


def test_what_is_in_use_is_not_removed_and_counted_as_staying(run: Run, filled: Path, key: Key) -> None:
    with Store(filled) as user:
        assert user.get(key("llm.decode")) is not None
        assert run("clear").output == "1 entries removed; 1 stay, 1.0 MiB\n"
    assert run("clear").output == "1 entries removed; 0 stay, 0.0 MiB\n"


def test_pruning_keeps_what_fits(run: Run, filled: Path, key: Key) -> None:
    assert run("prune").output == "0 entries removed; 2 stay, 2.0 MiB\n"
    assert run("prune", "--max-bytes", "1MiB").output == "1 entries removed; 1 stay, 1.0 MiB\n"
    answer = run("prune", "--max-bytes", "lots")
    assert answer.exit_code == 2
    assert "Invalid value for '--max-bytes'" in answer.output


def test_entries_are_carried_in_a_file(run: Run, filled: Path, tmp_path: Path) -> None:
    file = tmp_path / "cache.tar.gz"
    assert run("export", str(file)).output == f"2 of 2 entries written to {file}\n"
    run("clear")
    assert run("import", str(file)).output == "2 entries added, 0 were there already or are being built\n"
    assert run("import", str(file)).output == "0 entries added, 2 were there already or are being built\n"


def test_what_cannot_be_done_is_an_error_of_configuration(run: Run, filled: Path, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("no archive")
    for arguments, message in (
        (["import", str(tmp_path / "bad")], "cannot be read as an archive"),
        (["export", str(tmp_path / "absent" / "x.tar.gz")], "No such file or directory"),
    ):
        error = run(*arguments).exception
        assert isinstance(error, ConfigError)
        assert message in str(error)
    filled.chmod(0o777)
    error = run("list").exception
    assert isinstance(error, ConfigError)
    assert "chmod 700" in str(error)
