"""Checks of a job's output directory: whether it may be written, and whether the disk has room."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from pathlib import Path

from honed.check.policy import Policy, nearest_existing
from honed.inputs.basemodel import BITS, BaseModelInfo
from honed.job import tree
from honed.job.progress import gib
from honed.plan import pace, precision
from honed.plan.plan import Plan
from honed.plan.row_needs import ROW_MEMORY_BYTES
from honed.spec import export, kind
from honed.spec.spec import JobSpec
from honed.system import untrusted
from honed.system.device import cpu
from honed.system.error import DiskShortError, MemoryShortError, SpecError
from honed.system.layout import Layout
from honed.system.personpath import PersonPath

#: Checkpoints that are kept if save_total_limit is not set.
NUM_CHECKPOINTS = 2
#: Tokenizer files that are saved with every checkpoint.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt")
#: Bytes of a rank's process with its libraries imported, without the pages that it shares with others.
PROCESS_BYTES = 300 * 2**20
#: The file in an output directory that names the job it belongs to.
MANIFEST_NAME = "honed.json"


def output_dir(job_spec: JobSpec, layout: Layout, job_id: int | None, rights: Policy) -> Path:
    if job_spec.output_dir is None:
        return layout.jobs_dir / ("<id>" if job_id is None else str(job_id)) / "output"
    # The resolved path: a rename onto a symbolic link would fail at the very end.
    path = Path(job_spec.output_dir).resolve()
    if path.is_mount():
        inner = _free(path / "output")
        raise SpecError(
            f"output_dir: {path} is a mount point",
            hint=f"use a directory in it: write output_dir: {inner}",
            fix={"output_dir": str(inner)},
        )
    if any(
        path == ours or path in ours.parents or ours in path.parents for ours in (layout.spool_dir, layout.state_dir)
    ):
        raise SpecError(
            f"output_dir: {path} belongs to honed",
            hint="remove it: each job gets its own directory there by default",
            fix={"output_dir": None},
        )
    try:
        _check_output_dir(path, layout, job_id, rights)
    except OSError as error:
        raise SpecError(f"output_dir: {path}: {error.strerror}", hint="use a directory that can be created") from error
    return path


def _free(path: Path) -> Path:
    return next(
        candidate
        for number in itertools.count(1)
        if not os.path.lexists(candidate := path if number == 1 else path.with_name(f"{path.name}-{number}"))
    )


def _check_output_dir(path: Path, layout: Layout, job_id: int | None, rights: Policy) -> None:
    existing = nearest_existing(path)
    if not existing.is_dir():
        raise SpecError(
            f"output_dir: {existing} is a file, not a directory", hint="use a directory that can be created"
        )
    rights.check_write(path)
    if existing != path:
        return
    name = next((entry.name for entry in sorted(path.iterdir())), None)
    if name is not None and not _is_own_output(path, layout, job_id):
        raise SpecError(
            f"output_dir: {path} is not empty (it contains {name}), and honed overwrites nothing",
            hint=f"use a new directory: write output_dir: {_free(path)}; or empty this one",
            fix={"output_dir": str(_free(path))},
        )


def _is_own_output(path: Path, layout: Layout, job_id: int | None) -> bool:
    """Return True if the manifest in an output directory names this very job of this very instance."""
    try:
        manifest = json.loads(untrusted.read_plain(PersonPath.own(path / MANIFEST_NAME)))
        owner = (manifest["job"]["id"], manifest["job"]["instance"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return job_id is not None and owner == (job_id, str(layout.root))


def check_apart(job_spec: JobSpec, output_dir: Path, model: BaseModelInfo | None) -> list[str]:
    """Return warnings about an output directory within the job's base model or adapter. Raises SpecError if it overlaps
    the job's data, where the next job would read it as rows."""
    if job_spec.output_dir is None:
        return []
    for key, item in job_spec.each_dataset():
        if item.is_missing:
            continue
        data = item.place.resolve()
        if output_dir == data or (data.is_dir() and data in output_dir.parents):
            raise SpecError(
                f"output_dir: {output_dir} is in {data}, which {key} reads",
                hint="use a directory outside the data, or remove output_dir",
                fix={"output_dir": None},
            )
        if output_dir in data.parents:
            raise SpecError(
                f"output_dir: it contains {data}, which {key} reads",
                hint="use a separate directory, or remove output_dir",
                fix={"output_dir": None},
            )
    named = [("base_model", model.path)] if model is not None else []
    named += [("adapter", Path(job_spec.adapter))] if job_spec.adapter and job_spec.adapter.startswith("/") else []
    return [
        f"output_dir: {output_dir} is inside {key}, {source}: copying or removing one also copies or removes the other"
        for key, path in named
        if (source := path.resolve()) in output_dir.parents
    ]


