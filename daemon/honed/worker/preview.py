"""`python -m honed.worker.preview SPEC_FILE`: the first rows of a job exactly as they will be trained on.

Only the tokenizer is loaded, and the processor where rows have images, videos or sounds. These are shown as
`[image 12×9 tokens]`: columns and rows of tokens where the model counts so, else their number. The rows are mixed,
split, rendered, tokenized and truncated as in training. With `--json`, standard output is a list of
`chat.PreviewRow`.

Rows that cannot be trained on, and facts that deserve a warning, go to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from honed.inputs import basemodel, dataset, hubdata
from honed.inputs.row import Example
from honed.plan import prefix
from honed.spec import jobfile, kind
from honed.spec.spec import DatasetSpec, JobSpec
from honed.system import quote
from honed.system.error import DatasetError, HonedError, ModelError, SpecError, plain, said
from honed.text import asking, omission
from honed.text.chat import ChatFormat, Encoded, MediaCutError, PreviewRow
from honed.text.template import where
from honed.worker.assignment import Assignment
from honed.worker.model import torchvision


@dataclass(frozen=True)
class _Asked:
    """The parts of an assignment that the tokenizer needs."""

    spec: JobSpec
    base_model_path: Path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="honed.worker.preview", description="Show rows as they will be trained on.")
    parser.add_argument("spec_file", type=Path)
    parser.add_argument("--rows", type=int, default=5, metavar="N", help="number of rows (default: 5)")
    parser.add_argument("--base-model", type=Path, metavar="DIR", help="base model to use for a spec's job:NAME")
    parser.add_argument("--json", action="store_true", help="print a list of objects, or {error}")
    options = parser.parse_args(arguments)
    try:
        job_spec = _located(jobfile.load(options.spec_file))
        rows = preview(job_spec, num_rows=options.rows, base_model_path=options.base_model)
    except HonedError as error:
        if options.json:
            sys.stdout.write(json.dumps({"error": error.as_dict()}) + "\n")
        else:
            _write(f"{error.shown}{f' ({error.hint})' if error.hint else ''}")
        return error.exit_status
    sys.stdout.write(json.dumps(rows) + "\n" if options.json else "".join(map(_page, rows)))
    return 0


def preview(job_spec: JobSpec, *, num_rows: int, base_model_path: Path | None = None) -> list[PreviewRow]:
    """Return the first rows that are trained on, in the form that `main` prints."""
    if not kind.of(job_spec).has_rows:
        raise SpecError("kind: a merge job trains on no rows")
    path = base_model_path or _resolve(job_spec)
    if not kind.of(job_spec).trains:  # its rows are those that it is evaluated on
        job_spec = job_spec.model_copy(update={"datasets": job_spec.eval_datasets})
    # With the date as if the job were accepted now.
    chat = ChatFormat.of(job_spec, _load_tokenizer(_Asked(job_spec, path)), date=datetime.now(UTC).astimezone())
    examples = _examples(job_spec, num_rows, has_chat_template=bool(chat.tokenizer.chat_template))
    model_type = job_spec.model_type or basemodel.read_model_type(path)
    for example in examples:
        prefix.check_row(model_type, where(example), len(example.trained_turns))
    if any(example.media for example in examples):
        processor = _load_processor(_Asked(job_spec, path), chat.tokenizer)
        chat.places.expand_with(processor.expand, prompt_end=processor.prompt_end)
    if any(example.kind == "messages" for example in examples):
        for _, note in chat.advice.notes(examples):
            _write(note)
    max_length = job_spec.training.cut_at
    shown: list[PreviewRow] = []
    lost, mismatches = omission.Tally(), asking.Mismatches()
    for example, encoded in _encoded(chat, examples, num_rows):
        try:
            cut = encoded.truncate(max_length)
        except MediaCutError as error:
            _write(f"{where(example)}: {error.shown}: the row is skipped")
            continue
        if not cut.num_predicted:  # as in training
            where_it_is = f"{job_spec.datasets[example.dataset_index].path}, row {example.row_index + 1}"
            _write(f"{where_it_is}: nothing to train on in its first {max_length} tokens: the row is skipped")
            continue
        lost.add(where(example), cut.omitted, example)
        mismatches.add(where(example), cut.mismatch, example)
        shown.append(
            {
                "row": example.row_index + 1,
                "dataset": str(job_spec.datasets[example.dataset_index].path),
                "num_tokens": len(cut.input_ids),
                "num_trained": cut.num_trained,
                "is_truncated": len(cut.input_ids) < len(encoded.input_ids),
                "segments": cut.segments(),
                "omitted": [item.as_dict() for item in omission.merged(cut.omitted)],
            }
        )
    if advice := chat.advice.on_omissions(lost):
        _write(advice)
    if asked := mismatches.message(len(shown), chat.advice.on_asking(mismatches)):
        _write(asked)
    if not shown:
        raise DatasetError("no row can be trained on", hint="see the reasons above")
    return shown


def _encoded(chat: ChatFormat, examples: Sequence[Example], num_rows: int) -> Iterator[tuple[Example, Encoded]]:
    """Yield the first rows that the template accepts; report those before them that it refuses."""
    num_left = num_rows
    for example in examples:
        if not num_left:
            return
        if example.kind == "messages":
            chat.renderer.require_template()
        try:
            yield example, chat.encode(example)
            num_left -= 1
        except DatasetError as error:
            origin = where(example)
            _write(f"{'' if error.shown.startswith(origin) else f'{origin}: '}{error.shown}: the row is skipped")
    if num_left == num_rows:
        raise DatasetError("no row can be trained on", hint="see the reasons above")


def _examples(job_spec: JobSpec, num_rows: int, *, has_chat_template: bool) -> list[Example]:
    """Return the examples that are trained on; of large data sets the beginning, where that is no different."""
    datasets, seed = list(job_spec.datasets), int(job_spec.training.as_kwargs().get("seed", 42))
    if job_spec.eval_split is None and all(item.fraction is None for item in datasets):
        datasets = [_beginning(item, max(100, 4 * num_rows)) for item in datasets]
    mixture = dataset.load(datasets, seed=seed, has_chat_template=has_chat_template)
    for counts in mixture.counts:
        for bad in counts.bad:
            _write(f"{counts.path}: {bad}: the row is skipped")
    if job_spec.eval_split is None:
        return mixture.examples
    return dataset.split(mixture.examples, job_spec.eval_split, seed)[0]


def _beginning(item: DatasetSpec, num_rows: int) -> DatasetSpec:
    return item.model_copy(update={"max_rows": min(item.max_rows or num_rows, num_rows)})


def _home() -> Path:
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")


def _located(job_spec: JobSpec) -> JobSpec:
    return hubdata.located(job_spec, _home(), allow_hub=False)[0]


def _resolve(job_spec: JobSpec) -> Path:
    return basemodel.resolve(job_spec.base_model, cache_dir=_home(), allow_hub=False, revision=job_spec.revision)


def _load_tokenizer(asked: _Asked) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    torchvision.mend()
    from honed.worker.model import load

    try:
        return load.load_tokenizer(cast("Assignment", asked), warn=_write)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{asked.base_model_path}: the tokenizer cannot be loaded: {said(error)}") from error


def _load_processor(asked: _Asked, tokenizer: Any) -> Any:
    from honed.worker.model import load

    return load.load_processor(cast("Assignment", asked), tokenizer)


def _page(row: PreviewRow) -> str:
    cut = ", truncated" if row["is_truncated"] else ""
    text = "".join(f"⟦{piece['text']}⟧" if piece["trained"] else piece["text"] for piece in row["segments"])
    lost = "".join(f"\n    left out by the template: {omission.line(item)}" for item in row["omitted"])
    page = f"--- row {row['row']}: {row['num_tokens']} tokens, {row['num_trained']} trained{cut}{lost}\n{text}\n\n"
    return plain(page, max_chars=len(page))


def _write(text: str) -> None:
    sys.stderr.write(f"preview: {plain(quote.show(text))}\n")  # whoever requests a preview may read the rows


if __name__ == "__main__":
    sys.exit(main())
