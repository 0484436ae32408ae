"""An agent that sees a page, decides on the queue and clicks: `python -m examples.agent_loop CHECKPOINT`.

Screenshot, job, answer, click, next screenshot, until the answer is to stop; then the page's own state is read. The
page is drawn at random from looks and wordings that the checkpoint was not trained on. Needs Chromium
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
from examples.recording import Recording
from producer import Client

if TYPE_CHECKING:
    from playwright.sync_api import Page

MOST_STEPS = 6
STOP = "stop"
DONE = {"enabled": "true", "saved": "true"}


def main() -> int:
    """Run one page to its end; 0 if the switch is on and that is saved."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example (`make demo` makes the checkpoint):\n"
        "  python -m examples.agent_loop .demo/page --seed 3 --record .demo/agent-loop.gif",
    )
    parser.add_argument("checkpoint", type=Path, nargs="?", help="with its export; not needed with --url")
    parser.add_argument("--url", help="a queue that a worker serves; a worker of its own is started when left out")
    parser.add_argument(
        "--data", type=Path, default=Path(".demo/server"), help="of its own server (default .demo/server)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the page (default 0)")
    parser.add_argument(
        "--record", type=Path, metavar="GIF", help="write what was seen and clicked as a moving picture"
    )
    options = parser.parse_args()
    if options.url is None and options.checkpoint is None:
        parser.error("give a checkpoint, or --url of a queue that a worker serves")
    rng = random.Random(options.seed)
    look = untouched(rng)
    recording = Recording()
    queue = nullcontext(options.url) if options.url else worker(options.checkpoint, options.data)
    with queue as url, Client(url) as client, browser_page(WIDTH_PIXELS, HEIGHT_PIXELS) as page:
        state = run(client, page, look, rng, recording)
    if options.record:
        recording.save(options.record)
        print(f"recorded in {options.record}")
    print(said(state))
    return 0 if state == DONE else 1


def untouched(rng: random.Random) -> Look:
    """A page that training has not seen, its switch off and nothing saved."""
    return replace(sample(rng, held_out=True), enabled=False, saved=False)


def run(client: Client, page: Page, look: Look, rng: random.Random, recording: Recording) -> dict[str, str]:
    """Click through a page as the answers say; returns the state that the page itself tells."""
    page.set_content(live(look))
    for number in range(1, MOST_STEPS + 1):
        asked = questions(look, rng)
        screenshot = page.screenshot()
        result = client.decide(
            screenshot,
            {
                name: {"type": "choice", "instructions": ask.goal, "criteria": ask.options}
                for name, ask in asked.items()
            },
        )
        if not result.ok:
            sys.exit(f"the agent stops: {result.error}")
        seen, chosen = result.answers["state"].choice, result.answers["next"]
        label, sure = asked["next"].options[chosen.choice], chosen.probabilities[chosen.choice]
        print(f"{number}. the switch is {seen}; {label} ({sure:.0%} sure)", flush=True)
        click = None if chosen.choice == STOP else centre(page, chosen.choice)
        recording.step(screenshot, result, f"Goal: {asked['next'].goal}   Step {number}: {label}", click)
        if click is None:
            break
        page.mouse.click(*click)
    state: dict[str, str] = page.evaluate("({...document.body.dataset})")
    recording.end(page.screenshot(), said(state))
    return state


def centre(page: Page, candidate: str) -> tuple[float, float]:
    """Where a candidate's middle is, in the screenshot's pixels."""
    box = page.locator(f"#{candidate}").bounding_box()
    assert box is not None, f"the page shows no #{candidate}"
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def said(state: dict[str, str]) -> str:
    """The page's own state in words."""
    return f"the page says: enabled={state['enabled']}, saved={state['saved']}"


if __name__ == "__main__":
    sys.exit(main())
