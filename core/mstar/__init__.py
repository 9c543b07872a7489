"""mstar: a serving engine for composite multimodal models."""

__version__ = "0.1.0"
