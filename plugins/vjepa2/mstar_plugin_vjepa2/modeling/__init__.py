"""The networks of V-JEPA 2 and V-JEPA 2-AC and the arithmetic around them: plain modules and functions."""
