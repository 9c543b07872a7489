"""The networks of Qwen3-Omni and the arithmetic around them: plain modules and functions."""
