"""Data sets are read from real files: five formats, four kinds of file, and every row accounted for."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from honed.inputs import dataset
from honed.inputs.dataset import Example
from honed.inputs.row import unread
from honed.spec.spec import DatasetSpec
from honed.system import quote
from honed.system.error import DatasetError

TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def load_rows(path: Path, rows: list[Any], *, has_chat_template: bool = True, **more: Any) -> dataset.Mixture:
    write_jsonl(path / "rows.jsonl", rows)
    asked = DatasetSpec(path=str(path / "rows.jsonl"), **more)
    return dataset.load([asked], seed=0, has_chat_template=has_chat_template)


def load_one(path: Path, row: Any, **more: Any) -> Example:
    return load_rows(path, [row], **more).examples[0]


# --- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": TURNS}, "messages"),
        ({"messages": json.dumps(TURNS)}, "messages"),
        ({"conversations": TURNS}, "messages"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "sharegpt"),
        ({"conversation": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "sharegpt"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, "prompt_completion"),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca"),
        ({"text": "a"}, "text"),
    ],
)
def test_a_format_is_recognised_by_its_columns(row: dict[str, Any], expected: str) -> None:
    assert dataset.recognise(row, None) == expected


def test_columns_that_fit_no_format_are_listed_with_what_each_format_wants() -> None:
    with pytest.raises(DatasetError, match=r"question, answer") as caught:
        dataset.recognise({"question": "a", "answer": "b"}, None)
    assert "`prompt` and `completion`" in caught.value.hint
    assert dataset.recognise({"question": "a", "answer": "b"}, {"prompt": "question", "completion": "answer"})


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    columns = {"prompt": "question", "completion": "answer"}
    example = load_one(tmp_path, {"question": "2+2?", "answer": "4"}, columns=columns)
    assert (example.prompt, example.completion) == ("2+2?", "4")


def test_messages_keep_reasoning_and_names_and_get_calls_as_objects(tmp_path: Path) -> None:
    call = {"id": "abc123def", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": null}'}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "+2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "4", "tool_call_id": "abc123def", "name": "add"},
        {"role": "assistant", "content": "4", "thinking": "so"},
    ]
    example = load_one(tmp_path, {"messages": messages, "tools": json.dumps(tools)})
    assert example.kind == "messages"
    assert example.messages[0]["content"] == "2+2?"
    assert example.messages[1]["content"] == ""
    assert example.messages[1]["reasoning_content"] == "hm"
    assert example.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": None}}
    assert example.messages[1]["tool_calls"][0]["id"] == "abc123def"
    assert example.messages[2]["name"] == "add"
    assert example.messages[3]["thinking"] == "so"
    assert example.tools == tools


def test_sharegpt_becomes_messages(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "2+2?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "It is 4."},
    ]
    example = load_one(tmp_path, {"conversations": turns})
    assert [message["role"] for message in example.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert example.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 2}}
    assert example.messages[4] == {"role": "assistant", "content": "It is 4."}


def test_alpaca_becomes_messages_or_the_usual_text_without_a_chat_template(tmp_path: Path) -> None:
    row = {
        "instruction": "Translate.",
        "input": "Haus",
        "output": "house",
        "system": "Be brief.",
        "history": [["a", "b"]],
    }
    example = load_one(tmp_path, row)
    assert [message["content"] for message in example.messages] == [
        "Be brief.",
        "a",
        "b",
        "Translate.\n\nHaus",
        "house",
    ]
    del row["history"]
    example = load_one(tmp_path, row, has_chat_template=False)
    assert example.kind == "prompt_completion"
    assert example.prompt.startswith("Be brief.\n\nBelow is an instruction")
    assert example.prompt.endswith("### Input:\nHaus\n\n### Response:\n")
    assert example.completion == "house"
    assert "### Input" not in load_one(tmp_path, {**row, "input": ""}, has_chat_template=False).prompt


def test_a_prompt_of_messages_keeps_its_own_answers_out_of_training(tmp_path: Path) -> None:
    example = load_one(tmp_path, {"prompt": [*TURNS, TURNS[0]], "completion": TURNS[1:]})
    assert example.kind == "messages"
    assert len(example.messages) == 4
    assert example.num_prompt_messages == 3


# --- bad rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": TURNS[:1]}, "no assistant turn"),
        ({"messages": []}, "empty"),
        ({"messages": [TURNS[0], {"role": "assistant", "content": " "}]}, "empty"),
        ({"messages": [{"role": "User", "content": "a"}, TURNS[1]]}, "the role is 'User'"),
        (
            {"messages": [TURNS[0], {"role": "assistant", "content": 4}]},
            "the content must be a string, this is a number",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, TURNS[1]]}, "has no source"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}, TURNS[1]]}, "a part of type 'smell'"),
        ({"messages": [TURNS[0], "4"]}, "message 2 is a string"),
        ({"messages": [TURNS[0], {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "a function with a name"),
        ({"messages": [TURNS[0], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "not JSON"),
        ({"messages": TURNS, "tools": "add"}, "`tools`"),
        ({"other": 1}, "`messages` must be a list"),
        ([1, 2], "a row must be an object"),
        ("text", "a row must be an object"),
    ],
)
def test_a_row_that_cannot_be_used_is_counted_and_named(tmp_path: Path, row: Any, words: str) -> None:
    mixture = load_rows(tmp_path, [{"messages": TURNS}, row, {"messages": TURNS}])
    assert len(mixture.examples) == 2
    assert [example.row_index for example in mixture.examples] == [0, 2]
    (counts,) = mixture.counts
    assert (counts.num_rows, counts.num_taken, counts.num_bad) == (3, 2, 1)
    assert counts.bad[0].startswith("rows.jsonl, line 2: ")
    assert words in quote.show(counts.bad[0])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "completion": ""}, "`completion` is empty"),
        ({"prompt": "a", "completion": 4}, "`completion` must be a string, but is a number"),
        ({"prompt": "a", "completion": TURNS[1:]}, "must both be strings or both"),
        ({"prompt": "a"}, "`completion` must be a string, but is missing"),
    ],
)
def test_a_completion_that_is_missing_or_empty_is_named(tmp_path: Path, row: Any, words: str) -> None:
    counts = load_rows(tmp_path, [{"prompt": "a", "completion": "b"}, row]).counts[0]
    assert words in counts.bad[0]


def test_more_bad_rows_than_good_ones_are_an_error_that_names_the_first() -> None:
    with pytest.raises(DatasetError, match=r"row 1: no assistant turn"):
        dataset.convert(
            {"messages": TURNS[:1]}, "messages", columns=None, dataset_index=0, row_index=0, has_chat_template=True
        )


def test_mostly_bad_rows_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"2 of 3 rows cannot be used as messages.*line 2: no assistant turn"):
        load_rows(tmp_path, [{"messages": TURNS}, {"messages": TURNS[:1]}, {"messages": TURNS[:1]}])


def test_the_wrong_format_by_name_says_what_it_wants(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"`instruction` must be a string, but is missing") as caught:
        load_rows(tmp_path, [{"messages": TURNS}], format="alpaca")
    assert "alpaca needs `instruction` and `output`" in caught.value.hint


# --- files -----------------------------------------------------------------------------------------------------------


def test_jsonl_takes_a_byte_order_mark_blank_lines_and_no_last_line_break(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \r\n{"text": "b"}')
    assert [row["text"] for row in dataset.read(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "a"}\n{"text": "b"\n', r"line 2, column 13: not JSON"),
        (b'{"text": "a"}\n\xff\xfe\n', r"line 2: not UTF-8"),
        (b"[" * 100_000, r"line 1.*nested too deeply"),
        (b'{"text": "a"}\n[1]\n', r"line 2: a row must be an object with columns, this is a list"),
    ],
)
def test_a_line_that_is_not_a_row_is_named_with_its_place(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=words):
        list(dataset.read(path))


def test_a_large_file_is_never_in_memory_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for _ in range(20_000):
            file.write('{"text": "' + "x" * 1000 + '"}\n')
    tracemalloc.start()
    assert sum(1 for _ in dataset.read(path)) == 20_000
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert len(list(dataset.read(path, limit=3))) == 3


def test_json_is_a_list_or_has_one_as_data(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "a"}]))
    assert list(dataset.read(path)) == [{"text": "a"}]
    path.write_text(json.dumps({"data": [{"text": "b"}]}))
    assert list(dataset.read(path)) == [{"text": "b"}]
    path.write_text('{"text": "a"}')
    with pytest.raises(DatasetError, match="list of rows"):
        list(dataset.read(path))
    path.write_text('[{"text": "a"}\n{"text": "b"}]\n')
    with pytest.raises(DatasetError, match=r"line 2, column 1: not JSON") as caught:
        list(dataset.read(path))
    assert ".jsonl" in caught.value.hint


def test_csv_has_a_header_and_quoted_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\n"2+2, or\nmore?",4\n', encoding="utf-8-sig")
    assert list(dataset.read(path)) == [{"prompt": "2+2, or\nmore?", "completion": "4"}]
    path.write_text("prompt,completion\na,b,c\n")
    with pytest.raises(DatasetError, match=r"line 2: .*number of fields differs from the header \(2\)"):
        list(dataset.read(path))
    path.write_text("")
    with pytest.raises(DatasetError, match="empty"):
        list(dataset.read(path))


def test_csv_may_hold_lists_as_json(tmp_path: Path) -> None:
    quoted = json.dumps(TURNS).replace('"', '""')
    (tmp_path / "a.csv").write_text(f'messages\n"{quoted}"\n')
    mixture = dataset.load([DatasetSpec(path=str(tmp_path))], seed=0, has_chat_template=True)
    assert mixture.examples[0].messages == TURNS


def test_parquet_is_read_and_its_nulls_are_absent_keys(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    rows = [
        {"messages": TURNS},
        {"messages": [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"messages": [TURNS[0], {"role": "assistant", "content": "x", "reasoning_content": "hm"}]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    mixture = dataset.load([DatasetSpec(path=str(tmp_path / "a.parquet"))], seed=0, has_chat_template=True)
    assert mixture.examples[0].messages == TURNS
    assert mixture.examples[1].messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(DatasetError, match="not a readable"):
        list(dataset.read(tmp_path / "a.parquet"))


def calls(*arguments: Any) -> list[dict[str, Any]]:
    """Rows with a call each."""
    return [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": each}}]},
            ]
        }
        for each in arguments
    ]


def test_nulls_of_a_call_in_a_table_are_counted_as_they_may_be_padding(tmp_path: Path) -> None:
    rows = calls({"a": 1, "b": None}, {"a": 2}, {"a": 3, "b": {"c": "x"}})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    read = dataset.load([DatasetSpec(path=str(tmp_path / "a.parquet"))], seed=0, has_chat_template=True)
    functions = [example.messages[1]["tool_calls"][0]["function"]["arguments"] for example in read.examples]
    assert functions == [{"a": 1}, {"a": 2}, {"a": 3, "b": {"c": "x"}}]
    assert [count.num_nulled for count in read.counts] == [2]
    looked = dataset.inspect(DatasetSpec(path=str(tmp_path / "a.parquet")))
    assert looked.num_nulled == 2
    assert dataset.nulled_message(2).startswith("2 rows have tool calls with arguments of null, which are left out")


def test_nulls_of_a_call_are_kept_where_the_file_has_them_as_json(tmp_path: Path) -> None:
    read = load_rows(tmp_path, calls({"a": 1, "b": None}))
    assert read.examples[0].messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}
    texts = [json.dumps({"a": 1, "b": None})]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(calls(*texts)), tmp_path / "b.parquet")
    again = dataset.load([DatasetSpec(path=str(tmp_path / "b.parquet"))], seed=0, has_chat_template=True)
    assert again.examples[0].messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}
    assert [count.num_nulled for mixture in (read, again) for count in mixture.counts] == [0, 0]


def test_a_directory_is_its_data_files_by_name_hidden_ones_left_out(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", [{"text": "b"}])
    write_jsonl(tmp_path / ".c.jsonl", [{"text": "c"}])
    (tmp_path / "a.json").write_text('[{"text": "a"}]')
    (tmp_path / "README.md").write_text("words")
    assert [path.name for path in dataset.files(tmp_path)] == ["a.json", "b.jsonl"]
    mixture = dataset.load([DatasetSpec(path=str(tmp_path))], seed=0, has_chat_template=True)
    assert [example.text for example in mixture.examples] == ["a", "b"]


def test_a_split_of_a_directory_is_its_subdirectory_or_the_files_that_begin_with_it(tmp_path: Path) -> None:
    for name in ("train-00000-of-00001.jsonl", "test.jsonl", "training.jsonl"):
        write_jsonl(tmp_path / name, [{"text": name}])
    assert [path.name for path in dataset.files(tmp_path, split="train")] == ["train-00000-of-00001.jsonl"]
    (tmp_path / "train").mkdir()
    write_jsonl(tmp_path / "train" / "x.jsonl", [{"text": "x"}])
    mixture = dataset.load([DatasetSpec(path=str(tmp_path), split="train")], seed=0, has_chat_template=True)
    assert [example.text for example in mixture.examples] == ["x"]
    with pytest.raises(DatasetError, match=r"no data file of split 'dev' .*test\.jsonl") as refused:
        dataset.files(tmp_path, split="dev")
    assert "`split: test`" in refused.value.hint


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path / "nowhere", "no such file"),
        (lambda path: path, r"no data file in this directory \(there is: notes\.txt\)"),
        (lambda path: path / "notes.txt", "not a supported kind of data file"),
    ],
)
def test_a_data_set_without_files_says_what_is_there(tmp_path: Path, make: Callable[[Path], Path], words: str) -> None:
    (tmp_path / "notes.txt").write_text("words")
    with pytest.raises(DatasetError, match=words):
        dataset.files(make(tmp_path))


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no row"):
        load_rows(tmp_path, [])


# --- a look, a mixture, a split --------------------------------------------------------------------------------------


def test_a_look_reads_the_first_rows_only(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS, "id": n} for n in range(30)])
    with path.open("a") as file:
        file.write("this is never read\n")
    found = dataset.inspect(DatasetSpec(path=str(path)), num_rows=20)
    assert (found.format, found.num_files, found.columns, len(found.rows)) == ("messages", 1, ("messages", "id"), 20)
    assert found.num_bytes == path.stat().st_size


def test_max_rows_limits_what_is_read(tmp_path: Path) -> None:
    mixture = load_rows(tmp_path, [{"text": str(n)} for n in range(10)], max_rows=3)
    assert [example.text for example in mixture.examples] == ["0", "1", "2"]


def make_sets(path: Path, sizes: list[int], fractions: list[float | None]) -> list[DatasetSpec]:
    for n, size in enumerate(sizes):
        write_jsonl(path / f"{n}.jsonl", [{"text": f"{n} {row}"} for row in range(size)])
    return [DatasetSpec(path=str(path / f"{n}.jsonl"), fraction=fraction) for n, fraction in enumerate(fractions)]


@pytest.mark.parametrize(
    ("sizes", "fractions", "taken"),
    [
        ([100, 100], [None, None], [100, 100]),
        ([100, 100], [0.7, 0.3], [100, 43]),
        ([100, 100], [7, 3], [100, 43]),
        ([70, 1000], [0.7, 0.3], [70, 30]),
        ([10, 20, 30], [1, 1, 1], [10, 10, 10]),
        ([50], [0.5], [50]),
    ],
)
def test_fractions_are_shares_of_the_mixture_and_no_row_is_drawn_twice(
    tmp_path: Path, sizes: list[int], fractions: list[float | None], taken: list[int]
) -> None:
    sets = make_sets(tmp_path, sizes, fractions)
    mixture = dataset.load(sets, seed=7, has_chat_template=True)
    assert [counts.num_taken for counts in mixture.counts] == taken
    texts = [example.text for example in mixture.examples]
    assert len(set(texts)) == len(texts) == sum(taken)
    assert texts == [example.text for example in dataset.load(sets, seed=7, has_chat_template=True).examples]
    if taken != sizes:
        assert texts != [example.text for example in dataset.load(sets, seed=8, has_chat_template=True).examples]


def test_fractions_are_for_all_data_sets_or_none(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="fraction"):
        dataset.load(make_sets(tmp_path, [5, 5], [0.5, None]), seed=0, has_chat_template=True)


@pytest.mark.parametrize(("number", "share", "held"), [(100, 0.05, 5), (3, 0.01, 1), (3, 0.99, 2), (2, 0.5, 1)])
def test_a_split_holds_out_its_share_and_at_least_one_on_each_side(number: int, share: float, held: int) -> None:
    examples = [Example("text", text=str(n), row_index=n) for n in range(number)]
    train, held_out = dataset.split(examples, share, 3)
    assert len(held_out) == held
    assert sorted([*train, *held_out], key=lambda example: example.row_index) == examples
    assert dataset.split(examples, share, 3) == (train, held_out)
    with pytest.raises(DatasetError, match="one example"):
        dataset.split(examples[:1], share, 3)


# --- weights of messages ---------------------------------------------------------------------------------------------


def weighed(*said: dict[str, Any]) -> dict[str, Any]:
    """Return a row of as many questions and answers; each argument adds keys to one answer."""
    turns = ((TURNS[0], {"role": "assistant", "content": str(n)} | more) for n, more in enumerate(said))
    return {"messages": [message for pair in turns for message in pair]}


@pytest.mark.parametrize(
    ("no", "yes"),
    [
        ({"weight": 0}, {"weight": 1}),
        ({"weight": 0.0}, {"weight": 1.0}),
        ({"weight": False}, {"weight": None}),
        ({"train": False}, {"train": True}),
        ({"training": False}, {"training": 1}),
        ({"loss": 0}, {"loss": True}),
        ({"masked": True}, {"masked": False}),
        ({"weight": 0, "masked": True}, {}),
    ],
)
def test_a_turn_of_weight_0_is_context_and_no_template_sees_the_weight(
    tmp_path: Path, no: dict[str, Any], yes: dict[str, Any]
) -> None:
    example = load_one(tmp_path, weighed(no, yes))
    assert (example.untrained, example.trained_turns) == ((1,), [3])
    assert example.messages[1] == {"role": "assistant", "content": "0"}
    assert example.messages[3] == {"role": "assistant", "content": "1"}


def test_turns_of_sharegpt_and_of_a_completion_have_weights_too(tmp_path: Path) -> None:
    call = '{"name": "add", "arguments": {}}'
    turns = [
        {"from": "human", "value": "a", "weight": 0},
        {"from": "function_call", "value": call, "train": False},
        {"from": "tool", "value": "4"},
        {"from": "gpt", "value": "b", "train": True},
    ]
    example = load_one(tmp_path, {"system": "Be brief.", "conversations": turns})
    assert (example.untrained, example.trained_turns) == ((1, 2), [4])
    prompt = [TURNS[0], {"role": "assistant", "content": "x", "weight": 0}, TURNS[0]]
    completion = [{"role": "assistant", "content": "y", "weight": 0}, TURNS[0], {"role": "assistant", "content": "z"}]
    example = load_one(tmp_path, {"prompt": prompt, "completion": completion})
    assert example.trained_turns == [5]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (weighed({"weight": 0.5}), "message 2: `weight` is 0.5"),
        (weighed({}, {"weight": 2}), "message 4: `weight` is 2"),
        (weighed({"weight": "0"}), "message 2: `weight` is '0'"),
        (weighed({"loss": 0.37}), "message 2: `loss` is 0.37"),
        (weighed({"train": "no"}), "message 2: `train` is 'no'"),
        (weighed({"weight": 1, "train": False}), "`weight: 1` and `train: false` contradict each other"),
        (
            weighed({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}),
            "`train_detail` applies to",
        ),
        ({"messages": [TURNS[0] | {"weight": 1}, TURNS[1]]}, "message 1: `weight: 1` on a turn of the user"),
        ({"messages": [TURNS[0] | {"masked": False}, TURNS[1]]}, "message 1: `masked: false` on a turn"),
        (
            {"prompt": [TURNS[0], TURNS[1] | {"weight": 1}, TURNS[0]], "completion": [TURNS[1]]},
            "message 2 of the `prompt` is set to be trained on",
        ),
    ],
)
def test_a_weight_that_nothing_trains_with_is_refused_with_its_line(tmp_path: Path, row: Any, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" * 5 + json.dumps(row) + "\n")
    for read in (
        lambda: dataset.inspect(DatasetSpec(path=str(path))),
        lambda: dataset.load([DatasetSpec(path=str(path))], seed=0, has_chat_template=True),
    ):
        with pytest.raises(DatasetError) as caught:
            read()
        assert f"{path}: line 6: " in caught.value.message
        assert words in caught.value.shown
        assert caught.value.hint


def test_rows_of_which_no_turn_is_trained_on_are_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [weighed({"weight": 0}), weighed({}), weighed({"weight": 0}, {})])
    assert dataset.inspect(DatasetSpec(path=str(path))).num_untrained == 1
    examples = dataset.load([DatasetSpec(path=str(path))], seed=0, has_chat_template=True).examples
    assert [example.trained_turns for example in examples] == [[], [1], [3]]


def test_columns_that_are_not_read_are_named(tmp_path: Path) -> None:
    row = {"id": 7, "source": "web", "tools": [], "note": None} | weighed({})
    path = write_jsonl(tmp_path / "rows.jsonl", [row, row | {"weight": 0.5, "conversations": [1]}])
    found = dataset.inspect(DatasetSpec(path=str(path)))
    assert found.unread == ("id", "source", "weight", "conversations")
    write_jsonl(path, [{"q": "2+2?", "a": "4", "system": "Be brief.", "loss": 0.1}])
    found = dataset.inspect(DatasetSpec(path=str(path), columns={"prompt": "q", "completion": "a"}))
    assert (found.format, found.unread) == ("prompt_completion", ("system", "loss"))


@pytest.mark.parametrize(
    ("columns", "tags"),
    [
        ({}, ()),
        ({"tag": "sums"}, ("sums",)),
        ({"tags": ["b", "a", "b"]}, ("a", "b")),
        ({"tag": " c ", "tags": '["a", "b"]'}, ("a", "b", "c")),
        ({"tags": "a, b"}, ("a, b",)),
        ({"tag": 7, "tags": {"a": 1}}, ()),
        ({"tag": "x" * 65, "tags": ["", "a\nb", None, "ok"]}, ("ok",)),
    ],
)
def test_a_row_has_the_texts_of_its_columns_tag_and_tags(columns: dict[str, object], tags: tuple[str, ...]) -> None:
    row = {"prompt": "1 + 1?", "completion": "2"} | columns
    assert dataset.convert(row, "prompt_completion").tags == tags
    assert not unread(row, "prompt_completion", {})
