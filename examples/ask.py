"""Ask about a screen of any size, then about several at once: `python -m examples.ask SCREENSHOT ...`."""

from __future__ import annotations

import sys

from producer import Client, Job, fit_screenshot
from producer.settings import Settings

QUESTIONS = {
    "next": {
        "instructions": "Keep the changes made on this page.",
        "criteria": {"save": "Click 'Save changes'", "discard": "Click 'Discard'", "wait": None},
    }
}


def main(*paths: str) -> None:
    """Ask the same question about every file; the answers come in the order given."""
    settings = Settings.from_environment()
    with Client(settings.redis_url, queue=settings.queue, prefix=settings.prefix) as client:
        fitted = [fit_screenshot(path) for path in paths]
        ids = client.submit_many(Job(screen.data, QUESTIONS) for screen in fitted)
        for path, screen, result in zip(paths, fitted, client.results(ids, timeout_s=30), strict=True):
            found = result.answers["next"].choice if result.ok else result.error
            print(f"{path}, shrunk to {screen.scale:.0%}: {found}")


if __name__ == "__main__":
    main(*sys.argv[1:])
