"""BAGEL for mstar: it chats about images, draws, edits and thinks. Importing it imports no torch."""

__version__ = "0.1.0"
