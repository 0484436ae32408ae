"""The commands of `python -m worker`, one a module: each registers its parser and runs."""
