"""The columns of `honectl list`, and what it sorts and filters by, under one name.

--sort score            by a column, the smallest first; --sort=-score: the largest first
--filter KEY=VALUE      equal, regardless of case        --filter KEY~TEXT    contains
--filter KEY>NUMBER     also <, >= and <=                --filter KEY!=VALUE  differs
--filter elapsed>1.5h   a duration: 40, 40s, 5 min, 1.5h or 2d

A filter that no job could ever meet is rejected, with the nearest value.
"""

from __future__ import annotations

import json
import operator
import pwd
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from honed.cli import terminal
from honed.job.job import MAX_PRIORITY, STOPPED_EARLY, State
from honed.job.progress import duration, figure, short
from honed.system.error import UsageError

if TYPE_CHECKING:
    from honed.job.shape import Row

Value = str | float | None

#: Characters of an outcome and its remark in a line of the list.
MAX_OUTCOME = 60
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Column:
    """A column: its header, the value that it is sorted and filtered by, and its text in the list."""

    title: str
    value: Callable[[Row], Value]
    text: Callable[[Row], str]
    is_right: bool = False  #: as numbers are
    words: Callable[[Row], tuple[str, ...]] = lambda _: ()  #: further words that name the value


def _plain(value: Callable[[Row], Value], *, limit: int | None = None) -> Callable[[Row], str]:
    return lambda row: terminal.plain(value(row), limit=limit)


def _column(title: str, value: Callable[[Row], Value], *, limit: int | None = None, is_right: bool = False) -> Column:
    return Column(title, value, _plain(value, limit=limit), is_right)


def _number(key: str, title: str) -> Column:
    def text(row: Row) -> str:
        return "" if (value := _progress(row, key)) is None else figure(value)

    return Column(title, lambda row: _progress(row, key), text, is_right=True)


def _progress(row: Row, key: str) -> float | None:
    value = dict(row["progress"]).get(key)
    return value if isinstance(value, int | float) else None


def outcome(row: Row) -> str:
    """Return a job's outcome with its remark."""
    remark = f"but {row['remark']}" if row.get("remark") else ""
    preemption = row.get("preemption")
    ended = f"preempted: {preemption['reason']}" if preemption else row["outcome"]
    return ", ".join(filter(None, [ended, remark, "pinned" if row.get("is_pinned") else ""]))


def _score(row: Row) -> float | None:
    return score["value"] if (score := row.get("score")) else None


def _data(row: Row) -> str:
    names = [short(item) for item in row.get("data") or ()]
    return names[0] + (f" +{len(names) - 1}" if names[1:] else "") if names else ""


def _elapsed(row: Row) -> str:
    seconds = row.get("elapsed_sec")
    return "" if seconds is None else duration(seconds)


def _swept(row: Row) -> str | None:
    """Return the sweep of a job, and its values; None for any other job."""
    if not (group := row.get("group")):
        return None
    values = ", ".join(f"{key.rpartition('.')[2]} {json.dumps(value)}" for key, value in group["values"].items())
    return f"{group['id']}: {values}"


def _sweep_names(row: Row) -> tuple[str, ...]:
    return (str(group["id"]), group["name"].lower()) if (group := row.get("group")) else ()


def _user_names(row: Row) -> tuple[str, ...]:
    try:
        return (pwd.getpwuid(row["uid"]).pw_name.lower(),)
    except KeyError:  # of another machine, or removed
        return ()


