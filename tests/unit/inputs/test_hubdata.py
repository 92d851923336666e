"""The files of a hub's data set that contain a job's rows."""

from __future__ import annotations

import pytest

from honed.inputs import hubdata
from honed.run.snapshot import DATASET, Missing
from honed.system.error import DatasetError

CARD = b"""---
license: mit
size: 2020-01-01
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path:
    - main/test-*
- config_name: odd
  data_files:
  - split: train
    path: "**/b*.jsonl"
- config_name: gone
  data_files: nowhere/*.jsonl
dataset_info: [
---
# Rows
"""
MAIN = ["main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"]
FILES = [*MAIN, "odd/b1.jsonl", "odd/deep/b2.jsonl", "odd/a.jsonl", "README.md", "rows.py"]


def choose(
    names: list[str], card: bytes | None = None, *, name: str | None = None, split: str | None = None
) -> list[str]:
    return hubdata.choose(names, card, Missing("org/rows", "main", DATASET, name, split))


def refusal(names: list[str], card: bytes | None = None, *, name: str | None = None, split: str | None = None) -> str:
    with pytest.raises(DatasetError) as raised:
        choose(names, card, name=name, split=split)
    return f"{raised.value.message} ({raised.value.hint})"


def test_names_of_files_say_the_splits_as_in_a_directory() -> None:
    names = ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet", "dataset_infos.json", "x.png"]
    assert choose(names, split="train") == ["data/train-00000-of-00001.parquet"]
    assert choose(names, split="test") == ["data/test-00000-of-00001.parquet"]
    assert choose(["rows.jsonl", "rows_test.jsonl"], split="train") == ["rows.jsonl"]
    assert choose(["a.jsonl.gz", "b.csv"]) == ["a.jsonl.gz", "b.csv"]
    assert choose(["default/train/0000.parquet", "default/test/0000.parquet"], split="train") == [
        "default/train/0000.parquet"
    ]
    said = refusal(names)
    assert "`split` is not set (write `split: train` or `split: test`" in said
    assert said.startswith("datasets: org/rows at main ")
    assert "org/rows at main: no data file of split 'dev'" in refusal(names, split="dev")


def test_a_configuration_is_what_the_card_says_else_a_directory() -> None:
    assert choose(FILES, CARD, split="train") == MAIN[:1]
    assert choose(FILES, CARD, name="main", split="test") == MAIN[1:]
    assert choose(FILES, CARD, name="odd") == ["odd/b1.jsonl", "odd/deep/b2.jsonl"]
    assert "there are: main, odd, gone" in refusal(FILES, CARD, name="other")
    assert "no such data file" in refusal(FILES, CARD, name="gone")
    assert "`split: train` or `split: test`" in refusal(FILES, CARD)
    assert "write `split: train` or `split: test`" in refusal(FILES, CARD, name="main", split="dev")
    both = CARD.replace(b"  default: true\n", b"")
    assert "has several configurations: main, odd, gone" in refusal(FILES, both)
    assert choose(["en/train.jsonl", "de/train.jsonl"], name="de") == ["de/train.jsonl"]
    assert "several subdirectories, not in the directory itself: de, en (write `name:`" in refusal(
        ["en/train.jsonl", "de/train.jsonl"]
    )
    assert "its directories are: de, en" in refusal(["en/train.jsonl", "de/train.jsonl"], name="fr")


@pytest.mark.parametrize(
    "card",
    [
        b"",
        b"# Rows",
        b"---\nconfigs: {a: [\n---\n",
        b"---\nconfigs: !!python/object:os.system x\n---\n",
        b"---\nconfigs: 7\n---\n",
        b"---\nconfigs:\n- 7\n---\n",
        b"---\nconfigs:\n- data_files: 7\n---\n",
        b"\xff---\n",
    ],
)
def test_a_card_that_is_not_understood_leaves_it_to_the_names(card: bytes) -> None:
    assert choose(["train.jsonl", "test.jsonl"], card, split="train") == ["train.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("*.jsonl", ["a.jsonl"]),
        ("**", ["a.jsonl", "d/b-1.jsonl", "d/e/b-2.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "d/b-1.jsonl", "d/e/b-2.jsonl"]),
        ("d/**", ["d/b-1.jsonl", "d/e/b-2.jsonl"]),
        ("d/*", ["d/b-1.jsonl"]),
        ("./d/**/b-[2-3].js?nl", ["d/e/b-2.jsonl"]),
    ],
)
def test_patterns_of_a_card_match_as_a_shells(pattern: str, meant: list[str]) -> None:
    card = f"---\nconfigs:\n- config_name: default\n  data_files: '{pattern}'\n---\n".encode()
    assert choose(["a.jsonl", "d/b-1.jsonl", "d/e/b-2.jsonl"], card) == meant


def test_no_pattern_takes_for_ever() -> None:
    """The test ends: a matcher that backtracks would not finish this pattern."""
    many = f"---\nconfigs:\n- config_name: default\n  data_files: '{'*a' * 60}/{'**/a/' * 40}*b'\n---\n".encode()
    name = "/".join(["a" * 200, *["a"] * 60, "c.jsonl"])
    assert "no such data file" in refusal([name], many)


def test_scripts_and_other_files_are_no_data() -> None:
    assert "only a loading script (rows.py)" in refusal(["rows.py", "README.md", "dataset_infos.json"])
    assert "revision: refs/convert/parquet" in refusal(["rows.py"])
    assert "it has: images.zip, notes.txt" in refusal([".gitattributes", "images.zip", "notes.txt"])
    assert choose(["rows.py", "rows.jsonl"]) == ["rows.jsonl"]
    assert choose(["state.json", "dataset_info.json", "data-00000-of-00001.arrow"]) == ["data-00000-of-00001.arrow"]


def test_names_that_lead_out_of_the_data_set_are_passed_over() -> None:
    odd = [
        "../out.jsonl",
        "/out.jsonl",
        "a/../../out.jsonl",
        ".hidden/a.jsonl",
        "a//b.jsonl",
        "a\nb.jsonl",
        "a\0b.jsonl",
    ]
    assert choose([*odd, "train.jsonl"]) == ["train.jsonl"]
