"""Fills the networks from a checkpoint, strictly: a missing, unexpected or misshapen tensor is an error."""
