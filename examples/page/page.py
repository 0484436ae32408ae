"""Read this first: a small settings page in endless variety, what is asked about it, and what is right.

`sample` draws a look and a wording; `markup` is the page as HTML, the same for one page in a browser and for the many
on a sheet that training pictures are cut from; `questions` are what an agent asks about it. Looks and wordings that are
kept for the test (`held_out`) never occur in training.
"""

from __future__ import annotations

import html
import itertools
import json
import random
from dataclasses import dataclass, replace
from typing import NamedTuple

WIDTH_PIXELS, HEIGHT_PIXELS = 384, 256
HUES = 360


class Words(NamedTuple):
    """Wordings: what the switch is for, the save button's and the other button's text, what the badge says."""

    features: tuple[str, ...]
    save: tuple[str, ...]
    other: tuple[str, ...]
    saved: tuple[str, ...]


TRAINING = Words(
    features=(
        *("Dark mode", "Auto update", "Notifications", "Location", "Backups", "Wi-Fi", "Bluetooth", "Night light"),
        *("Sync files", "Spell check", "Share usage data", "Airplane mode", "Screen reader", "Battery saver"),
    ),
    save=("Save", "Apply", "Save changes", "Update", "Keep", "Confirm", "Save now", "Apply changes"),
    other=("Help", "Cancel", "Back", "Close", "Reset"),
    saved=("Saved", "All changes saved", "Settings saved", "Your changes are saved"),
)
HELD_OUT = Words(
    features=("Weekly report", "Camera", "Auto lock", "Voice control", "Subtitles"),
    save=("Save settings", "Keep changes", "Apply now"),
    other=("Cancel", "Help", "Back"),
    saved=("Changes saved", "Saved now"),
)
FONTS = ("sans-serif", "serif", "monospace", "'DejaVu Sans', sans-serif")
# Of every 60 degrees of hue, these are kept for the test.
HELD_OUT_HUES = range(20, 35)


@dataclass(frozen=True)
class Look:
    """One page: its wording, its looks and its state. Lengths are CSS pixels, hues degrees."""

    feature: str
    save: str
    other: str
    saved_text: str
    enabled: bool
    saved: bool
    dark: bool
    hue: int
    accent: int
    font: str
    font_size: int
    left: int
    top: int
    switch_first: bool
    switch_scale: float
    buttons: str
    other_first: bool
    badge_on_top: bool
    rounded: int


def sample(rng: random.Random, *, held_out: bool = False) -> Look:
    """A page at random, in a random state."""
    words = HELD_OUT if held_out else TRAINING
    return Look(
        feature=rng.choice(words.features),
        save=rng.choice(words.save),
        other=rng.choice(words.other),
        saved_text=rng.choice(words.saved),
        enabled=rng.random() < 0.5,
        saved=rng.random() < 0.5,
        dark=rng.random() < 0.4,
        hue=_hue(rng, held_out),
        accent=_hue(rng, held_out),
        font=rng.choice(FONTS),
        font_size=rng.randint(12, 16),
        left=rng.randint(8, 56),
        top=rng.randint(8, 40),
        switch_first=rng.random() < 0.5,
        switch_scale=rng.uniform(0.9, 1.3),
        buttons=rng.choice(("flex-start", "center", "flex-end")),
        other_first=rng.random() < 0.5,
        badge_on_top=rng.random() < 0.5,
        rounded=rng.randint(0, 12),
    )


def _hue(rng: random.Random, held_out: bool) -> int:
    while True:
        hue = rng.randrange(HUES)
        if (hue % 60 in HELD_OUT_HUES) == held_out:
            return hue


