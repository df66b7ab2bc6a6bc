"""Unions, overlaps and remainders of intervals, against a count of unit cells."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from emulator.cost.intervals import length, overlap, union, without

INTERVALS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda p: (min(p), max(p))), max_size=8)


def cells(intervals: list) -> set[int]:
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


@given(INTERVALS, INTERVALS)
def test_they_are_set_operations(one: list, other: list) -> None:
    a, b = union(one), union(other)
    assert cells(a) == cells(one)
    assert all(before[1] < after[0] for before, after in pairwise(a))
    assert cells(overlap(a, b)) == cells(one) & cells(other)
    assert cells(without(a, b)) == cells(one) - cells(other)
    assert length(without(a, b)) + length(overlap(a, b)) == length(a) == len(cells(one))
