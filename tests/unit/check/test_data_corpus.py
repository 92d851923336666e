"""Data sets as people have them: unusable ones are rejected or warned about, good ones pass without a warning.

For each of them, the result of `honectl check` is compared with that of a dropped job.
"""

from __future__ import annotations

import gzip
import json
import selectors
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from honed.check import preflight
from honed.check.checklist import Asked
from honed.daemon.arrivals.checker import Checker
from honed.daemon.arrivals.line import Request
from honed.run.helper import children
from honed.run.reply import Passed
from honed.spec import problem
from honed.spec.config import Config
from honed.system import quote
from honed.system.device import Device
from honed.system.error import HonedError
from honed.system.layout import Layout
from honed.system.personpath import PersonPath
from waiting import wait_for
from zoo import plain

CPU = Device("cpu", "a processor", total_bytes=24 * 2**30, free_bytes=20 * 2**30)

pytestmark = pytest.mark.timeout(120)

Make = Callable[[Path], dict[str, Any]]


def turns(*said: str) -> dict[str, Any]:
    """Return a conversation; `u:`, `a:` and `s:` give each turn's role."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return {"messages": [{"role": roles[each[0]], "content": each[2:]} for each in said]}


def asked(number: int = 8, start: int = 0) -> list[dict[str, Any]]:
    return [turns(f"u:{n}?", f"a:{n}!") for n in range(start, start + number)]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def of(rows: list[Any], **keys: Any) -> Make:
    """Return a function that makes a job on one file of rows."""
    return lambda path: named(path, "rows.jsonl", lines(rows), **keys)


def named(path: Path, name: str, content: bytes, **keys: Any) -> dict[str, Any]:
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(content)
    return {"datasets": [{"path": str(path / name)}], **keys}


def file(name: str, content: bytes, **keys: Any) -> Make:
    return lambda path: named(path, name, content, **keys)


def directory(*names: str, **keys: Any) -> Make:
    def make(path: Path) -> dict[str, Any]:
        for number, name in enumerate(names):
            named(path, f"rows/{name}", lines(asked(start=10 * number)))
        return {"datasets": [{"path": str(path / "rows")} | keys]}

    return make


def beside(trained: list[Any], held_out: list[Any]) -> Make:
    def make(path: Path) -> dict[str, Any]:
        named(path, "held.jsonl", lines(held_out))
        return named(path, "rows.jsonl", lines(trained)) | {"eval_datasets": [{"path": str(path / "held.jsonl")}]}

    return make


def same_file(path: Path) -> dict[str, Any]:
    made = named(path, "rows.jsonl", lines(asked()))
    (path / "held.jsonl").hardlink_to(path / "rows.jsonl")
    return made | {"eval_datasets": [{"path": str(path / "held.jsonl")}]}


def parquet(path: Path) -> dict[str, Any]:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(asked()), path / "rows.parquet")
    return {"datasets": [{"path": str(path / "rows.parquet")}]}


def saved(path: Path) -> dict[str, Any]:
    datasets.Dataset.from_list(asked()).save_to_disk(path / "rows", num_proc=None)
    return {"datasets": [{"path": str(path / "rows")}]}


def saved_splits(**keys: Any) -> Make:
    def make(path: Path) -> dict[str, Any]:
        made = {"train": datasets.Dataset.from_list(asked()), "test": datasets.Dataset.from_list(asked(start=50))}
        datasets.DatasetDict(made).save_to_disk(path / "rows")
        return {"datasets": [{"path": str(path / "rows")} | keys]}

    return make


PREFERENCE = [{"prompt": str(n), "chosen": f"{n}!", "rejected": "no"} for n in range(8)]
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}

#: Rejected with these words; True if the error carries an edit of the job file that makes it pass.
REFUSED: dict[str, tuple[Make, str, bool]] = {
    "train and test in one directory": (directory("train.jsonl", "test.jsonl"), "file names suggest held-out data (test.jsonl)", True),
    "shards of two splits": (directory("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"), "`split` is not set", True),
    "directories of splits": (directory("train/a.jsonl", "validation/a.jsonl"), "file names suggest held-out data", True),
    "a saved DatasetDict": (saved_splits(), "file names suggest held-out data", True),
    "a split that is not there": (directory("train.jsonl", "test.jsonl", split="gold"), "no data file of split 'gold'", False),
    "preference data": (of(PREFERENCE), "preference data (DPO) is not supported yet", True),
    "preference data of messages": (of([{"chosen": asked()[n]["messages"], "rejected": []} for n in range(4)]), "preference data (DPO) is not supported yet", True),
    "preference data under a format": (lambda path: {"datasets": [{**of(PREFERENCE)(path)["datasets"][0], "format": "alpaca"}]}, "preference data (DPO)", True),
    "questions alone": (of([{"question": "a?"}] * 4), "rows have questions but no answers", False),
    "prompts alone": (of([{"prompt": "a?"}] * 4), "rows have questions but no answers", False),
    "instructions alone": (of([{"instruction": "a?", "input": ""}] * 4), "rows have questions but no answers", False),
    "OpenAI's preferences": (of([{"input": {"messages": []}, "preferred_output": [], "non_preferred_output": []}] * 4), "preference data (DPO) is not supported yet", False),
    "other names": (of([{"question": str(n), "answer": f"{n}!"} for n in range(8)]), "no format has the columns `question`, `answer`", True),
    "conversations without answers": (of([turns("u:a", "u:b")] * 3), "rows without answers: 3 of 3 rows cannot be used as messages", False),
    "one row to be split": (of(asked(1), eval_split=0.1), "eval_split: there is one row", True),
    "one row that says the same many times": (of(asked(1) * 5, eval_split=0.1), "eval_split: all 5 rows are identical", True),
    "one row by max_rows": (lambda path: {"datasets": [{**of(asked())(path)["datasets"][0], "max_rows": 1}], "eval_split": 0.5}, "eval_split: there is one row", True),
    "a pointer of LFS": (file("rows.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 3\n"), "a Git LFS pointer", False),
    "a pointer of LFS among files": (lambda path: {**directory("a.jsonl")(path), "x": named(path, "rows/b.parquet", b"version https://git-lfs.github.com/spec/v1\n") and None}, "b.parquet: a Git LFS pointer", False),
    "a page of the web": (file("rows.jsonl", b"<!DOCTYPE html><html><body>404</body></html>"), "a web page", False),
    "an empty file": (file("rows.jsonl", b""), "it contains no rows", False),
    "a column twice": (file("rows.csv", b"prompt,completion,prompt\na,b,c\n"), "`prompt` occurs twice", False),
    "a key twice": (file("rows.jsonl", b'{"prompt": "a", "completion": "b", "completion": "c"}\n' * 3), "`completion` occurs twice", False),
    "semicolons": (file("rows.csv", b"prompt;completion\na;b\n"), "separated by semicolons", False),
    "another format in the second file": (lambda path: {**directory("a.jsonl")(path), "x": named(path, "rows/b.jsonl", b"no JSON\n") and None}, "b.jsonl: line 1", False),
    "half a packed file": (file("rows.jsonl.gz", gzip.compress(lines(asked()), mtime=0)[:-12]), "cannot be decompressed", False),
    "a format that is none of data": (file("rows.txt", b"words"), "not a supported kind of data file", False),
}  # fmt: skip

#: Warned about with these words.
WARNED: dict[str, tuple[Make, str]] = {
    "a file called test": (file("test.jsonl", lines(asked())), "its name contains `test`"),
    "held out and trained on: one file": (same_file, "the metrics measure memorization"),
    "held out and trained on: a copy": (beside(asked(), asked()), "8 of 8 rows are also trained on"),
    "held out and trained on: some": (beside(asked(), asked(4, start=6)), "2 of 4 rows are also trained on"),
    "held out and trained on: under other columns": (
        beside([{"instruction": "0?", "output": "0!"}, *([{"instruction": "9?", "output": "9!"}])], asked(2)),
        "1 of 2 rows are also trained on",
    ),
    "everything twice": (of(asked() * 2), "8 of 16 rows repeat an earlier row"),
    "roles that are swapped": (of([turns("a:2+2?", f"u:{n}") for n in range(8)]), "as if the two roles were swapped"),
    "questions at the end": (of([turns(f"u:{n}", "a:b", "u:c") for n in range(8)]), "an unanswered turn"),
    "the user twice": (of([turns(f"u:{n}", "u:b", "a:c") for n in range(8)]), "two user turns in a row"),
    "answers first": (of([turns(f"a:{n}", "u:b", "a:c") for n in range(8)]), "which answers nothing"),
    "verdicts": (of([{"prompt": str(n), "completion": "b", "label": n > 3} for n in range(8)]), "preference data (KTO)"),
    "another directory of data": (directory("a.jsonl", "more/b.jsonl"), "more/ also contains data files"),
    "a key twice in one row": (file("rows.jsonl", lines(asked()) + b'{"messages": [], "messages": []}\n'), "`messages` occurs twice"),
}  # fmt: skip

GOOD: dict[str, Make] = {
    "messages": of(asked()),
    "a system's turn": of([turns("s:Be brief.", f"u:{n}", "a:b") for n in range(8)]),
    "packed lines": file("rows.jsonl.gz", gzip.compress(lines(asked()), mtime=0)),
    "lines packed with zstd": lambda path: named(
        path, "rows.jsonl.zst", bytes(pyarrow.Codec("zstd").compress(lines(asked()), asbytes=True))
    ),
    "a packed list": file("rows.json.gz", gzip.compress(json.dumps(asked()).encode(), mtime=0)),
    "a packed table": file("rows.csv.gz", gzip.compress(b"prompt,completion\na,b\nc,d\n", mtime=0)),
    "lines called .json": file("rows.json", lines(asked())),
    "a list called .jsonl": file("rows.jsonl", json.dumps(asked()).encode()),
    "UTF-16 with its mark": file("rows.jsonl", lines(asked()).decode().encode("utf-16")),
    "a table of messages": parquet,
    "a saved Dataset": saved,
    "a split of a saved DatasetDict": saved_splits(split="train"),
    "a split of a directory": directory("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl", split="train"),
    "shards of one split": directory("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"),
    "names that are no splits": directory("latest.jsonl", "contest.jsonl", "device.jsonl"),
    "eval_split: 0": of(asked(), eval_split=0),
    "eval_split: 0 beside eval_datasets": lambda path: beside(asked(), asked(start=50))(path) | {"eval_split": 0},
    "one row": of(asked(1)),
    "answers chosen of preference data": lambda path: {
        "datasets": [{**of([{"prompt": str(n), "chosen": f"{n}!"} for n in range(8)])(path)["datasets"][0],
                      "columns": {"completion": "chosen"}}]
    },
    "text": of([{"text": str(n)} for n in range(8)]),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain.write_base_model(tmp_path_factory.mktemp("model") / "model")


def job(make: Make, path: Path, model: Path) -> Path:
    keys = {key: value for key, value in make(path).items() if value is not None}
    (path / "job.json").write_text(json.dumps({"base_model": str(model), "lora": {"r": 4}, **keys}))
    return path / "job.json"


def check(spec_path: Path) -> list[str]:
    """Return the warnings."""
    layout = Layout(spec_path.parent / "root")
    layout.jobs_dir.mkdir(parents=True, exist_ok=True)
    return preflight.check(spec_path, Asked(layout, config=Config(), device=CPU)).warnings


@pytest.mark.parametrize("name", REFUSED)
def test_a_doomed_data_set_is_refused_and_a_fix_makes_it_pass(name: str, tmp_path: Path, model: Path) -> None:
    make, words, has_fix = REFUSED[name]
    spec_path = job(make, tmp_path, model)
    with pytest.raises(HonedError) as refused:
        check(spec_path)
    assert words in refused.value.shown
    assert refused.value.hint
    assert bool(refused.value.fix) == has_fix
    if has_fix:
        data = json.loads(spec_path.read_text())
        spec_path.write_text(json.dumps(problem.mended(data, refused.value.fix)))
        check(spec_path)


@pytest.mark.parametrize("name", WARNED)
def test_a_data_set_that_may_not_be_meant_is_told_of(name: str, tmp_path: Path, model: Path) -> None:
    make, words = WARNED[name]
    assert [told for told in check(job(make, tmp_path, model)) if words in quote.show(told)]


@pytest.mark.parametrize("name", GOOD)
def test_a_good_data_set_passes_without_a_word(name: str, tmp_path: Path, model: Path) -> None:
    assert check(job(GOOD[name], tmp_path, model)) == []


def test_a_dropped_job_is_judged_as_check_judges_it(tmp_path: Path, model: Path) -> None:
    makes = [make for make, *_ in REFUSED.values()] + [make for make, _ in WARNED.values()] + [*GOOD.values()]
    layout = Layout(tmp_path / "root")
    layout.jobs_dir.mkdir(parents=True)
    paths = {}
    for number, make in enumerate(makes, start=1):
        (tmp_path / str(number)).mkdir()
        paths[number] = job(make, tmp_path / str(number), model)
    answers = dropped(layout, paths)
    assert answers.keys() == paths.keys()
    for number, path in paths.items():
        try:
            said: Any = list(map(quote.hide, check(path)))
        except HonedError as error:
            said = error.as_dict()
        assert answers[number] == said


def dropped(layout: Layout, paths: dict[int, Path]) -> dict[int, Any]:
    """Return the result of the daemon's helper for each job: its warnings, or the error."""
    selector = selectors.DefaultSelector()

    def follow(old: int | None, new: int | None) -> None:
        if old is not None:
            selector.unregister(old)
        if new is not None:
            selector.register(new, selectors.EVENT_READ)

    checker = Checker(children(layout), follow)
    try:
        for number, path in paths.items():
            checker.submit(Request(number, PersonPath.own(path), Config(), CPU))
        found: dict[int, Any] = {}

        def turn(_sec: float) -> None:
            selector.select(0.1)
            for each in checker.poll():
                found[each.id] = list(each.warnings) if isinstance(each, Passed) else each.error.as_dict()

        wait_for(lambda: len(found) == len(paths), what="all answers", account=found.keys, pause=turn)
        return found
    finally:
        checker.close()
        selector.close()