COLUMNS: dict[str, Column] = {
    "id": Column("id", lambda row: row["id"], lambda row: str(row["id"]), is_right=True),
    "name": _column("name", lambda row: row["name"], limit=40),
    "sweep": Column("sweep", _swept, _plain(_swept, limit=60), words=_sweep_names),
    "state": Column("state", terminal.state_words, _plain(terminal.state_words), words=lambda row: (row["state"],)),
    "outcome": Column(
        "outcome", outcome, _plain(outcome), words=lambda row: (row["outcome"],) if row["outcome"] else ()
    ),
    "priority": Column(
        "priority",
        lambda row: row["priority"],
        lambda row: "head" if row["priority"] == MAX_PRIORITY else str(row["priority"]),
        is_right=True,
    ),
    "class": _column("class", lambda row: row["class"]),
    "model": Column(
        "model", lambda row: row.get("model"), lambda row: terminal.plain(short(row.get("model")), limit=30)
    ),
    "data": Column(
        "data", lambda row: " ".join(row.get("data") or ()) or None, lambda row: terminal.plain(_data(row), limit=30)
    ),
    "step": Column(
        "step", lambda row: _progress(row, "step"), lambda row: terminal.progress_cells(row)[0], is_right=True
    ),
    "epoch": _number("epoch", "epoch"),
    "loss": _number("loss", "loss"),
    "score": Column(  # a number with its name
        "score",
        _score,
        lambda row: f"{score['name']} {figure(score['value'])}" if (score := row.get("score")) else "",
    ),
    "elapsed": Column("elapsed", lambda row: row.get("elapsed_sec"), _elapsed, is_right=True),
    "eta": Column(
        "ETA",
        lambda row: _progress(row, "eta_sec") if row["state"] == "running" else None,
        lambda row: terminal.progress_cells(row)[2],
        is_right=True,
    ),
    "submitted": Column(
        "submitted (UTC)", lambda row: row["submitted_at"], lambda row: row["submitted_at"][:16].replace("T", " ")
    ),
    "user": Column("user", lambda row: row["uid"], lambda row: str(row["uid"]), is_right=True, words=_user_names),
    "source": _column("file", lambda row: row["source"], limit=40),
    "why": Column(
        "waiting because", terminal.why_waiting, lambda row: terminal.plain(terminal.why_waiting(row), limit=60)
    ),
}
#: Columns of the list into a pipe and, where there is room, on a terminal.
USUAL = (
    "id",
    "name",
    "state",
    "outcome",
    "priority",
    "model",
    "data",
    "step",
    "loss",
    "score",
    "elapsed",
    "eta",
    "submitted",
)
#: Other tools' words for a column.
_OTHERS = {"jobid": "id", "st": "state", "status": "state", "base_model": "model", "dataset": "data",
           "datasets": "data", "eval_loss": "score", "time": "elapsed", "duration": "elapsed", "reason": "why",
           "submitted_at": "submitted", "uid": "user", "progress": "step", "file": "source",
           "group": "sweep"}  # fmt: skip
_FILTER = re.compile(r"(?P<key>[^=~<>!]+?)\s*(?P<sign>>=|<=|!=|=|~|>|<)\s*(?P<value>.*)", re.DOTALL)


def scores_first(metric: str) -> tuple[bool, bool, str]:
    """Order the names of metrics: those of the predictions, those of evaluations, then those of training."""
    return not metric.startswith("predictions/"), not metric.startswith("eval_"), metric


def named(key: str) -> Column:
    """Return a column. Raises UsageError, with the nearest one, for an unknown name."""
    word = key.strip().lower()
    if word in COLUMNS:
        return COLUMNS[word]
    near = _OTHERS.get(word) or next(iter(get_close_matches(word, COLUMNS, n=1)), None)
    meant = f"did you mean {near}? " if near else ""
    raise UsageError(f"list has no column {key!r}", hint=f"{meant}Its columns are: {', '.join(COLUMNS)}")


def several(text: str) -> list[Column]:
    """Parse the names of columns, with commas between them."""
    return [named(name) for name in text.split(",") if name.strip()]


def ordered(rows: Iterable[Row], key: str) -> list[Row]:
    """Sort jobs by a column, the smallest first, or with a minus before its name the largest; jobs without a value come
    last."""
    column, is_falling = named(key.removeprefix("-")), key.startswith("-")
    there: list[tuple[Value, Row]] = []
    empty: list[Row] = []
    for row in rows:
        value = column.value(row)
        there.append((value, row)) if value not in (None, "") else empty.append(row)
    there.sort(key=lambda item: item[0].lower() if isinstance(item[0], str) else item[0], reverse=is_falling)  # type: ignore[arg-type,return-value]
    return [*(row for _, row in there), *empty]


#: The columns with few values, and functions that return all of them.
Known = Mapping[str, Callable[[], Iterable[str]]]
STATES = (*(state.value for state in State), "staged")
#: Columns of seconds, and the units in which they are written.
_DURATIONS = ("elapsed", "eta")
_UNITS = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")


def test(filters: Sequence[str], known: Known) -> Callable[[Row], bool]:
    """Return the test of a job by every filter. Raises UsageError for a filter that cannot be read, or that no job
    could meet: `known` has the values of columns besides the states."""
    tests = [_test(text, {"state": lambda: STATES, "outcome": _outcomes, **known}) for text in filters]
    return lambda row: all(item(row) for item in tests)


def _outcomes() -> list[str]:
    from honed.system import message  # noqa: PLC0415 - a list without filters does without it

    return [State.SUCCEEDED.value, State.CANCELLED.value, STOPPED_EARLY, *message.BY_ERROR]


