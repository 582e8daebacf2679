"""Peaks, leaders and thresholds by blocks, against whole rows sorted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.sampling.blocks import BLOCK, highest, peaks, threshold

WIDTHS = [1, 60, BLOCK, 40 * BLOCK, 40 * BLOCK + 1, 41 * BLOCK - 1]


def rows_with_ties(width: int) -> Tensor:
    """Small whole numbers: many equal within and across blocks; one row all equal, one with -inf and both zeros."""
    rows = torch.randint(-30, 31, (8, width), generator=torch.Generator().manual_seed(width)).float() / 4
    rows[1] = 0.25
    rows[2] = -torch.inf
    rows[2, width // 2 :] = 0.0
    rows[2, width - 1] = -0.0
    return rows


def sorted_ids(row: Tensor) -> list[int]:
    values = row.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@pytest.mark.parametrize("width", WIDTHS)
def test_peaks_are_the_first_of_the_highest(width: int) -> None:
    rows = rows_with_ties(width)
    peak, ids = peaks(rows)
    assert ids.tolist() == [sorted_ids(row)[0] for row in rows]
    assert torch.equal(peak, rows.amax(-1))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 3, 20])
def test_highest_come_in_order_ties_to_the_lower_id(width: int, count: int) -> None:
    rows, count = rows_with_ties(width), min(count, width)
    values, ids = highest(rows, count)
    expected = [sorted_ids(row)[:count] for row in rows]
    assert ids.tolist() == expected
    assert values.tolist() == [row[best].tolist() for row, best in zip(rows, expected, strict=True)]


@pytest.mark.parametrize("width", WIDTHS)
def test_threshold_is_each_rows_own_place(width: int) -> None:
    rows = rows_with_ties(width)
    for places in ([1, 2, 3, 4, 5, 6, 7, 8], [19, 2, 3, 4, 1, 1, 1, 1], [width] * 8):
        count = torch.tensor(places).clamp(max=width)[:, None]
        expected = [row.sort(descending=True).values[k - 1].item() for row, k in zip(rows, count[:, 0], strict=True)]
        assert threshold(rows, count)[:, 0].tolist() == expected


def test_a_nan_is_the_peak() -> None:
    rows = torch.zeros(2, 3 * BLOCK)
    rows[0, 2 * BLOCK + 5] = torch.nan
    assert peaks(rows)[0].isnan().tolist() == [True, False]
