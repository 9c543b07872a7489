"""Qwen3-Omni for mstar: it sees, hears, watches, answers and speaks. Importing it imports no torch."""

__version__ = "0.1.0"
