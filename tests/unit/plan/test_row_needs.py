"""The estimate of what encoded rows take, from a sample."""

from __future__ import annotations

from honed.job.plan_file import RowNeeds
from honed.plan import row_needs
from honed.plan.row_needs import ROW_MEMORY_BYTES, STAGE_BYTES, Extent


def extent(num_rows: int, *, fraction: float | None = None, json_bytes: int = 0) -> Extent:
    return Extent(num_rows, row_bytes=1000.0, row_tokens=250.0, fraction=fraction, json_bytes=json_bytes)


def estimate(*extents: Extent, max_length: int | None = 1024, is_packed: bool = False) -> RowNeeds:
    return row_needs.estimate(extents, max_length=max_length, is_packed=is_packed)


def test_a_million_rows_of_1_kb_take_about_3_gb_of_disk_and_little_memory() -> None:
    found = estimate(extent(1_000_000))
    assert 3.0e9 < found.disk_bytes < 3.4e9
    assert found.memory_bytes == STAGE_BYTES + 1_000_000 * ROW_MEMORY_BYTES < 500e6


def test_truncation_takes_less_and_packing_more() -> None:
    whole = estimate(extent(1000)).disk_bytes
    assert estimate(extent(1000), max_length=50).disk_bytes < 0.6 * whole
    assert estimate(extent(1000), max_length=None).disk_bytes == whole
    assert estimate(extent(1000), is_packed=True).disk_bytes > 1.5 * whole


def test_of_a_mixture_only_the_drawn_rows_count() -> None:
    found = estimate(extent(1000, fraction=0.5), extent(100, fraction=0.5))
    assert found.num_rows == 200
    assert estimate(extent(1000, fraction=3), extent(100, fraction=1)).num_rows == 400
    assert estimate(extent(1000), extent(100)).num_rows == 1100


def test_a_json_file_counts_whole() -> None:
    assert estimate(extent(10, json_bytes=10**9)).memory_bytes > 5 * 10**9


def test_training_and_held_out_rows_are_encoded_one_after_the_other() -> None:
    both = RowNeeds(10, 100, 1000) + RowNeeds(1, 10, 3000)
    assert both == RowNeeds(11, 110, 3000)
