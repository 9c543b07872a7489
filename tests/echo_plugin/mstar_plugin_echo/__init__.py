"""The echo model: every primitive of mstar on a CPU, without weights. See the README beside it."""
