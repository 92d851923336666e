"""Scores of predictions against the reference: numbers from 0 to 1, higher is better.

    exact_match     the same text, apart from surrounding white space
    token_f1        words in common, in any order and case: the harmonic mean of precision and recall
    rouge_l         the longest common subsequence of words, in the same mean (ROUGE-L)
    valid_json      it is JSON; a Markdown fence around it is ignored
    field_match     the fields that are the same in both, as a share of all fields of reference and answer
    box_iou         intersection over union of boxes; several are paired greedily, missing and surplus boxes count 0
    numeric_match   the same number: the one after ####, else the last in the text

An answer that cannot be parsed scores 0, and is counted: beside every score is `<name>_parsable`, the share of answers
that could be parsed. A prediction that failed is no answer, and is left out.

Other metrics are added through the entry point group `honed.metrics`: the entry point's name is the metric's, its value
a callable of prediction and ground truth that returns a number, or None for an answer that it cannot parse. Installed
metrics are looked up here, and loaded only in the worker.

Implemented here, since rouge-score depends on nltk, absl and NumPy for the twenty lines that are needed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from honed.job.comparison import answer
from honed.spec.metric_names import GROUP, known
from honed.system.error import EnvironmentInvalidError, said

#: Maps prediction and ground truth to a number from 0 to 1; None for a prediction that cannot be parsed.
Scorer = Callable[[str, str], float | None]

#: Share of questions with an answer, below which a score would reflect failures more than the model.
MIN_ANSWERED = 0.5
#: Words in the median ground truth, from which on answers are prose and ROUGE-L is meaningful.
MIN_PROSE_WORDS = 8
#: Relative difference below which numbers are equal: answers are rounded.
RELATIVE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Metric:
    name: str
    score: Scorer


@dataclass(frozen=True)
class Scores:
    """One round's scores, and the errors of administrators' metrics, one sentence per metric."""

    figures: dict[str, float]
    faults: list[str]


def score(predictions: Sequence[str | None], truths: Sequence[str], metrics: Iterable[Metric]) -> Scores:
    """Return the mean of every metric over all pairs with a truth and an answer (None is no answer); no scores if fewer
    than `MIN_ANSWERED` of the truths have one. Reasoning before an answer is left out if the truth has none."""
    asked = [(text, truth) for text, truth in zip(predictions, truths, strict=True) if truth.strip()]
    pairs = [(answer(text, truth), truth) for text, truth in asked if text is not None]
    if len(pairs) < MIN_ANSWERED * len(asked):
        return Scores({}, [])
    figures: dict[str, float] = {}
    faults: list[str] = []
    for metric in metrics if pairs else ():
        results = [_guarded(metric, text, truth, faults) for text, truth in pairs]
        parsed = [result for result in results if result is not None]
        figures[metric.name] = sum(parsed) / len(pairs)
        if metric.name != "valid_json":  # it is that share itself
            figures[f"{metric.name}_parsable"] = len(parsed) / len(pairs)
    return Scores(figures, faults)


def _guarded(metric: Metric, text: str, truth: str, faults: list[str]) -> float | None:
    if metric.name in BUILT_IN:
        return metric.score(text, truth)
    try:
        result = metric.score(text, truth)
        if result is not None and not 0 <= float(result) <= 1:
            raise ValueError(f"it returned {result}, which is not between 0 and 1")
    except Exception as error:  # noqa: BLE001 - the administrator's code must not cost the run
        if not any(fault.startswith(f"metric {metric.name}:") for fault in faults):
            faults.append(
                f"metric {metric.name}: {type(error).__name__}: {said(error)}; such answers are scored 0, as unparsable"
            )
        return None
    return None if result is None else float(result)


# --- Which metrics ----------------------------------------------------------------------------------------------------


def find(name: str) -> Metric:
    """Return a metric by its name. Raises EnvironmentInvalidError if it is unknown, or cannot be loaded."""
    if (scorer := BUILT_IN.get(name)) is not None:
        return Metric(name, scorer)
    for point in importlib.metadata.entry_points(group=GROUP, name=name):
        try:
            return Metric(name, point.load())
        except Exception as error:
            raise EnvironmentInvalidError(
                f"metric {name} ({point.value}) cannot be loaded: {type(error).__name__}: {said(error)}",
                hint=f"fix or remove the package that provides it under {GROUP}",
            ) from error
    raise EnvironmentInvalidError(f"no metric {name!r}", hint=f"known metrics: {', '.join(known())}")


def recognise(truths: Sequence[str]) -> list[str]:
    """Return the names of the metrics that fit the expected answers; empty if there are none."""
    given = [truth for truth in truths if truth.strip()]
    if not given:
        return []
    names = ["exact_match"]
    if all(isinstance(_structure(truth), dict | list) for truth in given):
        names += ["valid_json", "field_match"]
    if all(_boxes(truth) for truth in given):
        names.append("box_iou")
    if all(_is_number(truth) for truth in given):
        names.append("numeric_match")
    if len(names) > 1:
        return names
    lengths = sorted(len(_words(truth)) for truth in given)
    return [*names, "token_f1", *(["rouge_l"] if lengths[len(lengths) // 2] >= MIN_PROSE_WORDS else [])]


# --- Text -------------------------------------------------------------------------------------------------------------

#: A word; in scripts written without spaces (Thai, Chinese, Japanese) every character is one.
_WORD = re.compile(
    r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+"
)


def _words(text: str) -> list[str]:
    """Return a text's words; in a text without any, its runs of other characters."""
    return _WORD.findall(text.casefold()) or text.split()


