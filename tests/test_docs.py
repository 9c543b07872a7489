"""The documents say what the code does: snippets parse, commands and flags exist, links lead somewhere."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from mstar import config
from mstar.cli import cli
from mstar.config import EngineConfig, ServerConfig, default, load_config_file

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "plugins/*/README.md", "tests/echo_plugin/*.md", "benchmarks/README.md")
    for path in ROOT.glob(pattern)
)
MAKE_TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def snippets(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def every(language: str) -> list[object]:
    return [
        pytest.param(snippet, id=f"{document.relative_to(ROOT)}-{number}")
        for document in DOCUMENTS
        for number, snippet in enumerate(snippets(document, language), 1)
    ]


def command_lines(snippet: str) -> list[list[str]]:
    """The shell words of each command, comments left out and continued lines joined."""
    joined = re.sub(r"\\\n", " ", snippet)
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def unknown_flags(words: list[str]) -> list[str]:
    """Flags (and commands) of an `mstar ...` or `make ...` line that do not exist."""
    if words[0] == "make":
        return [word for word in words[1:2] if word not in MAKE_TARGETS]
    if words[0] != "mstar":
        return []
    if words[1] not in cli.commands:
        return [] if words[1] in ("--help", "--version") else [words[1]]
    command, rest = cli.commands[words[1]], words[2:]
    while isinstance(command, click.Group) and rest:
        if rest[0] not in command.commands:
            return rest[:1]
        command, rest = command.commands[rest[0]], rest[1:]
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
    return [word for word in rest if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]


@pytest.mark.parametrize("snippet", every("python"))
def test_python_snippets_compile(snippet: str) -> None:
    ast.parse(snippet)


@pytest.mark.parametrize("snippet", every("json"))
def test_json_snippets_parse(snippet: str) -> None:
    json.loads(snippet)


@pytest.mark.parametrize("snippet", every("yaml"))
def test_yaml_snippets_parse(snippet: str) -> None:
    yaml.safe_load(snippet)


@pytest.mark.parametrize("snippet", every("bash"))
def test_commands_and_flags_in_snippets_exist(snippet: str) -> None:
    for words in command_lines(snippet):
        assert not unknown_flags(words), words
        for flag, value in itertools.pairwise(words):
            if words[0] == "curl" and flag == "-d" and not value.startswith("@"):
                json.loads(value)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_flags_in_text_exist(document: Path) -> None:
    for text in re.findall(r"`((?:mstar|make) [^`]+)`", document.read_text()):
        assert not unknown_flags(shlex.split(text)), text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_the_readme_begins_with_what_to_type() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    assert all(text in first_screen for text in ("make demo", "make test", "mstar serve", "--model tiny", "curl"))


def test_serving_describes_every_setting_and_its_default() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    rows = dict(re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \|", text, re.MULTILINE))
    flags = [(kind, name, flag) for kind in (EngineConfig, ServerConfig) for name, flag in config.flags(kind).items()]
    assert list(rows) == [flag.name for _, _, flag in flags]
    for kind, name, flag in flags:
        value = default(kind, name)
        if not flag.default_text and name != "parts":
            words = {True: "on", False: "off"}.get(value) if flag.is_switch else flag.shown(value).removesuffix(".0")
            assert rows[flag.name] == words, flag.name


def test_the_configuration_file_in_serving_loads(tmp_path: Path) -> None:
    (snippet,) = snippets(ROOT / "docs" / "serving.md", "yaml")
    path = tmp_path / "mstar.yaml"
    path.write_text(snippet)
    assert EngineConfig(**load_config_file(path)).max_num_seqs == 16


def test_serving_names_every_command() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    assert all(f"mstar {name}" in text for name in cli.commands)
    assert all(isinstance(command, click.Command) and command.help for command in cli.commands.values())


def test_serving_names_every_route() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    source = (ROOT / "core" / "mstar" / "server" / "app.py").read_text()
    paths = re.findall(r'Route\(\s*"(/[^"]+)"', source)
    assert "/health" in paths
    missing = [path for path in paths if f" {re.sub(r'{[^}]*}', '{id}', path)}`" not in text]
    assert not missing, missing


def test_unknown_flags_and_commands_are_seen() -> None:
    assert unknown_flags(["mstar", "serve", "--gpu-memory", "1"]) == ["--gpu-memory"]
    assert unknown_flags(["mstar", "brew"]) == ["brew"]
    assert unknown_flags(["mstar", "bench", "brew"]) == ["brew"]
    assert unknown_flags(["mstar", "bench", "speech", "--gpu", "1", "--url", "x"]) == ["--gpu"]
    assert unknown_flags(["make", "coffee"]) == ["coffee"]
    assert not unknown_flags(["mstar", "run", "--text=hi", "--no-enable-prefix-caching"])


def test_the_tutorial_s_plugin_works_outside_the_checkout(tmp_path: Path) -> None:
    """Write the files of docs/plugins.md, install them as it says, and run its `mstar run` line."""
    tutorial = ROOT / "docs" / "plugins.md"
    text = tutorial.read_text()
    files = re.findall(r"^```\w+\n# file: (\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for name, content in files:
        path = tmp_path / "parrot" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert len(files) == len(re.findall(r"^```(?:python|toml)$", text, re.MULTILINE)), "a block without '# file: NAME'"
    assert len(text.splitlines()) <= 150
    lines = [words for snippet in snippets(tutorial, "bash") for words in command_lines(snippet)]
    assert ["pip", "install", "./parrot"] in lines
    site = tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site)]
    environment = {**os.environ, "PYTHONPATH": str(site), "MSTAR_CACHE": str(tmp_path / "cache")}
    for command in (
        ["pip", "install", *options, "./parrot"],
        *(words for words in lines if words[:2] == ["mstar", "run"]),
    ):
        answer = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        assert answer.returncode == 0, f"{shlex.join(command)}\n{answer.stderr[-3000:]}"
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["usage"]["prompt_tokens"] == 5
    assert 1 <= len(result["outputs"][0]["token_ids"]) <= 41
