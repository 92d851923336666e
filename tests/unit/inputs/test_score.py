"""Metrics on predictions: their values, and the part of a text that counts as the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.inputs import score
from honed.spec import metric_names
from honed.system.error import EnvironmentInvalidError, SpecError
from told import refused


def value(name: str, text: str, truth: str) -> float | None:
    return score.find(name).score(text, truth)


@pytest.mark.parametrize(
    ("name", "text", "truth", "expected"),
    [
        ("exact_match", " Paris.\n", "Paris.", 1),
        ("exact_match", "paris.", "Paris.", 0),
        ("exact_match", "  ", "Paris.", None),
        ("token_f1", "the capital is Paris", "Paris is the capital!", 1),
        ("token_f1", "Paris Paris", "Paris", 2 / 3),
        ("token_f1", "東京です", "東京", 2 / 3),
        ("token_f1", "?!", "!", 0),
        ("token_f1", "", "Paris", None),
        ("rouge_l", "police killed the gunman", "police kill the gunman", 0.75),
        ("rouge_l", "the gunman police killed", "police killed the gunman", 0.5),
        ("valid_json", '```json\n{"a": 1}\n```', "{}", 1),
        ("valid_json", '{"a": 1', "{}", None),
        ("valid_json", '{"a": NaN}', "{}", None),
        ("valid_json", "[" * 100_000, "{}", None),
        ("valid_json", "9" * 10_000, "{}", None),
        ("field_match", '{"a": 1.0, "b": {"c": "x"}}', '{"b": {"c": "x"}, "a": 1}', 1),
        ("field_match", '{"a": 1, "b": 2, "d": 3}', '{"a": 1, "b": 3}', 1 / 3),
        ("field_match", '{"a": true}', '{"a": 1}', 0),
        ("field_match", '{"a": []}', '{"a": []}', 1),
        ("field_match", "the answer is 1", '{"a": 1}', None),
        ("box_iou", '{"x_min": 0, "y_min": 0, "x_max": 2, "y_max": 1}', "[1, 0, 3, 1]", 1 / 3),
        ("box_iou", '{"x": 1, "y": 1, "width": 2, "height": 2}', "[1, 1, 3, 3]", 1),
        ("box_iou", "[3, 3, 1, 1]", "[1, 1, 3, 3]", 1),
        ("box_iou", "It is at (0, 0, 1, 1).", "[0, 0, 2, 1]", 0.5),
        ("box_iou", "<|box_start|>(0,0),(2,1)<|box_end|>", "(0,0),(1,1)", 0.5),
        ("box_iou", "<loc0000><loc0010><loc0100><loc0020> cat", "<loc0000><loc0010><loc0100><loc0020> cat", 1),
        ("box_iou", '[{"bbox_2d": [0, 0, 1, 1], "label": "a"}]', '[{"box": [0, 0, 1, 1]}, {"box": [5, 5, 6, 6]}]', 0.5),
        ("box_iou", "[0, 0, 1, 1] and [0, 0, 1, 1]", "[0, 0, 1, 1]", 0.5),
        ("box_iou", "[0, 0, 1e400, 1]", "[0, 0, 1, 1]", None),
        ("box_iou", "somewhere on the left", "[0, 0, 1, 1]", None),
        ("numeric_match", "3 + 4 = 7, so it is 7.0 €", "7", 1),
        ("numeric_match", "1,234.50", "$1234.5", 1),
        ("numeric_match", "so we get\n#### −72", "a - b\n#### -72", 1),
        ("numeric_match", "between 3-5", "-5", 0),
        ("numeric_match", "many", "5", None),
    ],
)
def test_a_metric_says_how_near_an_answer_is(name: str, text: str, truth: str, expected: float | None) -> None:
    assert value(name, text, truth) == (expected if expected is None else pytest.approx(expected))


def test_an_answer_that_cannot_be_parsed_counts_nothing_and_stands_beside() -> None:
    """A model that stops answering must not look better for it."""
    truths = ["[0, 0, 1, 1]"] * 4
    silent = score.score(["[0, 0, 1, 1]", "", "I cannot tell.", "?"], truths, [score.find("box_iou")])
    assert silent.figures == {"box_iou": 0.25, "box_iou_parsable": 0.25}
    poor = score.score(["[0, 0, 2, 1]"] * 4, truths, [score.find("box_iou")])
    assert poor.figures == {"box_iou": 0.5, "box_iou_parsable": 1}


def test_a_prediction_that_failed_is_no_answer_and_where_fewer_than_half_came_nothing_is_said() -> None:
    exact, truths = [score.find("exact_match")], ["a", "b", "c", "d", ""]
    half = score.score(["a", None, "x", None, None], truths, exact)
    assert half.figures == {"exact_match": 0.5, "exact_match_parsable": 1}
    assert score.score(["a", None, None, None, "e"], truths, exact).figures == {}


def test_a_prompt_without_a_truth_is_not_scored() -> None:
    assert score.score(["a"], [""], [score.find("exact_match")]).figures == {}
    assert score.score(["a", "b"], ["", "b"], [score.find("exact_match")]).figures["exact_match"] == 1
    assert score.recognise(["", " "]) == []


@pytest.mark.parametrize(
    ("truths", "expected"),
    [
        (["Paris.", "Berlin."], ["exact_match", "token_f1"]),
        (["A long sentence that goes on and on, about nothing."] * 2, ["exact_match", "token_f1", "rouge_l"]),
        (["42", "1,000 km"], ["exact_match", "numeric_match"]),
        (["2 + 2 = 4\n#### 4"], ["exact_match", "numeric_match"]),
        (["42", "Paris"], ["exact_match", "token_f1"]),
        (['{"a": 1}', "[]"], ["exact_match", "valid_json", "field_match"]),
        (['{"bbox_2d": [1, 2, 3, 4]}'], ["exact_match", "valid_json", "field_match", "box_iou"]),
        (["cat <box>(1,2),(3,4)</box>"], ["exact_match", "box_iou"]),
    ],
)
def test_metrics_are_recognised_by_what_the_answers_should_be(truths: list[str], expected: list[str]) -> None:
    assert score.recognise(truths) == expected


@given(st.text(), st.text(min_size=1))
def test_every_metric_takes_every_text(text: str, truth: str) -> None:
    for name in score.BUILT_IN:
        found = value(name, text, truth)
        assert found is None or 0 <= found <= 1
    score.recognise([truth])


@given(st.text(alphabet="abc ", max_size=40), st.text(alphabet="abc ", max_size=40))
def test_rouge_l_is_the_longest_common_subsequence_of_the_textbook(text: str, truth: str) -> None:
    words, wanted = text.split(), truth.split()

    @cache
    def longest(n: int, m: int) -> int:
        if not n or not m:
            return 0
        if words[n - 1] == wanted[m - 1]:
            return longest(n - 1, m - 1) + 1
        return max(longest(n - 1, m), longest(n, m - 1))

    expected = 2 * longest(len(words), len(wanted)) / (len(words) + len(wanted)) if words else None
    assert value("rouge_l", text, truth) == (expected if expected is None else pytest.approx(expected))


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that installs a package as an administrator would, with one metric, `shout`."""

    def install(code: str) -> None:
        (tmp_path / "house_metrics.py").write_text(code)
        info = tmp_path / "house_metrics-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house-metrics\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[honed.metrics]\nshout = house_metrics:shout\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, "house_metrics", raising=False)

    return install