def _exact_match(text: str, truth: str) -> float | None:
    return float(text.strip() == truth.strip()) if text.strip() else None


def _token_f1(text: str, truth: str) -> float | None:
    words, wanted = _words(text), _words(truth)
    return _harmonic(sum((Counter(words) & Counter(wanted)).values()), len(words), len(wanted)) if words else None


def _rouge_l(text: str, truth: str) -> float | None:
    words, wanted = _words(text), _words(truth)
    return _harmonic(_common_length(words, wanted), len(words), len(wanted)) if words else None


def _harmonic(num_common: int, num_words: int, num_wanted: int) -> float:
    return 2 * num_common / (num_words + num_wanted)


def _common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, a row of its table at a time: a column is a bit (Hyyrö
    2004)."""
    places: dict[str, int] = {}
    for place, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << place
    everything = (1 << len(one)) - 1
    row = everything
    for word in other:
        matched = row & places.get(word, 0)
        row = (row + matched | row - matched) & everything
    return len(one) - row.bit_count()


# --- JSON -------------------------------------------------------------------------------------------------------------

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL | re.IGNORECASE)
#: The result for text that is not JSON.
_NONE = object()


def _structure(text: str) -> Any:
    """Parse a text as JSON; `_NONE` if it is not. NaN and Infinity are rejected, although Python accepts them."""
    text = text.strip()
    if (fenced := _FENCED.fullmatch(text)) is not None:
        text = fenced[1]
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=_refuse)
    return _NONE


def _refuse(word: str) -> None:
    raise ValueError(word)


def _valid_json(text: str, _truth: str) -> float | None:
    return None if _structure(text) is _NONE else 1.0


def _field_match(text: str, truth: str) -> float | None:
    answer = _structure(text)
    if answer is _NONE:
        return None
    fields, wanted = dict(_fields(answer, "")), dict(_fields(_structure(truth), ""))
    num_same = sum(path in fields and _is_same(fields[path], value) for path, value in wanted.items())
    return num_same / len(fields.keys() | wanted.keys())


def _fields(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every leaf value with its path; an empty list or mapping is a leaf."""
    match value:
        case dict() if value:
            for key, item in value.items():
                yield from _fields(item, f"{path}/{key}")
        case list() if value:
            for place, item in enumerate(value):
                yield from _fields(item, f"{path}/{place}")
        case _:
            yield path, value


