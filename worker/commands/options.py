"""What several commands share: the environment's settings with the command line's over them."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace

from worker.settings import DEFAULT_REDIS_URL, Settings


def add_place_options(parser: argparse.ArgumentParser) -> None:
    """Declare where the queue is."""
    parser.add_argument("--redis-url", metavar="URL", help=f"the server (default {DEFAULT_REDIS_URL})")
    parser.add_argument("--queue", metavar="NAME", help="the queue (default screenshots)")


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings.

    Raises:
        SettingsError: one of them is not allowed.
    """
    names = {field.name for field in fields(Settings)}
    given = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    return replace(Settings.from_environment(), **given)
