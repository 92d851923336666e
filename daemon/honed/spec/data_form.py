"""The format of a data file, by its name."""

from __future__ import annotations

from pathlib import Path

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")


PACKED = (".gz", ".zst", ".bz2", ".xz")


SUFFIXES_HINT = (
    f"data files end in {' '.join(SUFFIXES)}; text formats may be compressed and also end in {' '.join(PACKED)}"
)


def form_of(path: Path) -> str | None:
    """Return the format of a data file as one of SUFFIXES; None if the name is not that of a data file."""
    name = path.name.lower()
    packed = next((suffix for suffix in PACKED if name.endswith(suffix)), "")
    suffix = Path(name.removesuffix(packed)).suffix
    return suffix if suffix in SUFFIXES and not (packed and suffix in (".parquet", ".arrow")) else None
