"""Export of the output, completed beside its place and renamed into it: adapter or model, tokenizer, card, manifest.

.<name>.tmp  ──►  <output_dir>/  adapter_model.safetensors | model.safetensors …, tokenizer, README.md, honed.json
                                 merged/ …  the exports that the job asks for (writer.py)
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from honed import __version__
from honed.inputs import basemodel
from honed.job import fence, tree
from honed.job.plan_file import Identity
from honed.spec import export as exports
from honed.system import durable, record, rename
from honed.system.error import EnvironmentInvalidError, InterruptedRunError, TimeLimitError
from honed.worker.assignment import Assignment
from honed.worker.model import adapter, card, config_file, generation, leftover, serving, tokenizer_files
from honed.worker.model.card import Facts
from honed.worker.model.writer import WRITERS, Writer

MANIFEST = "honed.json"


def export(
    assignment: Assignment,
    model: Any,
    tokenizer: Any,
    facts: Facts,
    *,
    progress: Callable[[int, int], None],
    prove: Callable[[Path], None],
    compare: Callable[[Writer, Path], str],
    note: Callable[[str], None] = lambda _text: None,
    stop_ids: Sequence[int] = (),
    is_regressed: bool = False,
) -> tuple[dict[str, str], Exception | None]:
    """Write everything, sync it, and rename it into place.

    Returns the artifacts, name to path, and the error of an export that failed, if any: the output is kept then.
    `progress` is called with (done, of) during an export. `prove` raises ModelError if the output in a directory is
    not what was trained; `compare` does so for an export in a directory, and returns a remark. `note` is
    called with every change to the base's files, and every remark; they are also in the model card. `stop_ids` are the
    tokens that end a trained turn.

    Before the rename there is nothing at `output_dir`; after it, everything. An earlier attempt's output is replaced.
    The output of a regressed run goes beside `output_dir`, so that nobody who waits for an output takes it for one.
    """
    target = _regressed_path(assignment) if is_regressed else assignment.output_dir
    artifacts = {"output_dir": str(target)}
    with temporary(target) as made:
        with generation.savable(model), adapter.without_card(model):
            model.save_pretrained(made)
        changes = [*facts.get("changes", ()), *_complete(assignment, model, made)]
        _copy_processor(assignment.base_model_path, made)
        changes += tokenizer_files.write(assignment, tokenizer, made, stop_ids)
        prove(made)
        fault: Exception | None = None
        for item in exports.asked(assignment.spec):
            name, writer = item.name, WRITERS[item.name]
            try:
                written = writer.write(assignment, item, made, made / name, progress)
                changes += [f"{name}/{change}" for change in written]
                changes.append(f"{name}: {compare(writer, made / name)}")
            except (InterruptedRunError, TimeLimitError):
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, what was trained is kept
                fault = fault or error
                tree.remove(made / name)
            else:
                artifacts[name] = str(target / name)
        for change in changes:
            note(change)
        finish(assignment, made, {**facts, "changes": changes}, target=target)
    return artifacts, fault


def _complete(assignment: Assignment, model: Any, made: Path) -> list[str]:
    """Bring what the libraries wrote to the form of the base's own files; return the changes against the base."""
    base, with_code = assignment.base_model_path, assignment.spec.trust_remote_code
    if (made / config_file.ADAPTER_FILE).exists():
        return _complete_adapter(assignment, made)
    if not (made / config_file.FILE).exists():
        return []
    if with_code:
        for path in base.glob("*.py"):
            shutil.copyfile(path, made / path.name)
    changes = config_file.write(base, made, model.config, with_code=with_code)
    return [*changes, *leftover.complete(base, made, model)]


def _complete_adapter(assignment: Assignment, made: Path) -> list[str]:
    import peft

    spec, commit = assignment.spec, assignment.plan.base_model_commit
    base_model = spec.base_model if commit else str(assignment.base_model_path)
    config_file.write_adapter(made, base_model=base_model, revision=commit, defaults=peft.LoraConfig().to_dict())
    tensors, _ = basemodel.read_header(made / "adapter_model.safetensors", hint="")
    raw = json.loads((made / config_file.ADAPTER_FILE).read_bytes())
    return serving.remarks(raw, (tensor.name for tensor in tensors))


