"""A warm-up passes on good answers only."""

from __future__ import annotations

import itertools

import pytest

from engine import image as images
from engine.errors import WarmUpError
from engine.prompt import Question
from engine.warm_up import CASES, Probabilities, picture, warm_up


def even(image: bytes, questions: tuple[Question, ...]) -> Probabilities:
    return tuple((1 / len(question.labels),) * len(question.labels) for question in questions)


def test_every_case_is_run_on_a_picture_of_its_size() -> None:
    seen: list[tuple[int, int, int, int]] = []

    def record(image: bytes, questions: tuple[Question, ...]) -> Probabilities:
        height, width, _ = images.decode(image).shape
        seen.append((width, height, len(questions), len(questions[0].labels)))
        return even(image, questions)

    reports: list[tuple[int, int]] = []
    warm_up(record, lambda phase, done, total: reports.append((done, total)))
    assert seen == [tuple(case) for case in CASES]
    assert reports[-1] == (len(CASES), len(CASES))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.4])
def test_outputs_that_are_no_probabilities_fail(bad: float) -> None:
    with pytest.raises(WarmUpError, match="not finite or do not sum to 1"):
        warm_up(lambda image, questions: tuple((bad,) * len(question.labels) for question in questions))


def test_a_second_answer_with_other_bits_fails() -> None:
    drift = itertools.count()

    def drifting(image: bytes, questions: tuple[Question, ...]) -> Probabilities:
        shift = 1e-9 * next(drift)
        return tuple((row[0] + shift, row[1] - shift, *row[2:]) for row in even(image, questions))

    with pytest.raises(WarmUpError, match="differs from the first"):
        warm_up(drifting)


def test_a_missing_answer_fails() -> None:
    with pytest.raises(WarmUpError, match="answered with"):
        warm_up(lambda image, questions: even(image, questions)[1:])


def test_an_exception_is_the_warm_ups_and_names_its_case() -> None:
    def broken(image: bytes, questions: tuple[Question, ...]) -> Probabilities:
        raise RuntimeError("no kernel for this device")

    with pytest.raises(WarmUpError, match=r"1x1, 1 questions of 2 options .*no kernel for this device"):
        warm_up(broken)


def test_pictures_are_what_they_say() -> None:
    assert images.check_image(picture(1024, 1024)) == ()
