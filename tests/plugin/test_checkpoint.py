"""Where a model's files are looked for, and what an operator reads when they are not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from mstar.errors import ConfigError, PluginError
from mstar.plugin.checkpoint import download_snapshot, resolve
from mstar.plugin.spec import ModelSpec, Task, narrowed

MAKERS = """
import json
from pathlib import Path

made = []


def load(folder, parts):
    return json.loads((folder / "config.json").read_text())["size"]


def make(folder):
    made.append(folder)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"size": 3}')
    (folder / "codec").mkdir()
    return folder / "model"


def make_without_codec(folder):
    (folder / "config.json").write_text('{"size": 3}')
    return folder


def make_elsewhere(folder):
    return Path("/")


def fail(folder):
    (folder / "half").write_text("")
    raise RuntimeError("disk on fire")
"""


@pytest.fixture
def makers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with the spec's functions; its `__init__.py`."""
    package = tmp_path / "site" / "test_checkpoint_makers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(MAKERS)
    monkeypatch.syspath_prepend(str(package.parent))
    yield package / "__init__.py"
    sys.modules.pop("test_checkpoint_makers", None)


def spec(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "name": "sample", "graph": lambda config: None, "config": "test_checkpoint_makers:load",
        "checkpoint": "owner/main", "processor": "a:B", "nodes": {}, "tasks": {"speech": Task(params=dict)},
        "parts": {"codec": "owner/codec"}, "tiny": "test_checkpoint_makers:make",
    }  # fmt: skip
    return ModelSpec(**{**fields, **changes})


def write(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"size": 7}')
    return folder


def no_download(repository: str) -> Path:
    raise AssertionError(f"downloads {repository}")