def _regressed_path(assignment: Assignment) -> Path:
    """Return the place of a regressed output, with the job's number in its name where another job's lies there."""
    path = assignment.output_dir.with_name(f"{assignment.output_dir.name}.regressed")
    if not path.exists() or _owner(path) == assignment.plan.job.owner:
        return path
    return path.with_name(f"{assignment.output_dir.name}.{assignment.job_id}.regressed")


def remove_regressed(assignment: Assignment) -> Iterator[tuple[Path, OSError | None]]:
    """Remove regressed outputs of an earlier run of this job; yield each, and the error that keeps it, if any.

    Another job's output stays, and so does one that does not name its job.
    """
    name, number = assignment.output_dir.name, assignment.job_id
    for entry in (f"{name}.regressed", f"{name}.{number}.regressed"):
        path = assignment.output_dir.with_name(entry)
        gone = path.with_name(f".{entry}.old")
        tree.remove(gone)  # left by a killed process
        if _owner(path) != assignment.plan.job.owner:
            continue
        try:
            path.rename(gone)
            tree.clear(gone)
        except OSError as error:
            yield path, error
        else:
            yield path, None


def _copy_processor(base: Path, made: Path) -> None:
    """Copy the files that a vision or audio model needs beside weights and tokenizer, unchanged by the training."""
    for path in base.iterdir():  # not glob, which silently skips what may not be read
        if path.name.endswith("processor_config.json") or path.name == "chat_template.json":
            shutil.copyfile(path, made / path.name)


@contextlib.contextmanager
def temporary(target: Path) -> Iterator[Path]:
    """Make an empty directory beside a target, to complete an output in before the rename."""
    durable.make_dir(target.parent)
    made = target.with_name(f".{target.name}.tmp")
    tree.remove(made)
    made.mkdir()
    try:
        yield made
    except EnvironmentInvalidError:
        raise  # the error of `put` says that the output lies there
    except BaseException:
        tree.remove(made)
        raise


def finish(assignment: Assignment, made: Path, facts: Facts, *, target: Path | None = None) -> None:
    """Add model card and manifest to an output made beside its place, sync it, and rename it into place."""
    (made / "README.md").write_text(card.made(assignment, facts, manifest=MANIFEST), encoding="utf-8")
    manifest = _manifest(assignment, facts)
    (made / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _open_up(made)
    sync(made)
    fence.require_current()
    put(made, target or assignment.output_dir, owner=assignment.plan.job.owner)


def _open_up(made: Path) -> None:
    """Give every file the mode that the umask allows.

    safetensors creates files with mode 0600 whatever the umask is. Then neither the daemon nor the job's owner could
    read the output.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    for path in durable.below(made):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~umask)


def put(temporary_dir: Path, target: Path, *, owner: tuple[int, str]) -> None:
    """Rename `temporary_dir` to `target`, over an empty directory or the output of an earlier attempt of the same job.

    At every moment one of the two is there, whole, if the file system can exchange names (ext4, xfs, btrfs can).
    """
    old = target.with_name(f".{target.name}.old")
    tree.remove(old)
    if _owner(target) == owner:
        if rename.exchange(temporary_dir, target):
            durable.sync_dir(target.parent)
            tree.remove(temporary_dir)
            return
        target.rename(old)
    try:
        temporary_dir.rename(target)
    except OSError as error:
        if old.exists():
            old.rename(target)  # what an earlier attempt had made is better than nothing
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise EnvironmentInvalidError(
            f"{target} is not empty and does not belong to this job; the output is in {temporary_dir}",
            hint="move one of them away",
        ) from error
    durable.sync_dir(target.parent)
    tree.remove(old)


def sync(directory: Path) -> None:
    """Sync a directory and everything in it to disk."""
    for path in durable.below(directory):
        if path.is_dir():
            durable.sync_dir(path)
        else:
            durable.sync_file(path)
    durable.sync_dir(directory)


def _owner(target: Path) -> tuple[int, str] | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return record.read(Identity, json.loads((target / MANIFEST).read_bytes())["job"]).owner
    return None


def _manifest(assignment: Assignment, facts: Facts) -> dict[str, object]:
    plan = assignment.plan.document
    return {
        "honed": __version__,
        "job": plan["job"],
        "spec": plan["spec"],
        "plan": {key: value for key, value in plan.items() if key not in ("spec", "job")},
        "backend": assignment.backend,
        "seed": assignment.seed,
        "ended": time.time(),
        **facts,
    }
