"""Finds installed plugins without importing them, and loads one by name.

Every process loads the plugin it needs itself, by the same path, whoever made the plugin. Imports no torch; of the
files a spec points to, it checks that they exist but imports none.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pluggy
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

import mstar
from mstar.config import did_you_mean
from mstar.errors import ConfigError, PluginError
from mstar.plugin import hooks
from mstar.plugin.spec import ModelSpec

CORE = "mstar-core"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPlugin:
    """A plugin's entry point; nothing of it has been imported.

    Args:
        value: the module (or object) that holds its hooks.
    """

    name: str
    distribution: str
    version: str
    value: str

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPlugin:
    spec: ModelSpec
    distribution: str
    version: str

    @property
    def name(self) -> str:
        return self.spec.name


def installed() -> list[InstalledPlugin]:
    """Every installed plugin, by name; one name may occur twice. Imports none."""
    return sorted(map(_describe, _entry_points()), key=lambda plugin: (plugin.name, plugin.distribution))


def load(name: str) -> LoadedPlugin:
    """Import the plugin called `name` (dashes and underscores alike), and no other.

    Raises:
        ConfigError: none or more than one distribution has it, or it needs another version of mstar.
        PluginError: it cannot be imported, or breaks the contract.
    """
    point = _find(name)
    plugin = _describe(point)
    assert point.dist is not None
    with _blamed_on(plugin, "reading its requirements"):
        needed = _core_requirement(point.dist)
    _check_requirement(plugin, needed)
    with _blamed_on(plugin, f"importing {plugin.value!r}"):
        module = point.load()
    spec = _registered(plugin, module)
    _check_requirement(plugin, spec.requires_core)
    _check_paths(plugin, spec)
    return LoadedPlugin(spec=spec, distribution=plugin.distribution, version=plugin.version)


def _entry_points() -> list[EntryPoint]:
    # a distribution seen twice on sys.path (a checkout and its installation) is one claimant
    return [point for point in entry_points(group=hooks.PROJECT) if point.dist is not None]


def _describe(point: EntryPoint) -> InstalledPlugin:
    assert point.dist is not None
    return InstalledPlugin(name=point.name, distribution=point.dist.name, version=point.dist.version, value=point.value)


def _key(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _find(name: str) -> EntryPoint:
    found = [point for point in _entry_points() if _key(point.name) == _key(name)]
    if not found:
        plugins = installed()
        listed = ", ".join(map(str, plugins)) or "none"
        hint = did_you_mean(_key(name), {plugin.name for plugin in plugins})
        if not hint and re.fullmatch(r"[a-z0-9]([a-z0-9_]*[a-z0-9])?", _key(name)):  # a distribution may be called so
            folder = Path(mstar.__file__).parents[2] / "plugins" / _key(name)
            is_beside = (folder / "pyproject.toml").is_file()  # in a clone, where no index is needed
            named = f"-e {folder}" if is_beside else f"mstar-plugin-{folder.name.replace('_', '-')}"
            hint = f"; try: pip install {named}"
        raise ConfigError(f"no plugin {name!r} is installed{hint}; installed: {listed}")
    if len(found) > 1:
        listed = " and ".join(f"{c.distribution} {c.version} ({c.value})" for c in map(_describe, found))
        raise ConfigError(f"plugin {name!r} is claimed by {listed}; uninstall all but one")
    return found[0]


# ---- the core it needs ----------------------------------------------------------------------------------


def _core_requirement(distribution: Distribution) -> str:
    """What the distribution's metadata says it needs, so that an old core is found before an import fails of it."""
    for requirement in map(Requirement, distribution.requires or ()):
        applies = requirement.marker is None or requirement.marker.evaluate()
        if applies and canonicalize_name(requirement.name) == CORE:
            return str(requirement.specifier)
    return ""


def _check_requirement(plugin: InstalledPlugin, needed: str) -> None:
    try:
        satisfied = SpecifierSet(needed).contains(mstar.__version__, prereleases=True)
    except InvalidSpecifier as error:
        wrong = f"requires_core is {needed!r}, not a version specifier such as >=0.1"
        raise PluginError(f"plugin {plugin}: {wrong}") from error
    if not satisfied:
        raise ConfigError(
            f"plugin {plugin} needs {CORE} {needed}, but {mstar.__version__} is installed; "
            f"try: pip install '{CORE}{needed}', or another version of {plugin.distribution}"
        )


# ---- its hook -------------------------------------------------------------------------------------------


@contextmanager
def _blamed_on(plugin: InstalledPlugin, act: str) -> Iterator[None]:
    """A plugin's code may raise anything; whatever it is, it is the plugin's."""
    try:
        yield
    except Exception as error:
        raise PluginError(f"plugin {plugin}: {act} failed: {type(error).__name__}: {error}") from error


def _registered(plugin: InstalledPlugin, module: Any) -> ModelSpec:
    """The one spec the plugin's hook registers."""
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    try:
        manager.register(module, name=plugin.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        reason = " ".join(str(error).split())
        raise PluginError(f"plugin {plugin}: {reason}; the hook is register_models(register)") from error
    if not manager.hook.register_models.get_hookimpls():
        wrong = f"{plugin.value!r} has no hook register_models(register) marked with mstar.plugin.hookimpl"
        raise PluginError(f"plugin {plugin}: {wrong}")
    specs: list[ModelSpec] = []
    with _blamed_on(plugin, "its hook register_models"):
        manager.hook.register_models(register=specs.append)
    where = f"plugin {plugin}: register_models registered"
    for spec in specs:
        if not isinstance(spec, ModelSpec):
            raise PluginError(f"{where} a {type(spec).__name__}, not a ModelSpec")
        if spec.name != plugin.name:
            raise PluginError(f"{where} {spec.name!r}; the name must be the entry point's, {plugin.name!r}")
    if len(specs) != 1:
        count = "nothing" if not specs else f"{plugin.name!r} {len(specs)} times"
        raise PluginError(f"{where} {count}; it must register one model, once")
    return specs[0]


# ---- the files its spec points to -----------------------------------------------------------------------


def _check_paths(plugin: InstalledPlugin, spec: ModelSpec) -> None:
    paths = {
        field: getattr(spec, field) for field in ("config", "processor", "offers", "max_model_len", "voices", "plot")
    }
    named = {"": spec.tiny} if isinstance(spec.tiny, str) else spec.tiny or {}
    paths |= {f"tiny[{word!r}]" if word else "tiny": path for word, path in named.items()}
    paths |= {f"nodes[{module!r}]": path for module, path in spec.nodes.items()}
    problems = [] if spec.tasks else ["tasks is empty; a model has at least one task"]
    for field, path in paths.items():
        module, _, name = (path or "").partition(":")
        if path is not None and not (module and name):
            problems.append(f"{field} is {path!r}; it must be of the form 'package.module:Name'")
        elif module and not _exists(module):
            problems.append(f"{field} is {path!r}, but there is no module {module!r}")
    if problems:
        raise PluginError(f"plugin {plugin}: its spec has wrong fields:\n" + "\n".join(f"  - {p}" for p in problems))


def _exists(module: str) -> bool:
    """Whether a module can be found, without importing it or the packages it lies in."""
    first, *rest = module.split(".")
    try:
        found = importlib.util.find_spec(first)
    except ValueError:  # in sys.modules without a spec, as in a notebook
        return False
    for part in rest:
        if found is None or found.submodule_search_locations is None:
            return False
        found = PathFinder.find_spec(f"{found.name}.{part}", found.submodule_search_locations)
    return found is not None