def markup(look: Look, *, at: tuple[int, int] = (0, 0)) -> str:
    """The page as a box of HTML, its corner at so many pixels from the left and the top.

    The switch is a `button` of role `switch`, Save and the other button are `button`s with the ids `save` and `other`.
    """
    light, ink = (12, 92) if look.dark else (94, 15)
    card = light + 6 if look.dark else 99
    fill = f"hsl({look.accent} 70% {55 if look.dark else 42}%)" if look.enabled else f"hsl({look.hue} 5% 55%)"
    height = round(26 * look.switch_scale)
    knob = height - 8
    travel = height if look.enabled else 0
    switch = (
        f'<button id="switch" role="switch" aria-checked="{str(look.enabled).lower()}" '
        f'aria-label="{html.escape(look.feature)}" '
        f'style="width:{2 * height}px;height:{height}px;border:0;border-radius:{height}px;background:{fill};padding:0">'
        f'<span style="display:block;width:{knob}px;height:{knob}px;margin:4px;border-radius:{knob}px;background:#fff;'
        f'transform:translateX({travel}px)"></span></button>'
    )
    label = f'<span style="flex:1">{html.escape(look.feature)}</span>'
    row = switch + label if look.switch_first else label + switch
    button = f"border-radius:{look.rounded}px;padding:6px 12px;font:inherit;border:1px solid"
    accent = f"hsl({look.accent} 60% 38%)"
    save = (
        f'<button id="save" style="{button} {accent};background:{accent};color:#fff">{html.escape(look.save)}</button>'
    )
    other = (
        f'<button id="other" style="{button} hsl({look.hue} 10% 50%);background:transparent;color:inherit">'
        f"{html.escape(look.other)}</button>"
    )
    both = other + save if look.other_first else save + other
    badge = (
        '<div role="status" style="background:#1a7f37;color:#fff;padding:5px 10px;margin:6px 0;border-radius:6px">'
        f"&#10003; {html.escape(look.saved_text)}</div>"
        if look.saved
        else ""
    )
    width = WIDTH_PIXELS - look.left - 24
    return (
        f'<div style="position:absolute;left:{at[0]}px;top:{at[1]}px;width:{WIDTH_PIXELS}px;height:{HEIGHT_PIXELS}px;'
        f"overflow:hidden;background:hsl({look.hue} 25% {light}%);color:hsl({look.hue} 20% {ink}%);"
        f'font:{look.font_size}px {look.font}">'
        f'<div style="position:absolute;left:{look.left}px;top:{look.top}px;width:{width}px;box-sizing:border-box;'
        f"padding:10px 14px;background:hsl({look.hue} 20% {card}%);border:1px solid hsl({look.hue} 15% 60%);"
        f'border-radius:{look.rounded}px">{badge if look.badge_on_top else ""}'
        f'<div style="display:flex;align-items:center;gap:12px;margin:8px 0 14px">{row}</div>'
        f'<div style="display:flex;gap:8px;justify-content:{look.buttons}">{both}</div>'
        f"{'' if look.badge_on_top else badge}</div></div>"
    )


def live(look: Look) -> str:
    """The page as a whole HTML document that answers clicks; its state stands in `document.body.dataset`.

    A click on the switch turns it over and leaves that unsaved; a click on the save button saves. Clicks that a script
    makes do nothing.
    """
    states = itertools.product((False, True), repeat=2)
    boxes = {f"{on} {saved}".lower(): markup(replace(look, enabled=on, saved=saved)) for on, saved in states}
    boxes_json = json.dumps(boxes).replace("</", "<\\/")
    enabled, saved = str(look.enabled).lower(), str(look.saved).lower()
    return f"""<!doctype html><html lang="en"><title>Settings</title>
<body style="margin:0" data-enabled="{enabled}" data-saved="{saved}"><main></main><script>{{
const boxes = {boxes_json};
const state = document.body.dataset;
const show = () => {{ document.querySelector("main").innerHTML = boxes[state.enabled + " " + state.saved]; }};
document.addEventListener("click", event => {{
  const clicked = event.isTrusted && event.target.closest("button")?.id;
  if (clicked === "switch") {{ state.enabled = String(state.enabled !== "true"); state.saved = "false"; }}
  if (clicked === "save") state.saved = "true";
  show();
}});
show();
}}</script></body></html>"""


class Asked(NamedTuple):
    """A question: its goal, its options' labels by key, in order, and the right key."""

    goal: str
    options: dict[str, str]
    right: str


def questions(look: Look, rng: random.Random) -> dict[str, Asked]:
    """What an agent asks: whether the switch is on, and what to do next. Options come in random order."""
    phrase = rng.choice
    state = {"on": "The switch is on", "off": "The switch is off"}
    next_step = {
        "switch": phrase(("Click the switch", "Press the switch")),
        "save": f"{phrase(('Click', 'Press'))} '{look.save}'",
        "other": f"{phrase(('Click', 'Press'))} '{look.other}'",
        "stop": phrase(("Stop, all is done", "Stop, nothing is left to do")),
    }
    goal = phrase((f"Turn on {look.feature} and save.", f"Switch {look.feature} on and save it."))
    return {
        "state": Asked("Is the switch on?", _shuffled(state, rng), "on" if look.enabled else "off"),
        "next": Asked(goal, _shuffled(next_step, rng), right_step(look)),
    }


def right_step(look: Look) -> str:
    """The next step towards a switch that is on and saved."""
    if not look.enabled:
        return "switch"
    return "stop" if look.saved else "save"


def _shuffled(options: dict[str, str], rng: random.Random) -> dict[str, str]:
    keys = list(options)
    rng.shuffle(keys)
    return {key: options[key] for key in keys}
