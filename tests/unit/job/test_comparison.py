"""Predictions compared with the reference."""

from __future__ import annotations

import csv
import io
import json
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from honed.job import comparison
from honed.job.comparison import Kind, compare

TEXT = st.text(st.sampled_from('ab 1{}",:\n\u202e\0é'), max_size=40)


def marked(truth: str, written: str) -> str:
    marks = {Kind.SAME: "{}", Kind.WRONG: "{{+{}+}}", Kind.MISSING: "[-{}-]"}
    return "".join(marks[piece.kind].format(piece.text) for piece in compare(truth, written))


def test_words_that_differ_are_marked_and_the_rest_is_not() -> None:
    assert marked("The capital is Rome.", "The capital is Oslo.") == "The capital is [-Rome-]{+Oslo+}."
    assert marked("Rome", "Rome") == "Rome"
    assert marked("Rome", "") == "[-Rome-]"
    assert marked('{"x": 10}', '{"x": 12}') == '{"x": [-10-]{+12+}}'
    assert marked("a b", "a b c") == "a b{+ c+}"


@given(truth=TEXT, written=TEXT)
def test_the_pieces_are_both_texts_whole(truth: str, written: str) -> None:
    pieces = compare(truth, written)
    assert "".join(piece.text for piece in pieces if piece.kind is not Kind.WRONG) == truth
    assert "".join(piece.text for piece in pieces if piece.kind is not Kind.MISSING) == written


def test_a_text_of_any_length_is_compared_at_once() -> None:
    started = time.process_time()
    assert [piece.kind for piece in compare("a " * 25_000, "b " * 25_000)] == [Kind.MISSING, Kind.WRONG]
    assert time.process_time() - started < 60  # 0.1 here; a hang, not a slow machine


def test_reasoning_before_an_answer_is_not_the_answer() -> None:
    right = [("Rome", " Rome\n"), ("Rome", "<think>\n\n</think>\n\nRome"), ("<think>a</think>b", "<think>a</think>b")]
    wrong = [("Rome", "Oslo"), ("Rome", "<think>Rome"), ("Rome", None), ("<think>a</think>b", "b")]
    for truth, written in right + wrong:
        assert comparison.is_right({"ground_truth": truth, "prediction": written}) is ((truth, written) in right)


def row(step: int, sample: int, prediction: str) -> dict[str, object]:
    return {
        "epoch": 1.0,
        "step": step,
        "sample_index": sample,
        "prompt": "p",
        "ground_truth": 't\n"é',
        "prediction": prediction,
    }


ROWS = [row(0, 0, "x"), row(0, 1, "y"), row(9, 0, "=cmd()"), row(9, 1, "-5.2e3")]


def test_one_example_one_step_or_the_last() -> None:
    assert [item["prediction"] for item in comparison.chosen(ROWS, sample=1)] == ["y", "-5.2e3"]
    assert [item["prediction"] for item in comparison.chosen(ROWS, step=-1)] == ["=cmd()", "-5.2e3"]
    assert comparison.chosen(ROWS, step=3) == []
    assert [(index, len(mine)) for index, mine in comparison.by_sample(ROWS)] == [(0, 2), (1, 2)]


class Counted(dict[str, Any]):
    """A row that counts how often a value of any was asked for."""

    num = 0

    def __getitem__(self, key: str) -> Any:
        Counted.num += 1
        return super().__getitem__(key)


def test_the_rows_of_many_examples_are_told_apart_without_reading_each_for_each() -> None:
    rows: list[Any] = [Counted(row(step, sample, "x")) for step in (9, 0) for sample in range(500)]
    Counted.num = 0
    found = [(index, [dict(each)["step"] for each in mine]) for index, mine in comparison.by_sample(rows)]
    assert found == [(index, [0, 9]) for index in range(500)]
    assert Counted.num <= 4 * len(rows)


def test_jsonl_and_csv_carry_every_row_whole_and_no_formula() -> None:
    lines, table = io.StringIO(), io.StringIO(newline="")
    comparison.write_jsonl(ROWS, lines)
    comparison.write_csv(ROWS, table)
    assert [json.loads(line) for line in lines.getvalue().splitlines()] == ROWS
    read = list(csv.DictReader(io.StringIO(table.getvalue(), newline="")))
    assert [item["ground_truth"] for item in read] == ['t\n"é'] * 4
    assert [item["prediction"] for item in read] == ["x", "y", "'=cmd()", "-5.2e3"]
