import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mstar.errors import ConfigError
from mstar.plugin.graph import calls
from mstar.plugin.spec import Checkpoint
from mstar.plugin.states import RequestView
from mstar.plugin.validate import validate
from mstar_plugin_orpheus import config, graph, plugin


def test_the_graph_is_valid_and_agrees_with_the_spec() -> None:
    validate(graph.build(None), plugin.SPEC)


def test_importing_the_plugin_imports_neither_torch_nor_the_networks() -> None:
    code = (
        "import sys, mstar_plugin_orpheus.plugin; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )


@pytest.mark.parametrize(
    ("task", "outputs", "lanes"),
    [
        ("speech", ("audio",), {"lm", "voice"}),
        ("speech", ("tensors",), {"lm", "voice"}),
        ("speech", ("tensor:audio",), {"lm", "voice"}),
        ("speech", ("tensor:codes",), {"lm"}),
        ("vocode", ("audio",), {"lm", "voice"}),
    ],
)
def test_the_codec_runs_only_for_audio(task: str, outputs: tuple[str, ...], lanes: set[str]) -> None:
    view = RequestView(task, outputs, None, {})
    assert {start.lane for start in graph.build(None).states.start(view)} == lanes


def test_segments_share_a_budget_in_order_only_when_one_is_given() -> None:
    assert graph.is_budgeted(RequestView("speech", ("audio",), None, {"max_tokens": 5}), 0)
    assert not graph.is_budgeted(RequestView("speech", ("audio",), None, {}), 0)


def test_the_nodes_have_the_methods_that_the_walks_call() -> None:
    from mstar_plugin_orpheus import nodes

    classes = {"lm": nodes.LanguageModel, "snac": nodes.Codec}
    for walk in graph.build(None).walks:
        for call in calls(walk.section):
            assert callable(getattr(classes[call.node], call.method))


# ---- configuration --------------------------------------------------------------------------------------


def test_special_ids_are_resolved_by_name(golden: Any) -> None:
    tokens, answer = golden.checkpoint.config.tokens, golden.answers["special_ids"]
    assert tokens.audio_base == answer["audio_base"]
    assert tokens.begin_of_text == answer["bos"]
    assert tokens.end_of_turn == answer["eot"]
    for name in ("start_of_human", "end_of_human", "start_of_ai", "start_of_speech", "end_of_speech"):
        assert getattr(tokens, name) == answer[name]


def test_the_configuration_is_read_from_the_checkpoint(golden: Any, tiny_checkpoint: Checkpoint) -> None:
    for checkpoint, length in ((golden.checkpoint, 131072), (tiny_checkpoint, 8192)):
        assert config.max_model_len(checkpoint.config) == length
        assert checkpoint.config.codec.samples_per_frame == 2048
        assert config.voices(checkpoint.config)[:2] == ["tara", "zoe"]


@pytest.fixture
def copied(golden: Any, tmp_path: Path) -> Path:
    """The golden checkpoint's small files, to be changed."""
    for part in ("orpheus-3b-0.1-ft", "snac_24khz"):
        (tmp_path / part).mkdir()
        for name in ("config.json", "tokenizer.json"):
            source = golden.checkpoint.folder.parent / part / name
            if source.exists():
                shutil.copyfile(source, tmp_path / part / name)
    return tmp_path


def load(folder: Path, name: str = "orpheus-3b-0.1-ft") -> config.OrpheusConfig:
    return config.load(folder / name, {"snac_24khz": folder / "snac_24khz"})


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_missing_files_are_named(copied: Path) -> None:
    (copied / "orpheus-3b-0.1-ft" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"orpheus-3b-0.1-ft/config.json is missing"):
        load(copied)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("orpheus-3b-0.1-ft", {"model_type": "qwen2"}, "model_type is 'qwen2'"),
        ("orpheus-3b-0.1-ft", {"vocab_size": 28987}, "vocab_size 28987 is too small"),
        ("snac_24khz", {"attn_window_size": 32}, "attn_window_size 32"),
        ("snac_24khz", {"vq_strides": [8, 4, 2, 1]}, "vq_strides"),
        ("snac_24khz", {"vq_strides": "abc"}, r"snac_24khz/config.json describes no codec"),
        ("snac_24khz", {"vq_strides": [4, 2, 0]}, r"snac_24khz/config.json .* at least 1"),
        ("snac_24khz", {"sampling_rate": 0}, r"snac_24khz/config.json .* at least 1"),
        ("snac_24khz", {"decoder_rates": None}, r"snac_24khz/config.json describes no codec"),
    ],
)
def test_checkpoints_that_cannot_work_are_refused(
    copied: Path, part: str, changes: dict[str, Any], message: str
) -> None:
    edit(copied / part / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load(copied)


@pytest.mark.parametrize("file", ["snac_24khz/config.json", "orpheus-3b-0.1-ft/config.json"])
def test_a_file_that_holds_no_object_is_named(copied: Path, file: str) -> None:
    (copied / file).write_text("[]")
    with pytest.raises(ConfigError, match=f"{file}: expected a JSON object, found a list"):
        load(copied)


def test_a_tokenizer_without_the_control_tokens_is_refused(copied: Path) -> None:
    edit(copied / "orpheus-3b-0.1-ft" / "tokenizer.json", added_tokens=[])
    with pytest.raises(ConfigError, match="<custom_token_2>"):
        load(copied)


def test_a_tokenizer_part_is_used_when_the_folder_has_none(copied: Path) -> None:
    (copied / "tokenizer").mkdir()
    (copied / "orpheus-3b-0.1-ft" / "tokenizer.json").rename(copied / "tokenizer" / "tokenizer.json")
    parts = {"snac_24khz": copied / "snac_24khz", "tokenizer": copied / "tokenizer"}
    assert config.load(copied / "orpheus-3b-0.1-ft", parts).tokens.audio_base == 316


@pytest.mark.parametrize(
    "folder", ["3b-de-ft-research_release", "models--canopylabs--3b-de-ft-research_release/snapshots/0123abc"]
)
def test_language_finetunes_have_their_own_voices(copied: Path, folder: str) -> None:
    shutil.copytree(copied / "orpheus-3b-0.1-ft", copied / folder)
    assert load(copied, folder).voices == ("jana", "thomas", "max")


def test_a_checkpoint_may_list_its_voices(copied: Path) -> None:
    listed = copied / "orpheus-3b-0.1-ft" / "voices.json"
    listed.write_text('["anna", "bert"]')
    assert load(copied).voices == ("anna", "bert")
    listed.write_text('{"anna": 1}')
    with pytest.raises(ConfigError, match="voices.json"):
        load(copied)
