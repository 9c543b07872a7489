"""`python -m mstar`: the same as the `mstar` command."""

from mstar.cli import main

if __name__ == "__main__":
    main()
