"""Loading, on real distributions: each test writes packages with their metadata into a folder on sys.path."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mstar
from mstar.errors import ConfigError, PluginError
from mstar.plugin.loader import InstalledPlugin, installed, load

PLUGIN = """
from mstar.plugin import Graph, ModelSpec, States, Task, hookimpl


def spec(**changes):
    fields = dict(
        name="{name}",
        graph=lambda config: Graph(nodes=(), walks=(), states=States(starts=())),
        config="{package}.config:load",
        checkpoint="owner/{name}",
        processor="{package}.processing:Processor",
        nodes={{"lm": "{package}.modeling.network:Network"}},
        tasks={{"speech": Task(params=dict)}},
    )
    return ModelSpec(**{{**fields, **changes}})


@hookimpl
def {hook}(register):
    {body}
"""

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Writes an installed distribution; its modules are forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(
        name: str = "sample",
        *,
        distribution: str | None = None,
        version: str = "1.2",
        body: str = "register(spec())",
        hook: str = "register_models",
        source: str | None = None,
        requires: str = "mstar-core>=0.1",
    ) -> Path:
        package = f"test_plugin_{name}"
        distribution = distribution or f"mstar-plugin-{name.replace('_', '-')}"
        folder = tmp_path / package
        (folder / "modeling").mkdir(parents=True, exist_ok=True)
        source = PLUGIN.format(name=name, package=package, hook=hook, body=body) if source is None else source
        (folder / "__init__.py").write_text("")
        (folder / "plugin.py").write_text(source)
        for heavy in ("config", "processing", "modeling/__init__", "modeling/network"):
            (folder / f"{heavy}.py").write_text(f"raise AssertionError('{heavy} was imported')")
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nRequires-Dist: {requires}\n"
        (info / "METADATA").write_text(metadata)
        (info / "entry_points.txt").write_text(f"[mstar]\n{name} = {package}.plugin\n")
        (info / "RECORD").write_text(f"{package}/__init__.py,,\n{package}/plugin.py,,\n")
        return folder

    yield write
    for module in [name for name in sys.modules if name.startswith("test_plugin_")]:
        del sys.modules[module]


def imported() -> list[str]:
    return [name for name in sys.modules if name.startswith("test_plugin_")]


def test_a_plugin_is_loaded_without_its_heavy_modules(install: Install) -> None:
    install()
    plugin = load("sample")
    assert plugin.name == plugin.spec.name == "sample"
    assert (plugin.distribution, plugin.version) == ("mstar-plugin-sample", "1.2")
    assert sorted(imported()) == ["test_plugin_sample", "test_plugin_sample.plugin"]


def test_only_the_named_plugin_is_imported(install: Install) -> None:
    install("sample")
    install("broken", source="raise RuntimeError('no')")
    load("sample")
    assert not any("broken" in name for name in imported())


def test_installed_plugins_are_listed_without_importing_any(install: Install) -> None:
    install("one")
    install("broken", source="raise RuntimeError('no')", version="3")
    found = [plugin for plugin in installed() if plugin.value.startswith("test_plugin_")]
    assert found == [
        InstalledPlugin(
            name="broken", distribution="mstar-plugin-broken", version="3", value="test_plugin_broken.plugin"
        ),
        InstalledPlugin(name="one", distribution="mstar-plugin-one", version="1.2", value="test_plugin_one.plugin"),
    ]
    assert imported() == []


@pytest.mark.parametrize("name", ["two_words", "two-words", "Two-Words"])
def test_dashes_and_underscores_are_alike(install: Install, name: str) -> None:
    install("two_words")
    assert load(name).name == "two_words"


def test_not_installed(install: Install) -> None:
    install("sample")
    with pytest.raises(ConfigError) as error:
        load("quite_another")
    message = str(error.value)
    assert message.startswith("no plugin 'quite_another' is installed; try: pip install mstar-plugin-quite-another;")
    assert "sample (mstar-plugin-sample 1.2)" in message


def test_a_plugin_that_lies_beside_the_core_is_suggested(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("sample")
    monkeypatch.setattr("mstar.__file__", str(tmp_path / "clone" / "core" / "mstar" / "__init__.py"))
    folder = tmp_path / "clone" / "plugins" / "quite_another"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    with pytest.raises(ConfigError, match=re.escape(f"; try: pip install -e {folder}; installed: ")):
        load("quite-another")


@pytest.mark.parametrize(("name", "hint"), [("sampel", "; did you mean sample?"), ("../quite/another", "")])
def test_no_package_is_suggested_for_a_typo_or_for_what_cannot_be_one(install: Install, name: str, hint: str) -> None:
    install("sample")
    with pytest.raises(ConfigError, match=f"is installed{re.escape(hint)}; installed: ") as error:
        load(name)
    assert "pip install" not in str(error.value)


def test_two_claimants_are_both_named(install: Install) -> None:
    install("sample")
    install("sample", distribution="somebody-elses", version="9")
    with pytest.raises(ConfigError, match="claimed by") as error:
        load("sample")
    assert "mstar-plugin-sample 1.2" in str(error.value)
    assert "somebody-elses 9" in str(error.value)
    assert imported() == []


def test_one_distribution_found_twice_on_the_path_is_one_claimant(install: Install, tmp_path: Path) -> None:
    install("sample")
    sys.path.append(str(tmp_path))
    try:
        assert load("sample").name == "sample"
    finally:
        sys.path.pop()


def test_a_broken_import_names_distribution_version_and_cause(install: Install) -> None:
    install("sample", source="import no_such_module_anywhere")
    with pytest.raises(PluginError) as error:
        load("sample")
    assert str(error.value) == (
        "plugin sample (mstar-plugin-sample 1.2): importing 'test_plugin_sample.plugin' failed: "
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    )
    assert isinstance(error.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hook": "register_model"}, "unknown hook 'register_model'.*; the hook is register_models"),
        ({"source": "def register_models(register): ..."}, "has no hook register_models"),
        ({"source": "from mstar.plugin import hookimpl\n@hookimpl\ndef register_models(add): ..."}, "add.*the hook is"),
        ({"body": "1 / 0"}, "its hook register_models failed: ZeroDivisionError"),
        ({"body": "pass"}, "register_models registered nothing; it must register one model"),
        ({"body": "register(spec()); register(spec())"}, "register_models registered 'sample' 2 times"),
        ({"body": "register(spec(name='other'))"}, "registered 'other'; the name must be the entry point's, 'sample'"),
        ({"body": "register('sample')"}, "registered a str, not a ModelSpec"),
        ({"body": "register(spec(tasks={}))"}, "tasks is empty"),
        ({"body": "register(spec(requires_core='soon'))"}, "requires_core is 'soon', not a version specifier"),
        (
            {"body": "register(spec(processor='test_plugin_sample.procesing:P'))"},
            "processor is 'test_plugin_sample.procesing:P', but there is no module 'test_plugin_sample.procesing'",
        ),
        ({"body": "register(spec(nodes={'lm': 'no_such_package.nodes:N'}))"}, r"nodes\['lm'\] is 'no_such_package"),
        ({"body": "register(spec(nodes={'lm': 'test_plugin_sample.config.deep:N'}))"}, "there is no module"),
        (
            {"body": "register(spec(tiny='test_plugin_sample.tiny:make'))"},
            "tiny is 'test_plugin_sample.tiny:make', but",
        ),
        ({"body": "register(spec(config='test_plugin_sample.config'))"}, "must be of the form 'package.module:Name'"),
    ],
)
def test_a_plugin_that_breaks_the_contract(install: Install, options: dict[str, str], message: str) -> None:
    install("sample", **options)
    with pytest.raises(PluginError, match=rf"(?s)plugin sample \(mstar-plugin-sample 1\.2\).*{message}"):
        load("sample")


def test_all_missing_files_are_listed(install: Install) -> None:
    install("sample", body="register(spec(config='a_b_c:d', voices='e_f_g:h'))")
    with pytest.raises(PluginError) as error:
        load("sample")
    assert "config is 'a_b_c:d'" in str(error.value)
    assert "voices is 'e_f_g:h'" in str(error.value)


def test_a_newer_core_is_asked_for_in_the_spec(install: Install) -> None:
    install("sample", body="register(spec(requires_core='>=99.1'))")
    with pytest.raises(ConfigError) as error:
        load("sample")
    assert f"plugin sample (mstar-plugin-sample 1.2) needs mstar-core >=99.1, but {mstar.__version__}" in str(
        error.value
    )
    assert "pip install 'mstar-core>=99.1'" in str(error.value)


def test_a_newer_core_in_the_metadata_is_found_before_an_import_fails_of_it(install: Install) -> None:
    install("sample", source="from mstar.plugin import NotYetThere", requires="mstar_core>=99")
    with pytest.raises(ConfigError, match="needs mstar-core >=99"):
        load("sample")


def test_requirements_of_other_environments_do_not_count(install: Install) -> None:
    install("sample", requires="mstar-core>=99; python_version < '3'")
    assert load("sample").name == "sample"
