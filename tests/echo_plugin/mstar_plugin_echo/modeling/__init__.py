"""The echo model's networks: plain PyTorch, one per file."""
