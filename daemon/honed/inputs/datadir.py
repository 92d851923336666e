"""Data sets that are directories: the choice of their files, and every file's split by its name.

train.jsonl  test.jsonl                      a split is a word at the beginning or the end of a name
data/train-00000-of-00002.parquet            as in hub repositories
train/part-1.parquet  test/part-1.parquet    or a directory's name
dataset_dict.json  train/  test/             as written by save_to_disk of datasets, per split:
state.json  dataset_info.json  data-00000-of-00001.arrow
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.spec.data_form import SUFFIXES_HINT, form_of
from honed.spec.spec import DatasetSpec
from honed.system import durable
from honed.system.error import DatasetError

#: Words for splits, as in Hugging Face's own rules for file names.
_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    "heldout": "test",
    "holdout": "test",
}
#: Files beside data files that describe them.
METADATA = frozenset(("dataset_info.json", "dataset_infos.json", "dataset_dict.json"))
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}")
#: Levels of directories that are searched below a data set's if it has no files itself, and files that are listed.
MAX_DEPTH = 3
MAX_FILES = 20_000
#: First entries of a directory in which data files are searched.
MAX_LOOKED_AT = 1000


def files_of(dataset: DatasetSpec) -> list[Path]:
    """Return the data files of a data set. Raises DatasetError if there are none."""
    return dataset.hub_files if dataset.is_of_hub else files(dataset.place, split=dataset.split)


def files(path: Path, *, split: str | None = None) -> list[Path]:
    """Return the data files of a data set: the file itself, or those of a directory by name, without hidden ones.

    With a split: those of its directory `<split>/`, or those whose names have the word. If no name says `train`, it
    means the files whose names say no split. Raises DatasetError if there are none.
    """
    if path.is_file():
        if form_of(path) is None:
            raise DatasetError(f"{path}: not a supported kind of data file", hint=SUFFIXES_HINT)
        if split is not None:
            raise DatasetError(
                f"{path}: `split` is for a directory with several splits, but this is a file",
                hint="remove `split`, or use the path of the directory",
                fix={"split": None},
            )
        return [path]
    if not path.is_dir():
        raise DatasetError(
            f"{path}: no such file or directory", hint="paths must be absolute and exist on the machine that trains"
        )
    if split is not None and "/" not in split and (path / split).is_dir():
        return files(path / split)
    listed = _listed(path)
    chosen = listed if split is None else _of_split(path, listed, split)
    if not chosen:
        names = ", ".join(_shown(path, listed)) or "nothing"
        what = "data file" if split is None else f"data file of split {split!r}"
        splits = [] if split is None else sorted({_label(path, file) for file in listed})[:8]
        hint = f"write `split: {'` or `split: '.join(splits)}`" if splits else SUFFIXES_HINT
        fix = {"split": splits[0]} if len(splits) == 1 else {}
        raise DatasetError(f"{path}: no {what} in this directory (there is: {names})", hint=hint, fix=fix)
    return chosen


@dataclass(frozen=True)
class Mixed:
    """A directory that holds more than one split, of which the job names none."""

    train: tuple[str, ...]  #: values of `split` for the rows to train on
    held_out: tuple[str, ...]  #: values of `split` for held-out rows
    example: str  #: the name of a held-out file
    is_certain: bool  #: True if the names leave no doubt


def mixed(path: Path, paths: Sequence[Path]) -> Mixed | None:
    """Return the splits if a directory's files, read as one data set, are by their names held-out rows beside others.

    If no name says `train`, a name with more than the word `test` may be about tests. A name is certain if it is the
    word alone, or if another file has the rest of its name (`rows.jsonl`, `rows_eval.jsonl`).
    """
    if path.is_file():
        return None
    words = {file: _said(path, file) for file in paths}
    held_out = [file for file, word in words.items() if word is not None and _WORDS[word] != "train"]
    train = [file for file, word in words.items() if word is not None and _WORDS[word] == "train"]
    if not held_out or len(held_out) == len(paths):
        return None
    stems = {_stem(file) for file in paths}
    is_certain = bool(train) or any(_rest(file) in {"", *stems} for file in held_out)
    return Mixed(
        tuple(dict.fromkeys(_label(path, file) for file in train)) or ("train",),
        tuple(dict.fromkeys(_label(path, file) for file in held_out)),
        str(held_out[0].relative_to(path)),
        is_certain,
    )


def held_out_word(path: Path, paths: Sequence[Path]) -> str | None:
    """Return the word (such as `test`) by which all of a data set's files, or the file itself, are named as held
    out."""
    words = {_said(path if path.is_dir() else path.parent, file) for file in paths}
    word = next(iter(words)) if len(words) == 1 else None
    return word if word is not None and _WORDS[word] != "train" else None


def is_held_out(split: str) -> bool:
    """Return True if a split's name means held-out data."""
    word = _word(split)
    return word is not None and _WORDS[word] != "train"


def unread(path: Path, paths: Sequence[Path]) -> list[str]:
    """Return directories below a data set's that also have data files, and are not read since it has files of its
    own."""
    if not path.is_dir() or not any(file.parent == path for file in paths):
        return []
    return [
        entry.name
        for entry in _entries(path)
        if entry.is_dir() and not entry.is_symlink() and _word(entry.name) is None and _has_data(entry)
    ]


def _has_data(path: Path) -> bool:
    """Return True if a data file is among a directory's first entries: it may contain a million images."""
    try:
        with os.scandir(path) as entries:
            first = [entry.name for entry in itertools.islice(entries, MAX_LOOKED_AT)]
    except OSError:
        return False
    return any(form_of(Path(name)) is not None and name not in METADATA and name[0] != "." for name in first)


