"""Writes an echo checkpoint: a `config.json`, for the weights are drawn from its seed. This is `--model tiny`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from mstar_plugin_echo.config import EchoConfig


def make(folder: Path) -> Path:
    """Write the checkpoint into `folder`, made if needed; returns the folder to load."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"model_type": "echo", **asdict(EchoConfig())}, indent=2)
    (folder / "config.json").write_text(text + "\n")
    return folder
