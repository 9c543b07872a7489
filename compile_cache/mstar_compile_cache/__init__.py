"""Compiled artifacts that persist across processes; knows torch, not mstar."""

__version__ = "0.1.0"