# --- what lies there -------------------------------------------------------------------------------------------------


def _listed(path: Path) -> list[Path]:
    """Return the data files directly in a directory; if there are none, those below it."""
    if (saved := _saved(path)) is not None:
        return saved
    if direct := list(_direct(path)):
        return direct
    below = _below(path, MAX_DEPTH)
    tops = sorted({file.relative_to(path).parts[0] for file in below})
    splits = _json(path / "dataset_dict.json").get("splits") or []
    subjects = [top for top in tops if top != "data" and _word(top) is None and top not in splits]
    if len(subjects) > 1 or (subjects and len(tops) > len(subjects)):
        raise DatasetError(
            f"{path}: data files are in several subdirectories, not in the directory itself: {', '.join(tops[:8])}",
            hint=f"use the path of one of them, or add each as its own data set: `- path: {path / subjects[0]}`",
        )
    return below


def _direct(path: Path) -> Iterator[Path]:
    if (saved := _saved(path)) is not None:
        yield from saved
        return
    for entry in _entries(path):
        if form_of(entry) is not None and entry.name not in METADATA and entry.is_file():
            yield entry


def _entries(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))


def _below(path: Path, depth: int) -> list[Path]:
    """Return the files in the directories below one, without following links to directories."""
    below: list[Path] = []
    for entry in _entries(path):
        if entry.is_dir() and not entry.is_symlink():
            below += list(_direct(entry)) or (_below(entry, depth - 1) if depth > 1 else [])
        if len(below) > MAX_FILES:
            raise DatasetError(
                f"{path}: more than {MAX_FILES} data files", hint="combine them into fewer, larger files"
            )
    return below


def _saved(path: Path) -> list[Path] | None:
    """Return the files of a data set that save_to_disk wrote, in their order; None for other directories."""
    state = _json(path / "state.json")
    listed = state.get("_data_files")
    named = [str(item.get("filename")) for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    if not named or any("/" in name for name in named):
        return None
    paths = [path / name for name in named]
    missing = next((file for file in paths if not file.is_file()), None)
    if missing is not None:
        raise DatasetError(
            f"{missing}: no such file, although state.json lists it",
            hint="copy the complete directory again, or save the data set again (save_to_disk)",
        )
    return paths


def _json(path: Path) -> Mapping[str, Any]:
    return durable.json_object(lambda: path.read_bytes() if path.is_file() and path.stat().st_size < 2**24 else b"{}")


def _shown(path: Path, listed: Sequence[Path]) -> list[str]:
    entries = [str(file.relative_to(path)) for file in listed] or [entry.name for entry in _entries(path)]
    return entries[:8]


# --- names -----------------------------------------------------------------------------------------------------------


def _of_split(path: Path, listed: Sequence[Path], split: str) -> list[Path]:
    """Return the files whose names say the split: by its very word, else by a synonym."""
    if any(split in file.relative_to(path).parts[:-1] for file in listed):
        return [file for file in listed if split in file.relative_to(path).parts[:-1]]
    is_word = re.fullmatch("[0-9A-Za-z]*", split) is not None
    names = {file: _unnumbered(_stem(file)) for file in listed}
    if chosen := [
        file
        for file, name in names.items()
        if name == split or (is_word and re.split("[^0-9A-Za-z]", name)[0] == split)
    ]:
        return chosen
    words = {file: _said(path, file) for file in listed}
    if chosen := [file for file, word in words.items() if word == split]:
        return chosen
    meant = _WORDS.get(split)
    if chosen := [file for file, word in words.items() if word is not None and _WORDS[word] == meant]:
        return chosen
    if meant == "train" and any(words.values()):
        return [file for file, word in words.items() if word is None]
    return []


def _label(path: Path, file: Path) -> str:
    """Return the `split` value of a file: `train_sft` for train_sft-00000-of-00002.parquet, or the split word in its
    name."""
    if (word := _word(_stem(file))) is not None:
        return word if _unnumbered(_stem(file)) == _stem(file) else _unnumbered(_stem(file))
    return next((part for part in file.relative_to(path).parts[:-1] if _word(part)), _stem(file))


def _said(path: Path, file: Path) -> str | None:
    """Return the split word in a file's name, or in the name of a directory between it and the data set's."""
    parts = file.relative_to(path).parts
    return _word(_stem(file)) or next((word for part in parts[:-1] if (word := _word(part))), None)


def _word(name: str) -> str | None:
    """Return the split word that a name begins or ends with; None without one, or with two of different meaning."""
    words = [word for word in re.split(r"[^a-z]+", _unnumbered(name).lower()) if word]
    marks = [word for word in (words[:1] + words[-1:]) if word in _WORDS]
    return marks[0] if marks and len({_WORDS[word] for word in marks}) == 1 else None


def _stem(file: Path) -> str:
    name = file.name
    while form_of(Path(name)) is not None:
        name = Path(name).stem
    return name


def _unnumbered(stem: str) -> str:
    return shard["split"] if (shard := _SHARD.fullmatch(stem)) is not None else stem


def _rest(file: Path) -> str:
    """Return a file's name without its split word and the separator."""
    stem = _unnumbered(_stem(file))
    word = _word(stem)
    if word is None:
        return stem
    beginning, end = rf"(?i)^{word}[^A-Za-z]*", rf"(?i)[^A-Za-z]*{word}[0-9_.-]*$"
    return re.sub(end, "", stem) if re.search(end, stem) else re.sub(beginning, "", stem)