def _is_same(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


# --- Boxes ------------------------------------------------------------------------------------------------------------

Box = tuple[float, float, float, float]  #: left, top, right, bottom, in any unit

_NUMBER = r"[-+]?\d+(?:\.\d+)?"
_FOUR = re.compile(rf"[\[(]\s*({_NUMBER})\s*,\s*({_NUMBER})\s*,\s*({_NUMBER})\s*,\s*({_NUMBER})\s*[\])]")
#: `(10,20),(30,40)` as Qwen-VL writes it, with or without its tags.
_CORNERS = re.compile(rf"\(\s*({_NUMBER})\s*,\s*({_NUMBER})\s*\)\s*,\s*\(\s*({_NUMBER})\s*,\s*({_NUMBER})\s*\)")
#: PaliGemma's location tokens: top, left, bottom, right, on a scale of 1024.
_LOCATIONS = re.compile(r"<loc(\d{4})><loc(\d{4})><loc(\d{4})><loc(\d{4})>")
_CORNER_KEYS = (
    ("x_min", "y_min", "x_max", "y_max"),
    ("xmin", "ymin", "xmax", "ymax"),
    ("x1", "y1", "x2", "y2"),
    ("left", "top", "right", "bottom"),
)
_SIZE_KEYS = (("x", "y", "width", "height"), ("x", "y", "w", "h"), ("left", "top", "width", "height"))


def _box_iou(text: str, truth: str) -> float | None:
    boxes, wanted = _boxes(text), _boxes(truth)
    if not boxes:
        return None
    if not wanted:
        return 0.0
    overlaps = sorted(
        ((_overlap(box, want), n, m) for n, box in enumerate(boxes) for m, want in enumerate(wanted)), reverse=True
    )
    used: set[tuple[str, int]] = set()
    total = 0.0
    for overlap, n, m in overlaps:
        if not used & {("box", n), ("wanted", m)}:
            used |= {("box", n), ("wanted", m)}
            total += overlap
    return total / max(len(boxes), len(wanted))


def _overlap(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    common = max(width, 0.0) * max(height, 0.0)
    union = _area(one) + _area(other) - common
    return common / union if union > 0 and math.isfinite(union) else float(one == other)


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _boxes(text: str) -> list[Box]:
    """Return the boxes in a text: JSON with corners or sizes, lists of four numbers, pairs of corners, location
    tokens."""
    structure = _structure(text)
    if structure is not _NONE:
        return list(_structured_boxes(structure))
    for pattern, places in ((_LOCATIONS, (1, 0, 3, 2)), (_CORNERS, (0, 1, 2, 3)), (_FOUR, (0, 1, 2, 3))):
        boxes = [[float(number) for number in match.groups()] for match in pattern.finditer(text)]
        if boxes:
            return [_box(*(numbers[place] for place in places)) for numbers in boxes]
    return []


def _structured_boxes(value: Any) -> Iterator[Box]:
    match value:
        case dict():
            named = {str(key).lower(): item for key, item in value.items()}
            for keys in _CORNER_KEYS:
                if (corners := _numbers(named, keys)) is not None:
                    yield _box(*corners)
                    return
            for keys in _SIZE_KEYS:
                if (sizes := _numbers(named, keys)) is not None:
                    left, top, width, height = sizes
                    yield _box(left, top, left + width, top + height)
                    return
            for item in value.values():
                yield from _structured_boxes(item)
        case [a, b, c, d] if all(map(_is_figure, value)):
            yield _box(float(a), float(b), float(c), float(d))
        case list():
            for item in value:
                yield from _structured_boxes(item)


def _numbers(named: Mapping[str, Any], keys: Sequence[str]) -> tuple[float, float, float, float] | None:
    values = [named.get(key) for key in keys]
    if not all(map(_is_figure, values)):
        return None
    a, b, c, d = (float(value) for value in values if value is not None)
    return a, b, c, d


def _is_figure(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e15  # larger values are no coordinates, and NaN fails the comparison


def _box(x1: float, y1: float, x2: float, y2: float) -> Box:
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


# --- Numbers ----------------------------------------------------------------------------------------------------------

#: `1,234.50`, `1 234.50`, `.5`, `6.02e23`; a hyphen between two numbers or after a letter is not a sign.
_FIGURE = re.compile(
    r"(?:(?<![\w.)\]])[-+−])?(?:(?:\d{1,3}(?:[,\u00a0\u202f]\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
)
#: A number with at most a unit or currency beside it.
_ALONE = re.compile(rf"[^\w\s]{{0,3}}(?:{_FIGURE.pattern})\s?[^\d\s,]{{0,4}}")


def _number(text: str) -> float | None:
    """Return the number after `####`, as in GSM8K, else the last number of a text; None without one."""
    figures = _FIGURE.findall(text.rsplit("####", 1)[-1])
    if not figures:
        return None
    digits = re.sub(r"[,\u00a0\u202f]", "", figures[-1]).replace("−", "-")
    with contextlib.suppress(ValueError):
        return number if math.isfinite(number := float(digits)) else None
    return None


def _is_number(truth: str) -> bool:
    return _number(truth) is not None and _ALONE.fullmatch(truth.rsplit("####", 1)[-1].strip()) is not None


def _numeric_match(text: str, truth: str) -> float | None:
    number, wanted = _number(text), _number(truth)
    if number is None:
        return None
    return float(wanted is not None and math.isclose(number, wanted, rel_tol=RELATIVE_TOLERANCE))


BUILT_IN: Mapping[str, Scorer] = {
    "exact_match": _exact_match,
    "token_f1": _token_f1,
    "rouge_l": _rouge_l,
    "valid_json": _valid_json,
    "field_match": _field_match,
    "box_iou": _box_iou,
    "numeric_match": _numeric_match,
}
