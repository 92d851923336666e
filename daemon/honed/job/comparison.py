"""Comparison of a prediction with the reference: which words match, which are wrong, and which are missing; and of jobs
with each other: specs, plans, losses, and answers to the same examples."""

from __future__ import annotations

import csv
import difflib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import Any, TextIO

from honed.job.shape import Prediction, Shown

#: The columns of `--jsonl` and `--csv`, in this order.
COLUMNS = ("epoch", "step", "sample_index", "prompt", "ground_truth", "prediction")
#: Words, spaces between them, and each other character by itself: a bracket too many is one difference.
_PIECES = re.compile(r"\s+|\w+|[^\w\s]")
#: Above this number of pieces, texts are compared as a whole: the comparison is quadratic.
MAX_PIECES = 2000
#: First characters that make a spreadsheet treat a cell as a formula: the signs, also in full width, and the whitespace
#: that it skips before them.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t", "\r", "\n")
#: Keys of a plan that are about this job alone, or are reasons in words.
_OF_ONE_JOB = {"job", "output_dir", "date", "spec", "may_read", "warnings"}
#: Facts of a plan that are no setting: which of several devices it was, and what others left of its memory.
_OF_THE_MOMENT = {"device.free_bytes", "device.index", "device.uuid", "memory.available_bytes"}
_NUMBER = re.compile(r"[+-]?[\d.,]+(e[+-]?\d+)?%?", re.IGNORECASE | re.ASCII)

Flat = dict[str, Any]


class Kind(StrEnum):
    SAME = "same"
    WRONG = "wrong"  #: predicted, but not in the reference
    MISSING = "missing"  #: in the reference, but not predicted


@dataclass(frozen=True)
class Piece:
    """A stretch of text of one kind."""

    kind: Kind
    text: str


def compare(truth: str, written: str) -> list[Piece]:
    """Return both texts interleaved: SAME + MISSING pieces form the reference, SAME + WRONG pieces the prediction."""
    theirs, ours = _PIECES.findall(truth), _PIECES.findall(written)
    if len(theirs) > MAX_PIECES or len(ours) > MAX_PIECES:
        whole = [(Kind.MISSING, truth), (Kind.WRONG, written)] if truth != written else [(Kind.SAME, truth)]
        return [Piece(kind, text) for kind, text in whole if text]
    pieces: list[Piece] = []
    for code, a, b, c, d in difflib.SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes():
        if code == "equal":
            pieces.append(Piece(Kind.SAME, "".join(theirs[a:b])))
            continue
        gone, new = "".join(theirs[a:b]), "".join(ours[c:d])
        pieces += [Piece(kind, text) for kind, text in ((Kind.MISSING, gone), (Kind.WRONG, new)) if text]
    return pieces


def chosen(rows: Iterable[Prediction], *, sample: int | None = None, step: int | None = None) -> list[Prediction]:
    """Return the rows of one example, of one step, or both. Step -1 is the last step."""
    there = [row for row in rows if sample is None or row["sample_index"] == sample]
    if step is not None:
        at = max((row["step"] for row in there), default=0) if step == -1 else step
        there = [row for row in there if row["step"] == at]
    return there


def is_right(row: Mapping[str, Any]) -> bool:
    """Return True if the prediction equals the reference, ignoring reasoning and surrounding whitespace."""
    truth = (row.get("ground_truth") or "").strip()
    return answer(row.get("prediction") or "", truth) == truth


def answer(written: str, truth: str) -> str:
    """Return a prediction without its leading reasoning if the reference has none.

    Chat templates such as Qwen3's put empty `<think>` tags before every trained answer but not into the prompt of a
    prediction: the model has learned to write them itself.
    """
    written = written.strip()
    if written.startswith("<think>") and "</think>" not in truth:
        return written.partition("</think>")[2].strip()
    return written


def write_jsonl(rows: Iterable[Mapping[str, object]], file: TextIO) -> None:
    for row in rows:
        file.write(json.dumps({name: row[name] for name in COLUMNS}, ensure_ascii=False) + "\n")


def write_csv(rows: Iterable[Mapping[str, object]], file: TextIO) -> None:
    """Write RFC 4180 CSV with a header line. A text that a spreadsheet would run as a formula is prefixed with a quote
    ('); numbers are not. Every text is quoted: a spreadsheet that also splits cells at ; and tab would otherwise find
    formulas there.
    """
    writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_cell(row[name]) for name in COLUMNS])


def _cell(value: Any) -> Any:
    is_formula = isinstance(value, str) and value.startswith(_FORMULA) and not _NUMBER.fullmatch(value)
    return f"'{value}" if is_formula else value


def by_sample(rows: Iterable[Prediction]) -> Iterator[tuple[int, list[Prediction]]]:
    """Yield the rows of every example, ordered by step."""
    ranked = sorted(rows, key=lambda row: (row["sample_index"], row["step"]))
    for index, mine in itertools.groupby(ranked, key=itemgetter("sample_index")):
        yield index, list(mine)


# -- several jobs ------------------------------------------------------------------------------------------------------


def spec_of(job: Shown) -> Flat:
    return flat({key: value for key, value in job["spec"].items() if key not in ("name", "group")})


def plan_of(job: Shown) -> Flat:
    """Return a job's plan without reasons, and without what was so on the machine just then."""
    plan = flat({key: value for key, value in job["plan"].items() if key not in _OF_ONE_JOB})
    return {key: value for key, value in plan.items() if ".reasons" not in f".{key}" and key not in _OF_THE_MOMENT}


def scores_of(job: Shown) -> dict[str, float]:
    """Return a job's metrics without those that say how fast the machine was."""
    return {
        name: value
        for name, value in job["metrics"].items()
        if not name.endswith(("_runtime", "_per_second", "_preparation_time"))
    }


def flat(value: Any, above: str = "") -> Flat:
    """Return a mapping's values by their dotted keys; empty sections are left out."""
    match value:
        case dict():
            pairs = [(str(key), item) for key, item in value.items()]
        case list() if any(isinstance(item, dict) for item in value):
            pairs = [(str(number), item) for number, item in enumerate(value)]
        case _:
            return {above: value} if above else {}
    leaves: Flat = {}
    for key, pair in pairs:
        leaves |= flat(pair, f"{above}.{key}" if above else key)
    return leaves


def differences(facts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of those keys in which they differ; None where one lacks the key."""
    keys = dict.fromkeys(key for fact in facts for key in fact)
    values = {key: [fact.get(key) for fact in facts] for key in keys}
    return {key: item for key, item in values.items() if any(value != item[0] for value in item[1:])}


def course_of(pairs: Sequence[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """Return the losses by step; of a step that was repeated after a resume, the last."""
    return sorted({step: value for step, value in pairs if value is not None and math.isfinite(value)}.items())


def shared_answers(predictions: Sequence[Sequence[Prediction]]) -> list[dict[str, Any]]:
    """Return the last answers to those examples that at least two jobs have predicted."""
    shared: dict[tuple[str, str], list[str | None]] = {}
    for number, rows in enumerate(predictions):
        seen: set[tuple[str, str]] = set()
        for row in chosen(rows, step=-1):
            key = (row["prompt"] or "", row["ground_truth"] or "")
            if key not in seen:
                seen.add(key)
                shared.setdefault(key, [None] * len(predictions))[number] = row["prediction"]
    return [
        {"prompt": prompt, "ground_truth": truth, "predictions": given}
        for (prompt, truth), given in shared.items()
        if sum(item is not None for item in given) > 1
    ]
