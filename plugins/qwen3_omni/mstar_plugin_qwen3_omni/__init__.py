"""Qwen3-Omni for mstar: it sees, hears and watches, and answers in text and speech. Importing it imports no torch."""

__version__ = "0.1.0"
