"""The rows of a job, encoded once: a resume, a smaller batch after a lack of memory, a fallback and the job's own run
after its trial find what an earlier attempt made, and other jobs of the same user what one of them made.

    rows/<key>/     in the job's directory: made by this job, or links into the user's cache, which is read-only; what
                    libraries cache beside the rows stays in the job's directory
    rows/<uid>/     the user's cache, filled by honed; see job/row_cache.py

An entry's name is a hash of all that decides what the rows become: the names and the content of the data files and how
they are read, the tokenizer with its code, the template with its arguments, the maximum length, the versions of honed,
Python and the libraries, and the date if the template asks for it. Directories do not matter: a copy of the data is the
same data. Rows with images, videos and sounds depend on more files, and are made anew every time.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import honed
from honed.inputs.datadir import files_of
from honed.job import tree
from honed.job.row_cache import FILES
from honed.spec import kind
from honed.spec.spec import DatasetSpec
from honed.system import installed
from honed.text.chat import ChatFormat
from honed.worker.assignment import Assignment
from honed.worker.rows import table
from honed.worker.rows.table import DamagedError, Table

if TYPE_CHECKING:
    from collections.abc import Callable

#: Increased with every change of the files' format, or of what rows become.
FORMAT = 4
#: Name of the entry whose rows no later attempt uses.
UNKEYED = "unkeyed"
_PACKAGES = ("transformers", "tokenizers", "jinja2", "datasets", "pyarrow", "pandas", "numpy")
#: Packages that take part where `tokenizers` does not do all the work.
_SLOW_PACKAGES = ("sentencepiece", "mistral-common", "tiktoken", "protobuf")
#: Bytes up to which a file beside a slow tokenizer is one that it may read.
_MAX_FILE_BYTES = 2**27


def key(job: Assignment, chat: ChatFormat, datasets: Sequence[DatasetSpec], hashes: Mapping[str, str]) -> str:
    """Return the name of the entry for these data sets; `hashes` are those of their files."""
    spec, tokenizer = job.spec, chat.tokenizer
    templates = [str(chat.renderer.template), str(getattr(tokenizer, "chat_template", None))]
    packages = [*_PACKAGES, *(() if _backend(tokenizer) is not None else _SLOW_PACKAGES)]
    decisive: dict[str, object] = {
        "format": FORMAT,
        "versions": {"honed": honed.__version__, **{name: installed.version(name) for name in packages}},
        "python": sys.version,  # its hashes of token ids are stored
        "files": [[(file.name, hashes[str(file)]) for file in files_of(dataset)] for dataset in datasets],
        "datasets": [dataset.model_dump(mode="json", exclude={"path", "label"}) for dataset in datasets],
        "seed": job.seed if any(dataset.fraction is not None for dataset in datasets) else None,
        "tokenizer": _tokenizer(chat.tokenizer, job.base_model_path),
        "templates": templates,
        "chat_template_kwargs": spec.chat_template_kwargs,
        "date": str(job.date) if any("strftime_now" in template for template in templates) else None,
        "max_length": spec.training.cut_at,
        "form": kind.of(spec).form,
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()[:32]


def find(
    directory: Path, beat: Callable[[], None], warn: Callable[[str], None], *, shared_dir: Path | None = None
) -> Table | None:
    """Return the rows of an entry, or None where they must be made; a damaged one is removed, with a warning.

    `shared_dir` is the user's cache, in which the entry is looked for, too.
    """
    if is_shared(directory) and not (directory / table.MANIFEST).exists():
        tree.clear(directory)  # links to an entry that the cache no longer has
    if shared_dir is not None and not directory.exists():
        _link(shared_dir / directory.name, directory)
    try:
        loaded = table.load(directory, beat)
    except DamagedError as error:
        whose = "job" if is_shared(directory) else "attempt"
        warn(f"the encoded rows of an earlier {whose} are damaged and are made anew: {error}")
        tree.remove(directory)
        return None
    for path in directory.glob("cache-*.arrow") if loaded is not None else ():
        path.unlink()  # made by datasets, for packing
    return loaded


def is_shared(directory: Path) -> bool:
    """Return True if an entry in the job's directory consists of links into the user's cache."""
    return (directory / table.MANIFEST).is_symlink()


def _link(shared: Path, directory: Path) -> None:
    """Link an entry of the user's cache to a job's directory, if it exists."""
    if not (shared / table.MANIFEST).exists():
        return
    new = directory.with_name(f".{directory.name}.link")
    tree.remove(new)
    new.mkdir(parents=True)
    for name in FILES:
        (new / name).symlink_to(shared / name)
    new.rename(directory)


def keep(rows_dir: Path, names: Iterable[str]) -> None:
    """Remove all other entries, so that a job has one of every kind of data, also while it makes them."""
    kept = set(names)
    for path in rows_dir.iterdir() if rows_dir.is_dir() else ():
        if path.name not in kept:
            tree.remove(path)


def _backend(tokenizer: Any) -> Any:
    """Return the part of a fast tokenizer that `tokenizers` implements; None if it is Python code."""
    return getattr(tokenizer, "backend_tokenizer", None)


def _tokenizer(tokenizer: Any, model_path: Path) -> list[str]:
    """Return what the tokenizer does, as text: its settings, its backend or its files, and its own code."""
    # Its directory is named in the settings, and the same tokenizer may lie in two.
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if name not in _PLACES}
    facts = [type(tokenizer).__qualname__, repr(tokenizer.special_tokens_map), repr(settings), *_code(tokenizer)]
    if (backend := _backend(tokenizer)) is not None:
        return [*facts, hashlib.sha256(backend.to_str().encode()).hexdigest()]
    files = sorted(path for path in model_path.iterdir() if path.is_file() and not path.name.endswith(".safetensors"))
    return [*facts, *(f"{path.name} {_hash(path)}" for path in files if path.stat().st_size < _MAX_FILE_BYTES)]


#: Settings of a tokenizer that name its files; their content counts.
_PLACES = ("name_or_path", "vocab_file", "merges_file", "tokenizer_file", "tokenizer_object", "__slow_tokenizer")


def _code(tokenizer: Any) -> Iterator[str]:
    """Yield the hashes of a tokenizer's code that is in no package with a version: the model's own, with all modules of
    its package, which it may import."""
    modules = {item.__module__ for item in type(tokenizer).__mro__}
    own = {name for name in modules if name.partition(".")[0] not in ("builtins", "transformers", "tokenizers")}
    starts = tuple(f"{name.rpartition('.')[0] or name}." for name in own)
    for name in sorted(name for name in list(sys.modules) if name in own or name.startswith(starts)):
        file = getattr(sys.modules.get(name), "__file__", None)
        yield f"{name.rpartition('.')[2]} {_hash(Path(file)) if file and Path(file).is_file() else None}"


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
