"""The networks of BAGEL and the arithmetic around them: plain modules and functions."""
