"""Faults of a job file one by one, and the edits that fix them, as data."""

from __future__ import annotations

from typing import Any

import pytest

from honed.job.refusals import text_of
from honed.spec import document, problem
from honed.spec.problem import InvalidSpecError, Problem, faults, mended, written
from honed.system.error import DatasetError, HonedError, from_dict

SPEC: dict[str, Any] = {
    "base_model": "/m",
    "lora_r": 8,
    "datasets": [{"path": "/a", "type": "alpaca"}, {"path": "/b"}],
    "training": {"seed": 1},
}


@pytest.mark.parametrize(
    ("fix", "expected"),
    [
        ({"lora_r": None, "lora.r": 8}, SPEC | {"lora": {"r": 8}}),
        ({"training.max_length": 512, "lora_r": None}, SPEC | {"training": {"seed": 1, "max_length": 512}}),
        ({"lora_r": None, "lora": {}, "lora.r": 8}, SPEC | {"lora": {"r": 8}}),
        ({"lora_r": None, "lora.r": 8, "lora": {}}, SPEC | {"lora": {"r": 8}}),
        ({"lora_r": None, "training": {"max_steps": 3}}, SPEC | {"training": {"seed": 1, "max_steps": 3}}),
        (
            {"lora_r": None, "datasets.0.type": None, "datasets.0.format": "alpaca"},
            SPEC | {"datasets": [{"path": "/a", "format": "alpaca"}, {"path": "/b"}]},
        ),
        ({"lora_r": None, "datasets.0": None}, SPEC | {"datasets": [{"path": "/b"}]}),
        ({"lora_r": None, "nowhere.at.all": None, "datasets.7.path": None}, SPEC),
    ],
)
def test_a_fix_sets_takes_out_and_lays_sections_over_those_that_are_there(
    fix: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = {key: value for key, value in expected.items() if key != "lora_r"}
    assert mended(SPEC, fix) == before
    assert SPEC["lora_r"] == 8


def test_an_error_carries_its_fix_from_process_to_process() -> None:
    error = DatasetError("no rows", hint="take the other", fix={"datasets.0.path": "/b", "datasets.0.split": None})
    assert from_dict(error.as_dict()).as_dict() == error.as_dict()
    assert error.as_dict()["fix"] == {"datasets.0.path": "/b", "datasets.0.split": None}
    assert "fix" not in HonedError("x").as_dict()
    assert from_dict({"code": "error", "message": "x", "fix": ["no mapping"]}).fix == {}


def test_the_faults_of_a_file_come_one_by_one_and_their_fixes_together() -> None:
    error = InvalidSpecError(
        [
            Problem("lora_r", 2, "unknown key", "write lora.r: 8", {"lora_r": None, "lora.r": 8}),
            Problem("base_model", 1, "is a file"),
            Problem("rank", 3, "unknown key", "write lora.r: 16", {"rank": None, "lora.r": 16}),
        ]
    )
    first, second, _ = faults(error)
    assert first == {
        "key": "lora_r",
        "line": 2,
        "code": "spec_invalid",
        "message": "unknown key",
        "hint": "write lora.r: 8",
        "fix": {"lora_r": None, "lora.r": 8},
    }
    assert second["fix"] is None
    assert error.fix == {"lora_r": None, "lora.r": 8, "rank": None}


@pytest.mark.parametrize(
    "message", ["datasets.0: /d/rows.jsonl: no rows", "/d/rows.jsonl: no rows", "datasets.0.path: no rows"]
)
def test_the_fault_of_what_a_file_names_has_key_and_line_of_their_own(message: str) -> None:
    parsed = document.parse(b"base_model: /m\ndatasets:\n- path: /d/rows.jsonl\n", ".yaml")
    error = DatasetError(message, hint="h", fix={"datasets.0.format": "text"})
    problem.locate(error, parsed.data, parsed.lines)
    (fault,) = faults(error)
    assert (fault["line"], fault["key"].startswith("datasets.0"), fault["fix"]) == (3, True, error.fix)
    assert fault["message"] == message.removeprefix(f"{fault['key']}: ")


def test_a_reason_tells_the_edits() -> None:
    error = problem.fault("unknown key", key="load_in_4bit", fix={"load_in_4bit": None, "quantization": "4bit"})
    assert "Change in the file:\n  load_in_4bit: removed\n  quantization: 4bit\n" in text_of(
        "a.yaml", 7, 1000, error, when="now", fate="It is kept.", is_submission=False
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("4bit", "4bit"),
        ("all-linear", "all-linear"),
        ("/srv/x.jsonl", "/srv/x.jsonl"),
        ("job:a", "job:a"),
        ("true", '"true"'),
        ("1e5", '"1e5"'),
        ("010", '"010"'),
        ("0x1f", '"0x1f"'),
        ("a: b", '"a: b"'),
        ("", '""'),
        ("2026-01-01", '"2026-01-01"'),
        ("none", "none"),
        (0.05, "0.05"),
        (2e-05, "2e-05"),
        (3.0, "3"),
        (True, "true"),
        (["q", "v"], "[q, v]"),
        ({"gpus": 0}, "{gpus: 0}"),
        (1e-7 / 3, str(1e-7 / 3)),
        ("a:", '"a:"'),
    ],
)
def test_a_value_is_written_as_a_job_file_has_it(value: Any, text: str) -> None:
    assert written(value) == text
    read = document.parse(f"a: {text}\n".encode(), ".yaml").data["a"]
    assert read == value


def test_a_number_that_no_list_reaches_is_a_text() -> None:
    digits = "9" * 5000  # int() refuses more than 4,300
    assert problem.as_path(f"a.{digits}.7") == ("a", digits, 7)
    assert problem.at({"a": [1]}, problem.as_path(f"a.{digits}")) is None
