"""Fills the networks from a checkpoint, strictly: a tensor that is missing, unexpected or misshapen is an error."""
