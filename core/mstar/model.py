"""What is to be served: a plugin, the checkpoint it found, and the graph of both. The same in every process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mstar.config import EngineConfig
from mstar.plugin import checkpoint, loader
from mstar.plugin.graph import Graph
from mstar.plugin.loader import LoadedPlugin
from mstar.plugin.processor import Processor
from mstar.plugin.spec import Checkpoint, Limits, load_object, narrowed
from mstar.plugin.validate import validate


@dataclass(frozen=True)
class Model:
    """What is to be served: a plugin, and the checkpoint it found."""

    plugin: LoadedPlugin
    checkpoint: Checkpoint

    @functools.cached_property
    def graph(self) -> Graph:
        """The model's graph. Raises PluginError if it is not sound."""
        graph = self.plugin.spec.graph(self.checkpoint.config)
        validate(graph, self.plugin.spec)
        return graph

    @property
    def voices(self) -> list[str] | None:
        """Names of the voices, the default first; None for models without."""
        spec = self.plugin.spec
        return None if spec.voices is None else load_object(spec.voices, plugin=spec.name)(self.checkpoint.config)

    def make_processor(self, limits: Limits) -> Processor:
        """The model's processor. Raises PluginError if it cannot be loaded."""
        spec = self.plugin.spec
        made: Processor = load_object(spec.processor, plugin=spec.name)(self.checkpoint, limits)
        return made


def find_model(config: EngineConfig, *, download: Callable[[str], Path] = checkpoint.download_snapshot) -> Model:
    """Import the plugin and find the checkpoint's files. Raises ConfigError or PluginError."""
    plugin = loader.load(config.plugin)
    found = checkpoint.resolve(plugin.spec, config.model, parts=config.parts, download=download)
    return Model(replace(plugin, spec=narrowed(plugin.spec, found.config)), found)
