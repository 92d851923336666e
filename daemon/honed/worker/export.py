"""The output, made whole beside its place and renamed into it: adapter or model, tokenizer, model card, manifest.

.<name>.tmp  ──►  <output_dir>/  adapter_model.safetensors | model.safetensors …, tokenizer, README.md, honed.json
                                 merged/  a whole checkpoint in one dtype, where save_merged asks for it
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from honed import __version__, dataset, durable
from honed.error import EnvironmentInvalidError
from honed.worker.assignment import Assignment
from honed.worker.load import load_config
from honed.worker.transformers_backend import load_base

MANIFEST = "honed.json"


def export(assignment: Assignment, model: Any, tokenizer: Any, facts: dict[str, Any]) -> dict[str, str]:
    """Write everything, sync it, and put it in its place. Returns the artifacts: name to path.

    Before the rename there is nothing at `output_dir`; after it, all. An earlier attempt's output is replaced.
    """
    target = assignment.output_dir
    durable.make_dir(target.parent)
    beside = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    artifacts = {"output_dir": str(target)}
    if assignment.spec.save_merged != "none":
        _merge(assignment, model, beside).save_pretrained(beside / "merged")
        tokenizer.save_pretrained(beside / "merged")
        artifacts["merged"] = str(target / "merged")
    (beside / "README.md").write_text(_card(assignment, facts), encoding="utf-8")
    manifest = _manifest(assignment, facts)
    (beside / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sync(beside)
    place(beside, target, job_id=assignment.job_id)
    return artifacts


def place(beside: Path, target: Path, *, job_id: int) -> None:
    """Rename `beside` to `target`, over an empty directory or what an earlier attempt of the same job put there."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if _owner(target) == job_id:
        target.rename(old)
    try:
        beside.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise EnvironmentInvalidError(
            f"{target} is not empty and not this job's; the output lies in {beside}", hint="move one of them away"
        ) from error
    durable.sync_dir(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(directory: Path) -> None:
    """Make a directory and all that is in it durable."""
    for path in directory.rglob("*"):
        if path.is_dir():
            durable.sync_dir(path)
        else:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    durable.sync_dir(directory)


def _owner(target: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((target / MANIFEST).read_bytes())["job"]["id"])
    return None


def _merge(assignment: Assignment, model: Any, adapter_dir: Path) -> Any:
    """The base model with the adapter in it, every parameter in the asked dtype.

    An adapter trained on a quantized base goes into the unquantized one, loaded for it; else the model in hand is
    used up.
    """
    import torch

    dtype = assignment.spec.save_merged
    if assignment.precision.quantization != "none":
        import peft

        base = load_base(assignment, load_config(assignment), dtype="float32")
        model = peft.PeftModel.from_pretrained(base, adapter_dir)
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    return model.to(getattr(torch, dtype))


def _manifest(assignment: Assignment, facts: dict[str, Any]) -> dict[str, Any]:
    spec = assignment.spec
    return {
        "honed": __version__,
        "job": assignment.plan["job"],
        "spec": assignment.plan["spec"],
        "plan": {key: value for key, value in assignment.plan.items() if key not in ("spec", "job")},
        "backend": assignment.backend,
        "seed": assignment.seed,
        "data": {str(file): _sha256(file) for data in [*spec.datasets, *spec.eval_datasets] for file in _files(data)},
        "ended": time.time(),
        **facts,
    }


def _files(data: Any) -> list[Path]:
    return dataset.files(Path(data.path), split=data.split)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _card(assignment: Assignment, facts: dict[str, Any]) -> str:
    spec, metrics = assignment.spec, facts["metrics"]
    kind = "LoRA adapter" if spec.lora or spec.adapter else "fully fine-tuned model"
    library = "peft" if spec.lora or spec.adapter else "transformers"
    figures = [f"- {name}: {value:.4g}" for name, value in sorted(metrics.items()) if isinstance(value, int | float)]
    data = [f"- {item.path}" for item in spec.datasets]
    return "\n".join([
        "---", f"base_model: {json.dumps(spec.base_model)}", f"library_name: {library}",
        "pipeline_tag: text-generation", "---", "",
        f"# {assignment.name}", "",
        f"A {kind} of {spec.base_model}, trained by honed {__version__} (job {assignment.job_id}).", "",
        "Trained on:", "", *data, "",
        "Figures at the end:", "", *figures, "",
        f"Everything else (spec, plan, versions, hashes of the data, seed) is in {MANIFEST}.", "",
    ])  # fmt: skip
