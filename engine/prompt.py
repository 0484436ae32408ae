"""The one prompt of the contract's section 3: a question's text, its tokens and their positions.

Goal and labels arrive rendered and escaped. A prompt is a constant head (system text up to `<|vision_start|>`), the
image's tokens and a question's own tail; only the tail differs between the questions of a request.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from engine.errors import CheckpointError

MAX_PROMPT_TOKENS = 4096
MAX_OPTIONS = 26
LETTERS = string.ascii_uppercase
IMAGE_PAD = "<|image_pad|>"

# The model's own system text (trycua/cua, MIT; see NOTICE). Another wording would be another model.
SYSTEM_TEXT = (
    "You are a one-pass computer-use decision model. You are shown the current state of a screen and a fixed, closed "
    "list of candidate (element, action) options, each given a single letter. Choose exactly one option: the single "
    "best next action to take. Answer with ONLY that option's letter -- no words, no punctuation, no explanation."
)
HEAD_TEXT = f"<|im_start|>system\n{SYSTEM_TEXT}<|im_end|>\n<|im_start|>user\n<|vision_start|>"


@dataclass(frozen=True)
class Question:
    """One closed question, ready for the prompt.

    `name` is only used to say where a fault is; `goal` is the rendered instruction ("" for none); `labels` are the
    options' rendered and escaped labels, in order, 1 to 26 of them.
    """

    name: str
    goal: str
    labels: tuple[str, ...]

    def __post_init__(self) -> None:
        assert 1 <= len(self.labels) <= MAX_OPTIONS, f"a question has 1 to {MAX_OPTIONS} options"


def tail_text(question: Question) -> str:
    """The prompt's text after the image's tokens."""
    goal = f"Goal: {question.goal}\n\n" if question.goal else ""
    lines = "\n".join(
        f'{letter}. Decision "{label}" -> select' for letter, label in zip(LETTERS, question.labels, strict=False)
    )
    return (
        f"<|vision_end|>{goal}App: Cua Driver\nTask family: closed-candidate decision\n\n"
        f"The current screenshot is attached.\n\nOptions:\n{lines}\n\n"
        "Answer with a single letter.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


class PromptEncoder:
    """Tokens of prompts, by a checkpoint's tokenizer. Immutable and safe to share between threads.

    `head_ids` are the constant tokens before the image, `letter_ids` the 26 tokens of A-Z.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Take a checkpoint's tokenizer (`engine.checkpoint.tokenizer.load_tokenizer`).

        Raises:
            CheckpointError: a letter or `<|image_pad|>` is not one token.
        """
        self._tokenizer = tokenizer
        self.head_ids: tuple[int, ...] = tuple(self._ids(HEAD_TEXT))
        self.image_pad_id = self._single(IMAGE_PAD)
        self.letter_ids: tuple[int, ...] = tuple(self._single(letter) for letter in LETTERS)

    def tail_ids(self, question: Question) -> list[int]:
        """A question's own tokens, from `<|vision_end|>` to the last."""
        return self._ids(tail_text(question))

    def prompt_ids(self, question: Question, image_tokens: int) -> list[int]:
        """The whole prompt's tokens."""
        return [*self.head_ids, *[self.image_pad_id] * image_tokens, *self.tail_ids(question)]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _single(self, text: str) -> int:
        ids = self._ids(text)
        if len(ids) != 1:
            raise CheckpointError([f"tokenizer.json: {text!r} is {len(ids)} tokens; it must be exactly one"])
        return ids[0]


def positions(head_tokens: int, grid: tuple[int, int], tail_tokens: int) -> torch.Tensor:
    """Positions of a prompt on the three axes of multimodal rotary embedding (time, height, width).

    Args:
        head_tokens: tokens before the image.
        grid: the image's `(rows, columns)` in merged tokens.
        tail_tokens: tokens after the image.

    Returns:
        `int64 [3, head + rows * columns + tail]`: text counts up on all axes, the image stands at one time and spreads
        over rows and columns, the text after it goes on at `head + max(rows, columns)` (Qwen2-VL's M-RoPE).
    """
    rows, columns = grid
    image = torch.stack(
        [
            torch.zeros(rows * columns, dtype=torch.int64),
            torch.arange(rows).repeat_interleave(columns),
            torch.arange(columns).repeat(rows),
        ]
    )
    head = torch.arange(head_tokens).expand(3, -1)
    tail = torch.arange(tail_tokens).expand(3, -1) + head_tokens + max(rows, columns)
    return torch.cat([head, image + head_tokens, tail], dim=1)


def too_long(question: Question, prompt_tokens: int) -> str:
    """The sentence that refuses a prompt over the limit."""
    return (
        f"the prompt has {prompt_tokens:,} tokens with the image; at most {MAX_PROMPT_TOKENS:,} are allowed: "
        f"shorten the instructions or the {len(question.labels)} labels, or send a smaller image"
    )
