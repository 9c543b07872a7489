"""Distributions build, hold what they should, and work outside the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = [
    ROOT,
    *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")),
    ROOT / "tests" / "echo_plugin",
]


def call(*arguments: str, folder: Path) -> str:
    answer = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=110, check=False
    )
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-4000:]
    return answer.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of every project, and the sdist of core."""
    folder = tmp_path_factory.mktemp("dist")
    for project in PROJECTS:
        targets = ["-t", "wheel", *(["-t", "sdist"] if project == ROOT else [])]
        call("-m", "hatchling", "build", *targets, "-d", str(folder), folder=project)
    return folder


@pytest.fixture(scope="module")
def site(built: Path) -> Path:
    """The wheels installed into a folder of their own."""
    folder = built / "site"
    wheels = [str(path) for path in built.glob("*.whl")]
    call(
        "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(folder), *wheels,
        folder=built,
    )  # fmt: skip
    return folder


def outside(site: Path, code: str) -> str:
    """Run code with the installed wheels and third-party packages, but without the checkout's editable install."""
    paths = [str(site), *dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))]
    return call("-I", "-S", "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}", folder=site)


def test_core_s_wheel_holds_the_packages_and_their_kernels_and_nothing_else(built: Path) -> None:
    names = zipfile.ZipFile(next(built.glob("mstar_core-*.whl"))).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"mstar", "mstar_compile_cache"}
    for source in (ROOT / "core" / "mstar").rglob("*"):
        if source.suffix in (".py", ".cpp", ".h", ".typed"):
            assert source.relative_to(ROOT / "core").as_posix() in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_plugin_wheels_hold_one_package_and_no_tests(built: Path) -> None:
    wheels = list(built.glob("mstar_plugin_*.whl"))
    assert len(wheels) == len(PROJECTS) - 1
    for wheel in wheels:
        tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in name}
        assert len(tops) == 1, wheel.name
        assert tops.pop().startswith("mstar_plugin_")


def test_core_s_sdist_can_be_built_from(built: Path) -> None:
    with tarfile.open(next(built.glob("mstar_core-*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "core/mstar/__init__.py"} <= names
    assert not any(name.startswith(("tests", "plugins", "benchmarks")) for name in names)


def test_installed_plugins_are_found_outside_the_checkout(site: Path) -> None:
    out = outside(
        site,
        "import mstar; from mstar.cli import main\n"
        f"assert mstar.__file__.startswith({str(site)!r}), mstar.__file__\n"
        "main(['plugins', '--json'])",
    )
    rows = {row["name"]: row for row in json.loads(out)}
    assert {path.name for path in (ROOT / "plugins").iterdir() if (path / "pyproject.toml").exists()} <= set(rows)
    assert not [row["error"] for row in rows.values() if "error" in row]
    assert rows["echo"]["distribution"] == "mstar-plugin-echo"
    assert all("colocated" in row["placements"] for row in rows.values())


@pytest.mark.parametrize("flags", [[], ["--placement", "three"]], ids=["alone", "three processes"])
def test_the_echo_plugin_answers_outside_the_checkout(site: Path, tmp_path: Path, flags: list[str]) -> None:
    asked = ["run", "--plugin", "echo", "--text", "hello", "--param", "max_tokens=3", "--out", str(tmp_path), *flags]
    outside(site, f"from mstar.cli import main\nmain({asked!r})")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["outputs"]
    assert result["finish_reason"] in ("stop", "length")