def _test(text: str, known: Known) -> Callable[[Row], bool]:
    match = _FILTER.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--filter {text!r} is not a comparison",
            hint="write KEY=VALUE, KEY~TEXT or KEY>NUMBER: --filter 'loss<1.5'",
        )
    column, sign, value = named(match["key"]), match["sign"], match["value"].strip().lower()
    name = next(name for name, item in COLUMNS.items() if item is column)
    if sign in ("=", "!=") and value.startswith("="):
        hint = f"write one =: --filter '{match['key']}{sign}{value.lstrip('=').strip()}'"
        raise UsageError(f"--filter {text!r}: no {name} begins with =", hint=hint)
    is_number = column.is_right or name == "score"
    if sign in _OPERATORS and not is_number:
        hint = f"use = or ~: --filter '{name}~{match['value']}'"
        raise UsageError(f"--filter {text!r}: {name} is no number", hint=hint)
    if is_number and sign != "~":
        value = _as_number(name, value)
        try:
            bound = float(value)
        except ValueError:
            hint = f"use ~ for text: --filter '{match['key']}~{match['value']}'"
            if name in _DURATIONS:
                hint = f"write a number of seconds, or with a unit: --filter '{name}{sign}90 min', 1.5h or 2d"
            raise UsageError(f"--filter {text!r} compares with something that is not a number", hint=hint) from None
        if sign in _OPERATORS:
            return lambda row: isinstance(has := column.value(row), int | float) and _OPERATORS[sign](has, bound)
        if name in _DURATIONS:  # equal as far as the column shows
            return lambda row: _is_about(column.value(row), bound) is (sign == "=")
    is_any_text = name in ("sweep", "outcome") and (sign == "~" or " " in value)  # values of a sweep, or a remark
    if name in known and value and not is_any_text:
        _check_known(text, name, value, [item.lower() for item in known[name]()], is_part=sign == "~")
    if sign == "~":
        return lambda row: any(value in word for word in (*_words(column, row), *column.words(row)))
    return lambda row: _is(column, row, value) is (sign == "=")


def _as_number(name: str, value: str) -> str:
    """Return the number that a word stands for: a user's name, the head of the queue, or the seconds of a duration."""
    if name in _DURATIONS and (parts := _DURATION.fullmatch(value)) and parts[2] in _UNITS:
        return str(float(parts[1]) * _UNITS[parts[2]])
    if name == "priority" and value == "head":
        return str(MAX_PRIORITY)
    if name == "user" and not value.isdecimal():
        try:
            return str(pwd.getpwnam(value).pw_uid)
        except KeyError:
            near = get_close_matches(value, [item.pw_name for item in pwd.getpwall()], n=1)
            hint = f"did you mean {near[0]}?" if near else "give a user's name or number"
            raise UsageError(f"there is no user {value!r} on this machine", hint=hint) from None
    return value


def _check_known(text: str, name: str, value: str, known: Sequence[str], *, is_part: bool) -> None:
    """Raise UsageError for a value that no job has, with the nearest one."""
    if value in known or (is_part and any(value in item for item in known)):
        return
    near = _NEAR[name].get(value) if name in _NEAR else None
    near = near or next(iter(get_close_matches(value, known, n=1, cutoff=0.5)), None)
    meant = f"did you mean {name}={near}? " if near else ""
    there = f"There are: {', '.join(dict.fromkeys(known))}" if known else "There is none"
    raise UsageError(f"--filter {text!r}: no {name} {value!r}", hint=f"{meant}{there}")


#: Other tools' words for a value.
_NEAR = {
    "state": {
        **dict.fromkeys(("pending", "waiting", "pd", "ready"), "queued"),
        **dict.fromkeys(("done", "completed", "complete", "cd", "success", "finished", "ok"), "succeeded"),
        **dict.fromkeys(("error", "f", "crashed"), "failed"),
        **dict.fromkeys(("canceled", "ca", "stopped", "killed"), "cancelled"),
        **dict.fromkeys(("r", "active", "training"), "running"),
        **dict.fromkeys(("suspended", "paused"), "held"),
    }
}


def _is(column: Column, row: Row, value: str) -> bool:
    has = column.value(row)
    if isinstance(has, int | float):
        try:
            return float(value) == has
        except ValueError:
            return False
    return value in (*_words(column, row), *column.words(row))


def _is_about(has: Value, seconds: float) -> bool:
    return isinstance(has, int | float) and (has == seconds or duration(has) == duration(seconds))


def _words(column: Column, row: Row) -> tuple[str, str]:
    value = column.value(row)
    return "" if value is None else str(value).lower(), column.text(row).lower()
