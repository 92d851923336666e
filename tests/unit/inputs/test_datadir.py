"""Directories as data sets: files whose names mark them as held out are not trained on by accident."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from honed.check import datacheck
from honed.check.policy import Policy
from honed.inputs import datadir
from honed.inputs.dataset import load
from honed.spec.config import Config
from honed.spec.spec import DatasetSpec, JobSpec
from honed.system.error import DatasetError
from honed.system.layout import Layout
from zoo import plain


def make(path: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps([{"text": f"{name} {number}"}] if ".json" in name[-5:] else {}))
        if name.endswith(".jsonl"):
            (path / name).write_text(json.dumps({"text": name}) + "\n")
    return path


def looked(path: Path, *, key: str = "datasets", split: str | None = None) -> list[str]:
    """Return the check's warnings for the data set."""
    job = plain.spec(path, path, datasets=[{"path": str(path), "split": split}])
    if key == "eval_datasets":
        job = job | {"datasets": [{"path": str(make(path.parent / "other", "rows.jsonl"))}], key: job["datasets"]}
    rights = Policy.of(Layout(path / "root"), Config(), None)
    return datacheck.check(JobSpec.model_validate(job), None, rights, has_chat_template=True).warnings


@pytest.mark.parametrize(
    ("names", "train", "held_out"),
    [
        (["train.jsonl", "test.jsonl"], "train", "test"),
        (["training.json", "validation.json"], "training", "validation"),
        (["data.jsonl", "test.jsonl"], "train", "test"),
        (["capitals.jsonl", "capitals_eval.json"], "train", "eval"),
        (["rows_train.jsonl", "rows_dev.jsonl", "README.md"], "train", "dev"),
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"], "train", "test"),
        (["data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"], "train_sft", "test_sft"),
        (["train/a.jsonl", "test/a.jsonl"], "train", "test"),
        (["Train1.jsonl", "VAL2.jsonl"], "train", "val"),
    ],
)
def test_names_that_say_held_out_are_refused_with_the_line_that_helps(
    tmp_path: Path, names: list[str], train: str, held_out: str
) -> None:
    path = make(tmp_path / "rows", *names)
    for key, meant, other in (("datasets", train, held_out), ("eval_datasets", held_out, train)):
        with pytest.raises(DatasetError, match="`split` is not set") as refused:
            looked(path, key=key)
        assert f"write `split: {meant}` below its path" in refused.value.hint
        looked(path, key=key, split=meant)
        chosen, rest = datadir.files(path, split=meant), datadir.files(path, split=other)
        assert chosen
        assert rest
        assert not set(chosen) & set(rest)


@pytest.mark.parametrize(
    "names",
    [
        ["latest.jsonl", "contest.jsonl", "device.jsonl", "invalid.jsonl"],
        ["train.jsonl", "extra.jsonl"],
        ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"],
        ["train_test.jsonl", "train.jsonl"],
        ["human_eval_style.jsonl", "code.jsonl"],
        ["part-1.jsonl", "part-2.jsonl"],
        ["data/a.jsonl", "data/b.jsonl"],
        ["train/a.jsonl", "train/b.jsonl"],
        ["a.jsonl", "dataset_info.json", "dataset_infos.json"],
    ],
)
def test_other_names_are_read_whole(tmp_path: Path, names: list[str]) -> None:
    path = make(tmp_path / "rows", *names)
    assert looked(path) == []
    found = datadir.files(path)
    assert sorted(str(file.relative_to(path)) for file in found) == sorted(n for n in names if "_info" not in n)


def test_a_name_that_may_be_about_tests_is_read_and_told(tmp_path: Path) -> None:
    (told,) = looked(make(tmp_path / "rows", "test_generation.jsonl", "code.jsonl"))
    assert "test_generation.jsonl is trained on, too, but its name suggests held-out data" in told


def test_held_out_data_alone_is_trained_on_with_a_word(tmp_path: Path) -> None:
    path = make(tmp_path / "rows", "test.jsonl")
    for each in (path, path / "test.jsonl"):
        (told,) = looked(each)
        assert "its name contains `test`" in told
    assert looked(path, key="eval_datasets") == []


def test_directories_beside_data_files_are_named_where_they_have_data_too(tmp_path: Path) -> None:
    path = make(tmp_path / "rows", "a.jsonl", "more/b.jsonl", "test/c.jsonl", "notes/d.txt", ".git/e.jsonl")
    (path / "closed").mkdir(mode=0)
    (told,) = looked(path)
    assert "more/ also contains data files, which are not read" in told


def test_directories_of_several_subjects_are_refused_with_one_of_them(tmp_path: Path) -> None:
    path = make(tmp_path / "rows", "de/train.jsonl", "en/train.jsonl")
    with pytest.raises(DatasetError, match="in several subdirectories, not in the directory itself: de, en") as refused:
        looked(path)
    assert f"- path: {path / 'de'}" in refused.value.hint


def test_a_link_to_a_directory_is_not_followed(tmp_path: Path) -> None:
    elsewhere = make(tmp_path / "elsewhere", "secret.jsonl")
    path = make(tmp_path / "rows", "data/a.jsonl")
    (path / "data/more").symlink_to(elsewhere)
    (path / "other").symlink_to(elsewhere)
    assert [file.name for file in datadir.files(path)] == ["a.jsonl"]


def test_what_datasets_saved_to_disk_is_read_in_its_order(tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "completion": f"{n}!"} for n in range(30)]
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(tmp_path / "one", num_shards=3)
    assert looked(tmp_path / "one") == []
    mixture = load([DatasetSpec(path=str(tmp_path / "one"))], seed=0, has_chat_template=True)
    assert [example.prompt for example in mixture.examples] == [row["prompt"] for row in rows]
    (tmp_path / "one/data-00001-of-00003.arrow").unlink()
    with pytest.raises(DatasetError, match=r"00001.*no such file, although state\.json"):
        looked(tmp_path / "one")


def test_splits_that_datasets_saved_to_disk_are_chosen_by_name(tmp_path: Path) -> None:
    made = datasets.Dataset.from_list([{"text": "a"}])
    datasets.DatasetDict(train=made, test=made).save_to_disk(tmp_path / "two")
    with pytest.raises(DatasetError) as refused:
        looked(tmp_path / "two")
    assert "`split: train`" in refused.value.hint
    assert looked(tmp_path / "two", split="train") == []
    datasets.DatasetDict(train=made).save_to_disk(tmp_path / "one")
    assert looked(tmp_path / "one") == []