def check_room(job_spec: JobSpec, made: Plan, layout: Layout, output_dir: Path) -> None:
    """Check that the disk has room for the files that the job will write, and host memory for reading its rows. Raises
    DiskShortError or MemoryShortError."""
    _check_host_memory(made)
    written = made.memory.weights_bytes if precision.is_full(job_spec) else made.memory.adapter_bytes
    beside = sum(path.stat().st_size for name in TOKENIZER_FILES if (path := made.model.path / name).is_file())
    num_checkpoints = num_at_once(job_spec, made.rows.num_rows if made.rows is not None else None)
    checkpoints = num_checkpoints * (written + made.memory.optimizer_bytes + beside)
    output = written + beside
    if (saved := made.precision.save_dtype) is not None:
        output = written * BITS[saved] // BITS[made.precision.load_dtype] + beside
    if kind.of(job_spec).merges:
        checkpoints, output = 0, made.model.num_parameters * BITS[made.precision.load_dtype] // 8
    if not kind.of(job_spec).makes:
        checkpoints, output = 0, 0
    for item in export.asked(job_spec):
        output += made.model.num_parameters * item.bits_per_parameter // 8 + beside
    rows = made.rows.disk_bytes if made.rows is not None else 0
    needs: dict[int, list[tuple[Path, str, int]]] = {}
    for path, what, num_bytes in (
        (layout.jobs_dir, "checkpoints", checkpoints),
        (layout.jobs_dir, "encoded rows", rows),
        (output_dir, "output", output),
    ):
        existing = nearest_existing(path)
        needs.setdefault(existing.stat().st_dev, []).append((existing, what, num_bytes))
    for listed in needs.values():
        existing, total = listed[0][0], sum(num_bytes for _, _, num_bytes in listed)
        free = shutil.disk_usage(existing).free
        if total > free:
            parts = ", ".join(f"{what} {gib(num_bytes)}" for _, what, num_bytes in listed if num_bytes)
            cached = 0  # of the caches of rows, the helper may read its user's own
            if existing.stat().st_dev == nearest_existing(layout.rows_dir).stat().st_dev:
                cached = tree.measure(layout.rows_dir / str(os.geteuid())).num_bytes
            cache = f"; encoded rows of earlier jobs take {gib(cached)} (honectl prune --rows)" if cached else ""
            raise DiskShortError(
                f"{existing}: about {gib(total)} is needed ({parts}), but only {gib(free)} is free{cache}",
                hint="free disk space (honectl prune), set training.save_total_limit, set output_dir on another file "
                "system, or use fewer rows (max_rows)",
            )


def num_at_once(spec: JobSpec, num_rows: int | None) -> int:
    """Return the most checkpoints that a job has on disk at once: those kept, the best one, and the one being written.

    The newest is complete before an older one is removed, and the best one may be older still. A stop writes one
    more, which is not counted: where it finds no room, the job goes on from the one before it.
    """
    has_best = spec.training.load_best_model_at_end or spec.early_stopping_patience is not None
    most = (spec.training.save_total_limit or NUM_CHECKPOINTS) + int(has_best) + 1
    steps = pace.num_steps(spec, num_rows)
    by_strategy, by_interval = _num_by_strategy(spec, steps, has_best=has_best), _num_by_interval(spec)
    return int(min(most, by_strategy + by_interval, steps if steps is not None else math.inf))


def _num_by_strategy(spec: JobSpec, steps: int | None, *, has_best: bool) -> float:
    """Return the most checkpoints that `save_strategy` writes in a run of so many steps; infinite where unknown."""
    training = spec.training
    strategy, every = str(training.save_strategy), training.save_steps
    if has_best and not {"save_strategy", "save_steps"} & training.model_fields_set:  # with every evaluation
        strategy, every = spec.eval_strategy, training.eval_steps or 1
    if strategy == "no":
        return 0
    if strategy != "steps" or steps is None:
        epochs = math.ceil(training.num_train_epochs)
        return epochs if strategy == "epoch" and training.max_steps <= 0 else math.inf
    return math.ceil(steps / (every if every >= 1 else max(1, math.ceil(steps * every))))  # and after the last step


def _num_by_interval(spec: JobSpec) -> float:
    """Return the most checkpoints that `save_interval_sec` writes; infinite where the run's time has no limit."""
    if spec.save_interval_sec is None:
        return 0
    return math.inf if spec.time_limit_sec is None else spec.time_limit_sec // spec.save_interval_sec


def _check_host_memory(made: Plan) -> None:
    """Check that the machine has the memory in which the rows are encoded, and that several ranks need beside their
    devices. Raises MemoryShortError."""
    total, ranks = cpu().total_bytes, made.parallel.ranks_per_node
    if ranks > 1 and (needed := sum((parts := host_parts(made)).values())) > total:
        named = ", ".join(f"{what} {gib(num_bytes)}" for what, num_bytes in parts.items() if num_bytes)
        raise MemoryShortError(
            f"{ranks} processes on one machine need about {gib(needed)} of host memory ({named}), but the machine has "
            f"only {gib(total)}",
            hint="use fewer GPUs (resources.gpus) or fewer rows (max_rows)",
        )
    if made.rows is not None and made.rows.memory_bytes > total:
        raise MemoryShortError(
            f"reading and encoding about {made.rows.num_rows:,} rows needs about {gib(made.rows.memory_bytes)} of host "
            f"memory, but the machine has only {gib(total)}",
            hint="use fewer rows (max_rows), and .jsonl or .parquet in place of .json, which is read whole",
        )


def host_parts(made: Plan) -> dict[str, int]:
    """Return the host memory that the ranks of one machine need, in bytes.

    The first encodes the rows; each keeps a number for each of them. Weights go from the mapped files to the devices
    piece by piece, except under fsdp: there every rank loads the whole model first, and divides it then. 4-bit ones are
    made on the devices.
    """
    ranks, rows = made.parallel.ranks_per_node, made.rows
    kept = (ranks - 1) * ROW_MEMORY_BYTES * rows.num_rows + rows.memory_bytes if rows is not None else 0
    is_loaded_whole = made.parallel.mode == "fsdp" and made.precision.quantization == "none"
    whole = made.model.num_parameters * BITS[made.precision.load_dtype] // 8
    weights = ranks * whole if is_loaded_whole else 0
    return {"libraries": ranks * PROCESS_BYTES, "weights": weights, "rows": kept}
