"""Disk space and host memory that the encoded rows of a job take, estimated from the inspected rows and the files'
sizes: the files themselves are not read.

The sizes of compressed files and of tables count as if they were text, so the estimate is rather too low for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from honed.job.plan_file import RowNeeds

#: Bytes of a token in its file: its id and its label; packing writes both once more, with positions.
TOKEN_BYTES, PACKED_BYTES = 8, 12
#: Bytes of a row's numbers, offsets and pickled form in its files, besides its text and tokens.
ROW_BYTES = 150
#: Bytes of a row's numbers in host memory, with those of a split and of a report.
ROW_MEMORY_BYTES = 150
#: Bytes that reading and encoding add to the worker and its processes, whatever the number of rows.
STAGE_BYTES = 150 * 2**20
#: A .json file is read whole: its size in memory as a multiple of the file's.
JSON_FACTOR = 6


@dataclass(frozen=True)
class Extent:
    """The rows of one data set, as far as they are known."""

    num_rows: int
    row_bytes: float  #: of a row's text, on average
    row_tokens: float  #: of a row, on average
    fraction: float | None  #: share of the mixture
    json_bytes: int  #: the largest .json file, which is read whole


def estimate(extents: Sequence[Extent], *, max_length: int | None, is_packed: bool) -> RowNeeds:
    """Estimate what the rows of one mixture take."""
    drawn = _drawn(extents)
    token_bytes = TOKEN_BYTES + (PACKED_BYTES if is_packed else 0)
    disk = 0.0
    for extent, number in zip(extents, drawn, strict=True):
        num_tokens = extent.row_tokens if max_length is None else min(extent.row_tokens, max_length)
        disk += number * (extent.row_bytes + token_bytes * num_tokens + ROW_BYTES)
    whole = JSON_FACTOR * max((extent.json_bytes for extent in extents), default=0)
    num_rows = round(sum(drawn))
    return RowNeeds(num_rows, round(disk), STAGE_BYTES + max(whole, ROW_MEMORY_BYTES * num_rows))


def _drawn(extents: Sequence[Extent]) -> list[float]:
    """Return the number of rows that are taken of every data set; see `dataset.Reading`."""
    weights = [extent.fraction for extent in extents]
    if any(weight is None for weight in weights):
        return [extent.num_rows for extent in extents]
    shares = [(weight or 0.0) / sum(filter(None, weights)) for weight in weights]
    total = min((extent.num_rows / share for extent, share in zip(extents, shares, strict=True) if share), default=0.0)
    return [total * share for share in shares]
