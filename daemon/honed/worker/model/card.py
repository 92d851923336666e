"""The model card of an output, README.md: Markdown, with names and paths that other people chose."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NotRequired, TypedDict

from honed import __version__
from honed.spec import kind as kinds
from honed.system.error import plain
from honed.worker.assignment import Assignment


class Facts(TypedDict):
    """The facts of a run, for the card and the manifest of its output."""

    started: float
    versions: dict[str, str]
    step: int
    metrics: dict[str, float]
    data: NotRequired[dict[str, str]]  #: sha256 of every file; not of a merge
    changes: NotRequired[list[str]]  #: what else differs from the base's files, and what to know about serving


def made(assignment: Assignment, facts: Facts, *, manifest: str) -> str:
    """Return the model card of an output; `manifest` names the file beside it that has the rest."""
    spec, metrics = assignment.spec, facts["metrics"]
    if kinds.of(spec).merges:
        return _merged(assignment, facts, manifest)
    kind = "LoRA adapter" if spec.lora or spec.adapter else "fully fine-tuned model"
    library = "peft" if spec.lora or spec.adapter else "transformers"
    figures = [
        f"- {_text(name)}: {value:.4g}" for name, value in sorted(metrics.items()) if isinstance(value, int | float)
    ]
    commits = assignment.plan.hub_datasets
    data = [
        f"- {_code(item.path)}" + (f" at {commit.commit}" if (commit := commits.get(f"datasets.{number}")) else "")
        for number, item in enumerate(spec.datasets)
    ]
    return "\n".join(
        [
            "---",
            f"base_model: {_yaml(spec.base_model)}",
            f"library_name: {library}",
            f"pipeline_tag: {_task(assignment.base_model_path)}",
            "---",
            "",
            f"# {_text(assignment.name)}",
            "",
            f"A {kind} of {_code(spec.base_model)}, trained by honed {__version__} (job {assignment.job_id}).",
            "",
            "Trained on:",
            "",
            *data,
            "",
            "Final metrics:",
            "",
            *figures,
            "",
            *_changes(facts),
            f"The spec, plan, versions, hashes of the data and seed are in {manifest}.",
            "",
        ]
    )


def _changes(facts: Facts) -> list[str]:
    """Return the section on what differs from the base's files apart from what was trained, if anything does."""
    changes = facts.get("changes", ())
    return ["Notes on the files:", "", *(f"- {_text(change)}" for change in changes), ""] if changes else []


def _yaml(text: str) -> str:
    """Return a string of YAML, which cannot write a character as a pair of surrogates, as JSON does."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _text(given: object) -> str:
    """Escape text for Markdown, so that it makes no link, and no image that a reader's browser would load."""
    return re.sub(r"([\\`*\[\]<>!])", r"\\\1", _line(given))


def _code(given: object) -> str:
    text = _line(given)
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text[:1] in ("`", " ") or text[-1:] in ("`", " ") else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def _line(given: object) -> str:
    return plain(str(given)).replace("\n", "\ufffd")


def _task(base: Path) -> str:
    """Return the Hub's name for the model's task, from the inputs that its processor takes."""
    files = [path.read_text(encoding="utf-8", errors="replace") for path in base.glob("*processor_config.json")]
    sees, hears = (any(word in text for text in files) for word in ("image_processor_type", "feature_extractor_type"))
    match sees, hears:
        case True, True:
            return "any-to-any"
        case True, False:
            return "image-text-to-text"
        case False, True:
            return "audio-text-to-text"
        case _:
            return "text-generation"


def _merged(assignment: Assignment, facts: Facts, manifest: str) -> str:
    spec = assignment.spec
    return "\n".join(
        [
            "---",
            f"base_model: {_yaml(spec.base_model)}",
            "library_name: transformers",
            f"pipeline_tag: {_task(assignment.base_model_path)}",
            "---",
            "",
            f"# {_text(assignment.name)}",
            "",
            f"{_code(assignment.base_model_path)} with the adapter {_code(spec.adapter)} merged into it, every "
            f"parameter in {assignment.precision.load_dtype}, by honed {__version__} (job {assignment.job_id}).",
            "",
            *_changes(facts),
            f"The spec, plan and versions are in {manifest}.",
            "",
        ]
    )
