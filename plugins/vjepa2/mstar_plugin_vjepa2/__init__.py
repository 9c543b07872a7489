"""V-JEPA 2 and V-JEPA 2-AC for mstar: a video encoder and world models on top. Importing it imports no torch."""

__version__ = "0.1.0"
