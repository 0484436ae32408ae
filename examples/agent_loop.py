"""An agent that sees a page, decides on the queue and clicks: `python -m examples.agent_loop CHECKPOINT`.

Screenshot, job, answer, click, next screenshot, until the answer is to stop; then the page's own state is read. The page
is drawn at random from looks and wordings that the checkpoint was not trained on. Needs Chromium
(`apt-get install chromium`) and Playwright's Python package (extra `dev`).
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from examples.demo import worker
from examples.page.page import HEIGHT_PIXELS, WIDTH_PIXELS, Look, live, questions, sample
from examples.page.render import browser_page
from producer import Client

if TYPE_CHECKING:
    from playwright.sync_api import Page

MOST_STEPS = 6
STOP = "stop"


def main() -> int:
    """Run one page to its end; 0 if the switch is on and that is saved."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python -m examples.agent_loop .demo/page --seed 3",
    )
    parser.add_argument("checkpoint", type=Path, nargs="?", help="with its export; not needed with --url")
    parser.add_argument("--url", help="a queue that a worker serves; a worker of its own is started when left out")
    parser.add_argument(
        "--data", type=Path, default=Path(".demo/server"), help="of its own server (default .demo/server)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the page (default 0)")
    options = parser.parse_args()
    if options.url is None and options.checkpoint is None:
        parser.error("give a checkpoint, or --url of a queue that a worker serves")
    rng = random.Random(options.seed)
    look = replace(sample(rng, held_out=True), enabled=False, saved=False)
    queue = nullcontext(options.url) if options.url else worker(options.checkpoint, options.data)
    with queue as url, Client(url) as client, browser_page(WIDTH_PIXELS, HEIGHT_PIXELS) as page:
        state = run(client, page, look, rng)
    print(f"the page says: enabled={state['enabled']}, saved={state['saved']}")
    return 0 if state == {"enabled": "true", "saved": "true"} else 1


def run(client: Client, page: Page, look: Look, rng: random.Random) -> dict[str, str]:
    """Click through a page as the answers say; returns the state that the page itself tells."""
    page.set_content(live(look))
    for step in range(1, MOST_STEPS + 1):
        asked = questions(look, rng, held_out=True)
        result = client.decide(
            page.screenshot(),
            {
                name: {"type": "choice", "instructions": ask.goal, "criteria": ask.options}
                for name, ask in asked.items()
            },
        )
        if not result.ok:
            sys.exit(f"the agent stops: {result.error}")
        seen, chosen = result.answers["state"], result.answers["next"]
        sure = chosen.probabilities[chosen.choice]
        print(
            f"{step}. the switch is {seen.choice}; {asked['next'].options[chosen.choice]} ({sure:.0%} sure)", flush=True
        )
        if chosen.choice == STOP:
            break
        page.locator(f"#{chosen.choice}").click()
    state: dict[str, str] = page.evaluate("({...document.body.dataset})")
    return state


if __name__ == "__main__":
    sys.exit(main())
