"""Data sets of the hub: the files of a repository that are a job's rows, and their places in the cache.

The card (README.md) may assign files to configurations and splits, in `configs`. If it does not, a configuration is a
directory, and the files' names give the splits, by the rules for local directories (datadir.py). Scripts are never run,
nor fetched.

fetch.py fetches the chosen files, as it does for models, and its record lists them. For a snapshot that another program
put into the cache, the same choice is made among its files.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from honed.inputs import datadir
from honed.job.plan_file import DatasetPlace
from honed.run import snapshot
from honed.run.snapshot import DATASET, Missing
from honed.spec.data_form import SUFFIXES_HINT, form_of
from honed.spec.spec import DatasetSpec, JobSpec
from honed.system.error import DatasetError

#: The file that describes a data set, and the most bytes of it that are read.
CARD = "README.md"
MAX_CARD_BYTES = 2**20
#: A branch that the hub generates for many data sets.
_CONVERTED = "refs/convert/parquet"


# --- which files -----------------------------------------------------------------------------------------------------


def choose(names: Iterable[str], card: bytes | None, wanted: Missing) -> list[str]:
    """Choose the data files that a job reads. Raises DatasetError if the choice is impossible or ambiguous."""
    where, listed = f"datasets: {wanted.repo_id} at {wanted.revision}", sorted(names)
    readable = [name for name in listed if _is_readable(name)]
    saved = {os.path.dirname(name) for name in readable if name.endswith(".arrow")}  # noqa: PTH120
    readable = [name for name in readable if not (_base(name) == "state.json" and os.path.dirname(name) in saved)]  # noqa: PTH120
    if not readable:
        raise _unreadable(where, listed)
    config = _config(where, _configs(card), wanted.name)
    if config is not None and config.patterns:
        return _of_patterns(where, readable, config, wanted.split)
    place = config.data_dir if config is not None else _directory(where, readable, wanted.name)
    return _of_names(where, readable, place, wanted.split)


def _is_readable(name: str) -> bool:
    parts = name.split("/")
    is_plain = name.isprintable() and all(part and not part.startswith(".") for part in parts)
    return is_plain and form_of(Path(name)) is not None and parts[-1] not in datadir.METADATA


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _unreadable(where: str, listed: Sequence[str]) -> DatasetError:
    scripts = [name for name in listed if "/" not in name and name.endswith(".py")]
    converted = f"the hub's automatic conversion may exist: `revision: {_CONVERTED}`"
    if scripts:
        return DatasetError(
            f"{where} has only a loading script ({scripts[0]}) and no supported data files; honed never runs scripts "
            "of data sets",
            hint=f"{converted}; otherwise run it elsewhere, and use the files that it creates",
        )
    there = ", ".join([name for name in listed if not name.startswith(".")][:8]) or "nothing"
    return DatasetError(f"{where} has no supported data files (it has: {there})", hint=f"{SUFFIXES_HINT}; {converted}")


def _of_names(where: str, readable: Sequence[str], place: str, split: str | None) -> list[str]:
    """Choose by the rules for directories, in a temporary one with empty files of the same names."""
    with tempfile.TemporaryDirectory(prefix="honed-") as directory:
        root = Path(directory).resolve()
        for name in readable:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        top = root / place
        try:
            paths = datadir.files(top, split=split)
        except DatasetError as error:
            hint = error.hint
            if f"path: {top}/" in hint:
                hint = "write `name:` with one of these below its path to select that configuration"
            raise DatasetError(error.said.replace(str(top), where), hint=hint.replace(str(root), where)) from None
        mixed = datadir.mixed(top, paths) if split is None else None
        if mixed is not None and mixed.is_certain:
            raise _several_splits(where, [*mixed.train, *mixed.held_out])
        return [str(file.relative_to(root)) for file in paths]


def _several_splits(where: str, splits: Sequence[str]) -> DatasetError:
    lines = " or ".join(f"`split: {split}`" for split in splits[:8])
    return DatasetError(
        f"{where} contains held-out data, and `split` is not set",
        hint=f"write {lines} below its path",
    )


# --- the card --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Config:
    """One configuration, as described by the card."""

    name: str
    is_default: bool
    data_dir: str
    patterns: Mapping[str, tuple[str, ...]]  #: split → patterns; empty if the files' names give the splits


def _configs(card: bytes | None) -> list[_Config]:
    """Return the configurations that the card names; empty if it cannot be parsed."""
    head = re.match(r"---[ \t]*\n(.*?)\n---[ \t]*\n", (card or b"").decode(errors="replace").lstrip("\ufeff"), re.S)
    # Only this key is parsed: the rest of a card is long, and often not valid for our YAML reader.
    block = re.search(r"^configs:.*\n(?:(?:[ \t-].*)?\n)*", head[1] + "\n", re.M) if head else None
    if block is None:
        return []
    try:
        listed = yaml.safe_load(block[0])["configs"]
    except (yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [
        _Config(
            str(item.get("config_name", "default")),
            item.get("default") is True,
            str(item.get("data_dir") or "").strip("./"),
            _patterns(item.get("data_files")),
        )
        for item in (listed if isinstance(listed, list) else [])
        if isinstance(item, dict)
    ]


def _patterns(given: Any) -> dict[str, tuple[str, ...]]:
    match given:
        case str():
            return {"train": (given,)}
        case dict():
            return {str(split): _listed(paths) for split, paths in given.items()}
        case [dict(), *_]:
            return {str(item.get("split", "train")): _listed(item.get("path")) for item in given if "path" in item}
        case list():
            return {"train": _listed(given)}
        case _:
            return {}


def _listed(given: Any) -> tuple[str, ...]:
    return tuple(map(str, given)) if isinstance(given, list) else (str(given),)


def _config(where: str, configs: Sequence[_Config], name: str | None) -> _Config | None:
    """Return the configuration that is meant; None if the card names none."""
    if not configs:
        return None
    if name is None:
        default = [config for config in configs if config.is_default or config.name == "default"]
        chosen = default[0] if default else configs[0] if len(configs) == 1 else None
    else:
        chosen = next((config for config in configs if config.name == name), None)
    if chosen is None:
        names = ", ".join(config.name for config in configs[:12])
        what = "has several configurations" if name is None else f"has no configuration {name!r}; there are"
        raise DatasetError(f"{where} {what}: {names}", hint="write one of them as `name:` below its path")
    return chosen


def _of_patterns(where: str, readable: Sequence[str], config: _Config, split: str | None) -> list[str]:
    splits = list(config.patterns)
    if split is None:
        held_out = [item for item in splits if datadir.is_held_out(item)]
        if held_out and len(held_out) < len(splits):
            raise _several_splits(where, splits)
    elif split not in config.patterns:
        lines = " or ".join(f"`split: {item}`" for item in splits[:8])
        raise DatasetError(f"{where}: no split {split!r} in configuration {config.name}", hint=f"write {lines}")
    chosen: dict[str, None] = {}
    for item in splits if split is None else [split]:
        for pattern in config.patterns[item]:
            meant = f"{config.data_dir}/{pattern.removeprefix('./')}".lstrip("/")
            matches = [name for name in readable if _matches(name, meant)]
            if not matches:
                raise DatasetError(
                    f"{where}: its card lists {pattern} as {item} of {config.name}, but there is no such data file",
                    hint="set a `revision` that has it, or download the files and use their paths",
                )
            chosen |= dict.fromkeys(matches)
    return list(chosen)


def _matches(name: str, pattern: str) -> bool:
    """Match directory by directory, with `**` for any number of them, in bounded time: a card's author controls both
    names and patterns."""
    parts, places = name.split("/"), {0}
    for part in pattern.split("/"):
        if part == "**":
            places = set(range(min(places), len(parts) + 1)) if places else places
        else:
            places = {place + 1 for place in places if place < len(parts) and fnmatchcase(parts[place], part)}
    return len(parts) in places


def _directory(where: str, readable: Sequence[str], name: str | None) -> str:
    """Return the directory of a configuration that the card does not describe."""
    if name is None or name == "default":
        return ""
    for place in (name, f"data/{name}"):
        if any(file.startswith(f"{place}/") for file in readable):
            return place
    tops = sorted({file.split("/")[0] for file in readable if "/" in file})
    raise DatasetError(
        f"{where} has no configuration {name!r}: neither its card lists one nor is there such a directory",
        hint=f"its directories are: {', '.join(tops[:8])}" if tops else "remove `name`",
    )


# --- where they lie --------------------------------------------------------------------------------------------------


def wanted(dataset: DatasetSpec, commit: str | None = None) -> Missing:
    return Missing(dataset.path, commit or dataset.revision or "main", DATASET, dataset.name, dataset.split)


def find(cache_dir: Path, asked: Missing) -> DatasetPlace | None:
    """Find a data set's rows in the cache; None if they are not, or not all, there. Raises DatasetError."""
    commit = snapshot.commit_of(cache_dir, asked.repo_id, asked.revision, DATASET)
    path = snapshot.snapshot_dir(cache_dir, asked.repo_id, commit, DATASET)
    if not path.is_dir():
        return None
    record = snapshot.read(cache_dir, asked.repo_id, commit, DATASET, asked.part)
    if record is not None:
        names = [name for name in record.files if name != CARD]
        return DatasetPlace(commit, path, tuple(names)) if names and snapshot.has_all(path, record) else None
    if not snapshot.is_foreign(cache_dir, asked.repo_id, commit, DATASET):
        return None
    there = [
        os.path.relpath(os.path.join(directory, name), path)  # noqa: PTH118
        for directory, _, files in os.walk(path)
        for name in files
    ]
    card = path / CARD
    content = card.read_bytes() if card.is_file() and card.stat().st_size <= MAX_CARD_BYTES else None
    return DatasetPlace(commit, path, tuple(choose(there, content, asked)))


