"""Relative paths in a job file: resolved from the file's directory, while the rest of the text stays unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.spec import document, jobfile
from honed.spec.relative import absolute, resolved
from honed.system.error import SpecError

YAML = """\
# ä comment
base_model: ./models/qwen  # stays
chat_template: 'chat.jinja'
output_dir: outputs/out
adapter: "../adapters/a b"
datasets:
  - path: &rows data/x.jsonl
    media_dir: {image: images, audio: /srv/audio}
  - {path: ~/y.jsonl, columns: {text: body}}
  - path: org/set
  - path: *rows
name: not/a/path
"""


def test_the_paths_of_a_yaml_file_become_absolute_and_all_else_stays(tmp_path: Path) -> None:
    text, changes = absolute(YAML.encode(), ".yaml", tmp_path)
    home = Path("~").expanduser()
    assert text.decode() == YAML.replace("./models", f"{tmp_path}/models").replace(
        "'chat.jinja'", f'"{tmp_path}/chat.jinja"'
    ).replace("outputs/out", f"{tmp_path}/outputs/out").replace('"../', f'"{tmp_path.parent}/').replace(
        "data/x", f"{tmp_path}/data/x"
    ).replace("image: images", f"image: {tmp_path}/images").replace("~/y", f"{home}/y")
    assert [change.key for change in changes] == [
        "base_model",
        "chat_template",
        "output_dir",
        "adapter",
        "datasets.0.path",
        "datasets.0.media_dir.image",
        "datasets.1.path",
        "datasets.3.path",
    ]
    assert document.parse(text, ".yaml").lines == document.parse(YAML.encode(), ".yaml").lines


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".json", '{"base_model": "m/ä",\n "datasets": [{"path": "d.jsonl"}], "name": "x"}'),
        (".toml", "base_model = 'm/ä' # stays\n[[datasets]]\npath = \"d.jsonl\"\n"),
    ],
)
def test_the_same_in_json_and_toml(tmp_path: Path, suffix: str, text: str) -> None:
    (tmp_path / "m/ä").mkdir(parents=True)
    made, _ = absolute(text.encode(), suffix, tmp_path)
    data = document.parse(made, suffix).data
    assert data["base_model"] == str(tmp_path / "m/ä")
    assert data["datasets"] == [{"path": str(tmp_path / "d.jsonl")}]
    assert made.decode().count("\n") == text.count("\n")


@pytest.mark.parametrize(
    "text",
    [
        "base_model: Qwen/Qwen3-1.7B",
        "base_model: gpt2",
        "base_model: job:first",
        "base_model: /srv/m",
        "adapter: qlora",
        "chat_template: llama3",
        "output_dir: s3://bucket/x",
        "name: a.jsonl",
        "base_model: ''",
        "wandb_project: ./x",
        "training_chat_template: trl",
        "training_chat_template: TRL",
    ],
)
def test_what_is_no_relative_path_stays(tmp_path: Path, text: str) -> None:
    assert absolute(text.encode(), ".yaml", tmp_path) == (text.encode(), ())


@pytest.mark.parametrize("given", ["./rows.jinja", "rows.jinja", "templates/rows"])
def test_a_template_for_rows_is_taken_from_there_too(tmp_path: Path, given: str) -> None:
    text, changes = absolute(f"training_chat_template: {given}".encode(), ".yaml", tmp_path)
    assert text.decode() == f"training_chat_template: {tmp_path / given}"
    assert [change.key for change in changes] == ["training_chat_template"]


@pytest.mark.parametrize(("value", "written"), [("TRL", "trl"), ("yes", "trl"), ("qwen3", None)])
def test_a_word_for_the_template_of_rows_is_told_of_trl(value: str, written: str | None) -> None:
    with pytest.raises(SpecError, match="expected trl, or an absolute path, got") as caught:
        jobfile.loads(f"training_chat_template: {value}\n".encode(), ".yaml")
    assert caught.value.fix.get("training_chat_template") == written


def test_a_directory_that_is_there_goes_before_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "Qwen/Qwen3-1.7B").mkdir(parents=True)
    assert (
        absolute(b"base_model: Qwen/Qwen3-1.7B", ".yaml", tmp_path)[0].decode()
        == f"base_model: {tmp_path}/Qwen/Qwen3-1.7B"
    )


def test_paths_under_the_names_of_other_tools_are_taken_so_too(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model_name_or_path: ./m\ndataset: rows.jsonl\n")
    with resolved(path) as found:
        assert found.path.name == path.name
        with pytest.raises(SpecError) as caught:
            jobfile.load(found.path)
    assert caught.value.fix["base_model"] == str(tmp_path / "m")
    assert caught.value.fix["datasets"] == [{"path": str(tmp_path / "rows.jsonl")}]
    assert not found.path.exists()


def test_in_a_file_dropped_by_hand_they_are_refused_with_what_takes_them(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        jobfile.loads(b"base_model: ./m\ndatasets: [{path: d.jsonl}]\noutput_dir: ~/out\n", ".yaml")
    assert len(caught.value.problems) == 3  # type: ignore[attr-defined]
    assert all("honectl submit" in problem.hint for problem in caught.value.problems)  # type: ignore[attr-defined]


def test_a_file_that_cannot_be_read_is_handed_on_for_the_check(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("a: [")
    with resolved(path) as found:
        assert found.path == path
    with resolved(tmp_path / "none.yaml") as found:
        assert found.changes == ()


def test_what_a_shell_would_have_expanded_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    monkeypatch.setenv("WORK", "/work/x")
    monkeypatch.delenv("UNSET", raising=False)
    text = (
        "base_model: $HOME/m\noutput_dir: ${WORK}/out\nadapter: /srv/$HOME/a\ndatasets:\n  - path: ~root/d.jsonl\n"
        "  - path: ~nobody-at-all/d.jsonl\n  - path: $UNSET/d.jsonl\nname: $HOME\nmodel_path: $HOME/n\n"
    )
    made, changes = absolute(text.encode(), ".yaml", tmp_path)
    data = document.parse(made, ".yaml").data
    assert [data[key] for key in ("base_model", "output_dir", "adapter", "name", "model_path")] == [
        "/home/anna/m",
        "/work/x/out",
        "/srv/home/anna/a",
        "$HOME",
        "/home/anna/n",
    ]
    assert data["datasets"][0]["path"] == str(Path("~root").expanduser() / "d.jsonl")
    assert [each["path"] for each in data["datasets"][1:]] == ["~nobody-at-all/d.jsonl", "$UNSET/d.jsonl"]
    assert "base_model: $HOME/m is resolved to /home/anna/m" in map(str, changes)


def test_paths_in_another_tools_section_are_taken_from_the_files_place(tmp_path: Path) -> None:
    text = b"model:\n  name: ./m\nargs:\n  output_dir: outputs\n"
    made, _ = absolute(text, ".yaml", tmp_path)
    data = document.parse(made, ".yaml").data
    assert data == {"model": {"name": f"{tmp_path}/m"}, "args": {"output_dir": f"{tmp_path}/outputs"}}


def test_a_name_with_such_signs_in_it_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    (tmp_path / "$HOME").mkdir()
    made, _ = absolute(b"base_model: $HOME\n", ".yaml", tmp_path)
    assert document.parse(made, ".yaml").data["base_model"] == str(tmp_path / "$HOME")


@pytest.mark.parametrize("value", ["$UNSET/m", "${UNSET}/m", "~nobody-at-all/m"])
def test_what_nothing_expands_is_refused_with_the_reason(value: str) -> None:
    for data in (
        {"base_model": value, "datasets": [{"path": "/d"}]},
        {"base_model": "/m", "datasets": [{"path": value}]},
    ):
        with pytest.raises(SpecError, match=r"begins with (a shell variable|~)") as refused:
            jobfile.validate(data)
        assert "write it out" in refused.value.message
