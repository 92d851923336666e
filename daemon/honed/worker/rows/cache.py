"""The rows of a job, encoded once: a resume, a smaller batch after a lack of memory, a fallback and the job's own run
after its trial find what an earlier attempt made, and other jobs of the same user what one of them made.

    rows/<key>/     in the job's directory: made by this job, or links into the user's cache, which is read-only; what
                    libraries cache beside the rows stays in the job's directory
    rows/<uid>/     the user's cache, filled by honed; see job/row_cache.py

An entry's name is a hash of all that decides what the rows become: the content of the data files and how they are read,
the tokenizer, the template with its arguments, the maximum length, the versions of honed and of the libraries, and the
date if the template asks for it. Rows with images, videos and sounds depend on more files, and are made anew each time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import honed
from honed.job.row_cache import FILES
from honed.spec.spec import DatasetSpec
from honed.system import installed
from honed.text.chat import ChatFormat
from honed.worker.assignment import Assignment
from honed.worker.rows import table
from honed.worker.rows.table import DamagedError, Table

if TYPE_CHECKING:
    from collections.abc import Callable

#: Increased with each change of the files' format, or of what rows become.
FORMAT = 1
#: Name of the entry whose rows no later attempt uses.
UNKEYED = "unkeyed"
_PACKAGES = ("transformers", "tokenizers", "sentencepiece", "jinja2", "datasets", "pyarrow")


def key(job: Assignment, chat: ChatFormat, datasets: Sequence[DatasetSpec], hashes: Mapping[str, str]) -> str:
    """Return the name of the entry for these data sets; `hashes` are those of their files."""
    spec, templates = job.spec, list(_templates(chat))
    decisive: dict[str, object] = {
        "format": FORMAT,
        "versions": {"honed": honed.__version__, **{name: installed.version(name) for name in _PACKAGES}},
        "files": hashes,
        "datasets": [each.model_dump(mode="json") for each in datasets],
        "seed": job.seed if any(each.fraction is not None for each in datasets) else None,
        "tokenizer": _tokenizer(chat.tokenizer, job.base_model_path),
        "templates": templates,
        "chat_template_kwargs": spec.chat_template_kwargs,
        "date": str(job.date) if any("strftime_now" in each for each in templates) else None,
        "max_length": spec.training.cut_at,
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()[:32]


def find(
    directory: Path, beat: Callable[[], None], warn: Callable[[str], None], *, shared_dir: Path | None = None
) -> Table | None:
    """Return the rows of an entry, or None where they must be made; a damaged one is removed, with a warning.

    `shared_dir` is the user's cache, in which the entry is looked for, too.
    """
    if is_shared(directory) and not (directory / table.MANIFEST).exists():
        shutil.rmtree(directory)  # links to an entry that the cache no longer has
    if shared_dir is not None and not directory.exists():
        _link(shared_dir / directory.name, directory)
    try:
        found = table.load(directory, beat)
    except DamagedError as error:
        whose = "job" if is_shared(directory) else "attempt"
        warn(f"the encoded rows of an earlier {whose} are damaged and are made anew: {error}")
        shutil.rmtree(directory, ignore_errors=True)
        return None
    for path in directory.glob("cache-*.arrow") if found is not None else ():
        path.unlink()  # made by datasets, for packing
    return found


def is_shared(directory: Path) -> bool:
    """Return True if an entry in the job's directory consists of links into the user's cache."""
    return (directory / table.MANIFEST).is_symlink()


def _link(shared: Path, directory: Path) -> None:
    """Link an entry of the user's cache to a job's directory, if it exists."""
    if not (shared / table.MANIFEST).exists():
        return
    new = directory.with_name(f".{directory.name}.link")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name in FILES:
        (new / name).symlink_to(shared / name)
    new.rename(directory)


def keep(rows_dir: Path, names: Iterable[str]) -> None:
    """Remove all other entries, so that a job has one of each kind of data."""
    kept = set(names)
    for path in rows_dir.iterdir() if rows_dir.is_dir() else ():
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _templates(chat: ChatFormat) -> Iterator[str]:
    yield str(chat.renderer.template)
    yield str(getattr(chat.tokenizer, "chat_template", None))


def _tokenizer(tokenizer: Any, model_path: Path) -> list[str]:
    """Return what the tokenizer does, as text; of one that is Python code, the hashes of its files."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    said = [type(tokenizer).__name__, repr(tokenizer.special_tokens_map), repr(tokenizer.init_kwargs)]
    if backend is not None:
        return [*said, hashlib.sha256(backend.to_str().encode()).hexdigest()]
    files = sorted(path for path in model_path.iterdir() if path.is_file() and not path.name.endswith(".safetensors"))
    return [*said, *(hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.stat().st_size < 2**27)]