def test_an_administrators_metric_comes_in_through_an_entry_point(plug_in: Callable[[str], None]) -> None:
    with pytest.raises(SpecError):
        metric_names.check("shout", "guard.metric")
    plug_in("def shout(text, truth):\n    return float(text.isupper()) if text.isalpha() else None\n")
    metric_names.check("shout", "guard.metric")
    assert metric_names.parts("shout/tag:x") == ("shout", "tag:x")
    found = score.score(["YES", "no", "?"], ["x"] * 3, [score.find("shout")])
    assert found == score.Scores({"shout": pytest.approx(1 / 3), "shout_parsable": pytest.approx(2 / 3)}, [])


@pytest.mark.parametrize(
    ("code", "words"),
    [("1 / 0", "ZeroDivisionError"), ("7", "not between 0 and 1"), ("float('nan')", "not between 0 and 1")],
)
def test_a_metric_that_breaks_is_told_once_and_costs_no_run(
    plug_in: Callable[[str], None], code: str, words: str
) -> None:
    plug_in(f"def shout(text, truth):\n    return {code}\n")
    found = score.score(["a", "b"], ["x", "x"], [score.find("shout")])
    assert found.figures == {"shout": 0, "shout_parsable": 0}
    assert len(found.faults) == 1
    assert words in found.faults[0]


def test_a_metric_that_cannot_be_loaded_is_named_with_its_package(plug_in: Callable[[str], None]) -> None:
    plug_in("raise RuntimeError('no licence')\n")
    with refused(EnvironmentInvalidError, r"metric shout .house_metrics:shout. cannot be loaded.*licence"):
        score.find("shout")


def test_an_unknown_metric_is_refused_with_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"predictions\.metrics: no metric 'exactmatch'") as caught:
        metric_names.check("exactmatch", "predictions.metrics")
    assert "did you mean exact_match?" in caught.value.hint
    assert json.dumps(metric_names.known()) in json.dumps(sorted(score.BUILT_IN))


def test_empty_reasoning_that_a_template_has_taught_is_no_part_of_the_answer() -> None:
    """Qwen3's template trains empty reasoning before each answer and omits it from the prompt."""
    found = score.score(["<think>\n\n</think>\n\nCairo."], ["Cairo."], [score.find("exact_match")])
    assert found.figures["exact_match"] == 1
    kept = score.score(["<think>a</think>b"], ["<think>a</think>b"], [score.find("exact_match")])
    assert kept.figures["exact_match"] == 1
