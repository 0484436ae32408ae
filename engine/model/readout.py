"""The read-out: from each question's last row to the probabilities of its options' letters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.linear import linear


def letter_logits(last_hidden: torch.Tensor, letter_rows: torch.Tensor) -> torch.Tensor:
    """Logits of the letters only.

    Args:
        last_hidden: `[K, D]`, model dtype, of `LanguageModel.prefill`.
        letter_rows: `[L, D]`, model dtype, of `LanguageModel.letter_rows`.

    Returns:
        `[K, L]`, rounded to the model dtype.
    """
    return linear(last_hidden, letter_rows)


def letter_probabilities(logits: torch.Tensor, options: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Softmax over each question's own letters.

    Args:
        logits: `[K, L]`, model dtype.
        options: for each question how many letters are in use, 1 to L; a tensor `[K]` is taken as it is.

    Returns:
        `[K, L]`, float32: a question's letters sum to 1, the letters that it does not use are 0.
    """
    questions, letters = logits.shape
    if not isinstance(options, torch.Tensor):
        assert len(options) == questions and all(1 <= count <= letters for count in options), (options, logits.shape)
        options = torch.tensor(options, device=logits.device)
    unused = torch.arange(letters, device=logits.device) >= options[:, None]
    return logits.float().masked_fill(unused, float("-inf")).softmax(-1)
