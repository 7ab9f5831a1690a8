"""Distinct inputs, counted against sets of Python's tuples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dmt.simulator.work import count_inputs

BAGS = st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=2), st.integers(0, 2)), min_size=4, max_size=12)


@settings(suppress_health_check=[HealthCheck.too_slow])  # another job may take the cores
@given(BAGS, BAGS, st.sampled_from([1, 2, 4]))
def test_distinct_inputs_are_those_of_python_s_tuples(first: list, second: list, parts: int) -> None:
    """``a`` has bags, ``b`` one id a sample; each alone, and both together, on two ranks."""
    batches = []
    for rows in (first, second):
        bags = (np.array([len(bag) for bag, _ in rows]), np.array([i for bag, _ in rows for i in bag], dtype=np.int64))
        batches.append({"a": bags, "b": (np.ones(len(rows), dtype=np.int64), np.array([one for _, one in rows]))})
    alone, together = count_inputs(batches, [(0, ("a",)), (1, ("a", "b"))], parts)
    for found, key in ((alone, lambda row: tuple(row[0])), (together, lambda row: (tuple(row[0]), row[1]))):
        firsts = [{key(row): number for number, row in reversed(list(enumerate(rows)))} for rows in (first, second)]
        assert found.rows == sum(map(len, firsts)) / 2
        ids = [
            len(rows[number][0])
            for rows, of_rank in zip((first, second), firsts, strict=True)
            for number in of_rank.values()
        ]
        assert found.ids[0] == pytest.approx(sum(ids) / 2)
        # Each distinct input crosses with the first micro-batch that has it.
        expected = np.zeros(parts)
        for rows, of_rank in zip((first, second), firsts, strict=True):
            cuts = [list(part) for part in np.array_split(np.arange(len(rows)), parts)]
            for number in of_rank.values():
                expected[next(k for k, part in enumerate(cuts) if number in part)] += 1
        assert found.parts == pytest.approx(tuple(expected / expected.sum()))
