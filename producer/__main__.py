"""`python -m producer`; the commands are in `cli`."""

from __future__ import annotations

import io
import sys

from producer.cli import main

if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a letter shows its escape
    sys.exit(main())
