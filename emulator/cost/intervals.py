"""Unions and overlaps of time intervals, for busy times of streams that run side by side."""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order; empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The time that two unions share."""
    shared, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if end > start:
            shared.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared


def without(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The time of a union that another one leaves."""
    left, j = [], 0
    for start, end in one:
        while j < len(other) and other[j][1] <= start:
            j += 1
        i = j
        while i < len(other) and other[i][0] < end:
            if other[i][0] > start:
                left.append((start, other[i][0]))
            start = max(start, other[i][1])
            i += 1
        if end > start:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
