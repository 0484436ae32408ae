"""The packing of a pass's rows."""

from __future__ import annotations

import pytest

from kernels.segments import Segments


def test_rows_follow_one_another() -> None:
    segments = Segments(3, (2, 1))
    assert segments.tokens == 6
    assert segments.prefix == slice(0, 3)
    assert list(segments.suffixes) == [slice(3, 5), slice(5, 6)]
    assert segments.offsets == (3, 5, 6)
    assert segments.last_rows == (4, 5)


def test_prefix_or_suffixes_may_be_missing() -> None:
    assert Segments(0, (4,)).last_rows == (3,)
    assert Segments(4, ()).last_rows == () and Segments(4, ()).offsets == (4,)


@pytest.mark.parametrize("prefix, suffixes", [(-1, (2,)), (2, (0,)), (0, ())])
def test_impossible_packings(prefix: int, suffixes: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        Segments(prefix, suffixes)
