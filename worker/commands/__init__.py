"""The commands of `python -m worker`, one a module: `add_parser` declares it, its `func` runs it for an exit code."""