@pytest.mark.usefixtures("makers")
class TestFolders:
    def test_a_folder_is_read_where_it_is(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "main")
        found = resolve(spec(parts={}), str(folder), download=no_download)
        assert (found.model, found.folder, dict(found.parts), found.config) == (str(folder), folder, {}, 7)

    def test_a_part_in_the_folder_wins_over_one_beside_it_and_that_over_the_hub(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "main")
        hub = write(tmp_path / "hub")
        assert resolve(spec(), str(folder), download=lambda name: hub / name).parts == {"codec": hub / "owner/codec"}
        (tmp_path / "codec").mkdir()
        assert resolve(spec(), str(folder), download=no_download).parts == {"codec": tmp_path / "codec"}
        (folder / "codec").mkdir()
        assert resolve(spec(), str(folder), download=no_download).parts == {"codec": folder / "codec"}

    def test_the_operators_path_wins_over_all(self, tmp_path: Path) -> None:
        folder, other = write(tmp_path / "main"), write(tmp_path / "other")
        (folder / "codec").mkdir()
        assert resolve(spec(), str(folder), parts={"codec": other}, download=no_download).parts == {"codec": other}

    def test_a_relative_folder_has_neighbours_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(write(tmp_path / "main"))
        (tmp_path / "codec").mkdir()
        assert resolve(spec(), ".", download=no_download).parts == {"codec": tmp_path / "codec"}

    @pytest.mark.parametrize(
        ("parts", "message"),
        [
            ({"codek": Path("/")}, "--set codek=/: 'sample' has no such part; did you mean codec"),
            ({"codec": Path("/no/such")}, "--set codec=/no/such: there is no such folder"),
        ],
    )
    def test_wrong_parts(self, tmp_path: Path, parts: Mapping[str, Path], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            resolve(spec(), str(write(tmp_path / "main")), parts=parts, download=no_download)

    def test_what_is_neither_a_folder_nor_a_hub_id(self, tmp_path: Path) -> None:
        for model in (str(tmp_path / "absent"), "./absent", "~/absent", "a/b/c", "a b"):
            with pytest.raises(ConfigError, match="is neither a folder nor a hub id"):
                resolve(spec(), model, download=no_download)
        file = tmp_path / "model.safetensors"
        file.write_text("")
        with pytest.raises(ConfigError, match="is a file; pass the folder it lies in"):
            resolve(spec(), str(file), download=no_download)

    @pytest.mark.parametrize("content", [None, "{", "{}", "[]", "null"])
    def test_a_folder_with_another_kind_of_checkpoint(self, tmp_path: Path, content: str | None) -> None:
        folder = tmp_path / "main"
        folder.mkdir()
        if content is not None:
            (folder / "config.json").write_text(content)
        with pytest.raises(ConfigError, match="is not a checkpoint that plugin 'sample' can read: "):
            resolve(spec(parts={}), str(folder), download=no_download)


@pytest.mark.usefixtures("makers")
def test_a_hub_id_is_downloaded_with_its_parts(tmp_path: Path) -> None:
    asked = []

    def download(repository: str) -> Path:
        asked.append(repository)
        return write(tmp_path / repository / "snapshot")

    found = resolve(spec(), "somebody/finetune", download=download)
    assert asked == ["somebody/finetune", "owner/codec"]
    assert found.folder == tmp_path / "somebody/finetune/snapshot"
    assert found.parts == {"codec": tmp_path / "owner/codec/snapshot"}


class TestTiny:
    def test_it_is_written_once_and_found_again(self, tmp_path: Path, makers: Path) -> None:
        first = resolve(spec(), "tiny", download=no_download, cache=tmp_path)
        again = resolve(spec(), "tiny", download=no_download, cache=tmp_path)
        assert first == again
        assert first.config == 3
        assert first.folder.name == "model"
        assert first.parts == {"codec": first.folder.parent / "codec"}
        assert len(sys.modules["test_checkpoint_makers"].made) == 1
        assert [path.name for path in (tmp_path / "tiny").iterdir()] == [first.folder.parent.name]

    def test_it_is_written_anew_when_the_plugin_changes(self, tmp_path: Path, makers: Path) -> None:
        first = resolve(spec(), "tiny", download=no_download, cache=tmp_path)
        makers.write_text(MAKERS + "# changed\n")
        assert resolve(spec(), "tiny", download=no_download, cache=tmp_path).folder != first.folder

    def test_a_process_that_comes_second_uses_the_firsts(self, tmp_path: Path, makers: Path) -> None:
        first = resolve(spec(), "tiny", download=no_download, cache=tmp_path)
        marker = first.folder.parent / "mstar-tiny.json"
        content = marker.read_text()
        marker.unlink()  # not there when the second looks, there when it renames

        def make(folder: Path) -> Path:
            marker.write_text(content)
            (folder / "model").mkdir()
            return folder / "model"

        makers_module = sys.modules["test_checkpoint_makers"]
        makers_module.make = make  # type: ignore[attr-defined]
        assert resolve(spec(), "tiny", download=no_download, cache=tmp_path) == first
        assert len(list((tmp_path / "tiny").iterdir())) == 1

    @pytest.mark.parametrize(
        ("maker", "message"),
        [
            ("fail", "writing its tiny checkpoint failed: RuntimeError: disk on fire"),
            ("make_elsewhere", "test_checkpoint_makers:make_elsewhere returned /; it must be a folder within"),
            ("make_without_codec", "lacks the part 'codec'"),
            ("made_up", "has no 'made_up'"),
        ],
    )
    def test_wrong_makers(self, tmp_path: Path, makers: Path, maker: str, message: str) -> None:
        with pytest.raises(PluginError, match=message):
            resolve(spec(tiny=f"test_checkpoint_makers:{maker}"), "tiny", download=no_download, cache=tmp_path)
        left = list((tmp_path / "tiny").iterdir()) if (tmp_path / "tiny").exists() else []
        assert [path for path in left if path.name.startswith(".")] == []

    def test_several_have_words_of_their_own(self, tmp_path: Path, makers: Path) -> None:
        both = spec(tiny={"tiny": "test_checkpoint_makers:make", "tiny-b": "test_checkpoint_makers:make"})
        first = resolve(both, "tiny", download=no_download, cache=tmp_path)
        other = resolve(both, "tiny-b", download=no_download, cache=tmp_path)
        assert first.folder != other.folder and other.model == "tiny-b"
        assert resolve(both, "tiny-b", download=no_download, cache=tmp_path) == other
        with pytest.raises(ConfigError, match="did you mean tiny-b"):
            resolve(both, "tiny-c", download=no_download, cache=tmp_path)

    def test_a_model_without_one_says_so(self, tmp_path: Path, makers: Path) -> None:
        with pytest.raises(ConfigError, match="has no tiny checkpoint; pass --model"):
            resolve(spec(tiny=None), "tiny", download=no_download, cache=tmp_path)

    def test_a_cache_that_cannot_be_written(self, tmp_path: Path, makers: Path) -> None:
        (tmp_path / "tiny").write_text("a file")
        with pytest.raises(ConfigError, match="set MSTAR_CACHE to a writable folder"):
            resolve(spec(), "tiny", download=no_download, cache=tmp_path)


def hub_errors() -> list[Any]:
    from huggingface_hub import errors

    def http(kind: Any, status: int) -> Any:
        response = httpx.Response(status, request=httpx.Request("GET", "https://example.org"))
        return kind("from the hub", response=response)

    return [
        (http(errors.GatedRepoError, 403), "'owner/name' is gated: accept its terms at https://.*/owner/name"),
        (http(errors.RepositoryNotFoundError, 404), "the hub has no 'owner/name', or it is private"),
        (errors.LocalEntryNotFoundError("not cached"), "is not in the hub's cache and cannot be downloaded"),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
        (http(errors.HfHubHTTPError, 500), "downloading 'owner/name' failed: from the hub; try again"),
        (OSError(28, "No space left on device"), "downloading 'owner/name' failed: .*No space left on device"),
    ]


@pytest.mark.parametrize(("raised", "message"), hub_errors())
def test_errors_of_the_hub_say_what_to_do(monkeypatch: pytest.MonkeyPatch, raised: Exception, message: str) -> None:
    import huggingface_hub

    def snapshot_download(*args: Any, **kwargs: Any) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match=message):
        download_snapshot("owner/name")


class TestOffers:
    def test_a_configuration_says_which_tasks_there_are(self, makers: Path) -> None:
        makers.write_text(MAKERS + "def offers(config, tasks): return {name: tasks.get(name) for name in config}\n")
        tasks = {"speech": Task(params=dict), "song": Task(params=dict)}
        both = spec(tasks=tasks, offers="test_checkpoint_makers:offers")
        assert list(narrowed(both, ["song"]).tasks) == ["song"]
        one = spec()
        assert narrowed(one, None) is one
        for wrong in ([], ["dance"]):
            with pytest.raises(PluginError, match="test_checkpoint_makers:offers gave"):
                narrowed(both, wrong)
