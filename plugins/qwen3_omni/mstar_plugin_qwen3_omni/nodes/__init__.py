"""The nodes of Qwen3-Omni. Run in a worker."""
