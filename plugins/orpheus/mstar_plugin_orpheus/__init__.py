"""Orpheus for mstar: a Llama that speaks SNAC codes, and the SNAC decoder. Importing it imports no torch."""

__version__ = "0.1.0"