def located(
    job_spec: JobSpec, cache_dir: Path, *, allow_hub: bool, commits: Mapping[str, str] | None = None
) -> tuple[JobSpec, dict[str, DatasetPlace], Missing | None]:
    """Return the job with its hub data sets found in the cache, the place of each, and the first that has to be
    fetched.

    `commits` has the commits that their revisions meant before, by key. Raises DatasetError for a missing data set if
    nothing may be fetched.
    """
    places: dict[str, DatasetPlace] = {}
    missing = None
    for key, item in job_spec.each_dataset():
        if not item.is_of_hub:
            continue
        asked = wanted(item, (commits or {}).get(key))
        if (place := find(cache_dir, asked)) is not None:
            places[key] = place
            continue
        if not allow_hub:
            raise _refused(key, asked, cache_dir)
        missing = missing or asked
    return placed(job_spec, places), places, missing


def placed(job_spec: JobSpec, places: Mapping[str, DatasetPlace]) -> JobSpec:
    """Return the job with these places for its hub data sets."""
    if not places:
        return job_spec

    def put(key: str, sets: Sequence[DatasetSpec]) -> list[DatasetSpec]:
        pairs = [(item, places.get(f"{key}.{number}")) for number, item in enumerate(sets)]
        return [item if place is None else item.placed(place.path, place.files) for item, place in pairs]

    sets = {
        "datasets": put("datasets", job_spec.datasets),
        "eval_datasets": put("eval_datasets", job_spec.eval_datasets),
    }
    return job_spec.model_copy(update=sets)


def _refused(key: str, asked: Missing, cache_dir: Path) -> DatasetError:
    commit = snapshot.commit_of(cache_dir, asked.repo_id, asked.revision, DATASET)
    how = "not" if snapshot.is_foreign(cache_dir, asked.repo_id, commit, DATASET) else "only partly"
    revision = f" --revision {asked.revision}" if asked.revision != "main" else ""
    fetch = f"hf download --repo-type dataset {asked.repo_id}{revision}"
    return DatasetError(
        f"{key}.path: {asked.repo_id} at {asked.revision} is {how} in the local cache {cache_dir}, and jobs may not "
        "fetch from the hub (policy.hub)",
        hint=f"download it first with `{fetch} --local-dir DIR`, and use DIR as path; or `HF_HOME={cache_dir} {fetch}`",
    )
