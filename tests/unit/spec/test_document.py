"""Job files as text: one meaning in three formats, the line of every key, and a quick rejection of anything else."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from honed.spec.document import MAX_BYTES, parse
from honed.system.error import SpecError
from told import refused

SUFFIXES = (".yaml", ".json", ".toml")

YAML = b"""\
# a comment
base_model: /m
datasets:
  - path: /a
    columns: {text: body}
  -
    path: /b
training:
  learning_rate: 2e-4
"""
JSON = b"""\
{
\t"base_model": "/m",
\t"datasets": [
\t\t{"path": "/a",
\t\t "columns": {"text": "body"}},
\t\t{"path": "/b"}
\t],
\t"training": {
\t\t"learning_rate": 2e-4
\t}
}
"""
TOML = b"""\
# a comment
base_model = "/m"

[[datasets]]   # first
path = "/a"
columns.text = "body"
[[datasets]]
path = '/b'
[training]
learning_rate = 2e-4
"""
DATA = {
    "base_model": "/m",
    "datasets": [{"path": "/a", "columns": {"text": "body"}}, {"path": "/b"}],
    "training": {"learning_rate": 2e-4},
}


@pytest.mark.parametrize(
    ("text", "suffix", "lines"),
    [
        (YAML, ".yaml", (2, 4, 5, 7, 9)),
        (YAML, ".yml", (2, 4, 5, 7, 9)),
        (JSON, ".json", (2, 4, 5, 6, 9)),
        (TOML, ".toml", (2, 5, 6, 8, 10)),
    ],
)
def test_the_three_formats_say_the_same_and_know_the_line_of_each_key(
    text: bytes, suffix: str, lines: tuple[int, ...]
) -> None:
    document = parse(text, suffix)
    assert document.data == DATA
    paths = [
        ("base_model",),
        ("datasets", 0, "path"),
        ("datasets", 0, "columns", "text"),
        ("datasets", 1, "path"),
        ("training", "learning_rate"),
    ]
    assert tuple(document.lines[path] for path in paths) == lines


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_byte_order_mark_and_windows_line_ends_are_fine(suffix: str) -> None:
    text = {".yaml": YAML, ".json": JSON, ".toml": TOML}[suffix]
    document = parse(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"), suffix)
    assert document.data == DATA
    assert document.lines == parse(text, suffix).lines


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2E+4", 2e4),
        ("1.", 1.0),
        (".5", 0.5),
        ("+1.5", 1.5),
        ("-3", -3),
        ("0", 0),
        ("0x10", 16),
        ("0o10", 8),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("Off", "Off"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("'010'", "010"),
        ("4bit", "4bit"),
        ("1e", "1e"),
        ("=", "="),
        ("a:b", "a:b"),
        ("'2026-11-20'", "2026-11-20"),
        ("None", "None"),
        ("nan", "nan"),
    ],
)
def test_a_plain_yaml_scalar_means_what_yaml_1_2_says(text: str, value: object) -> None:
    found = parse(f"a: {text}\n".encode(), ".yaml").data["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["010", "-07", "00", "1:30", "190:20:30", "1_000", "0b11", "2026-11-20", "1e999", ".nan"]
)
def test_a_yaml_scalar_that_readers_take_for_different_numbers_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="line 2: "):
        parse(f"a: 1\nb: {text}\n".encode(), ".yaml")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('a = """\nx\n"""\nb = 1\n', {"a": 1, "b": 4}),
        ("a = '''\nx = 1\n''''\nb = 1\n", {"a": 1, "b": 4}),
        ('a = "\\"#" # b = 2\nb = [\n  1, # one\n  2,\n]\nc = 1\n', {"a": 1, "b": 2, "c": 6}),
        ("\"quoted key\" = 1\n'other' = {x = 1, y = [{z = 2}]}\n", {"quoted key": 1, "other": 2}),
        ("a = 07:32:00.5\n", None),
        ("a.b.c = 1\n[a.b.d]\ne = 1\n", {"a": 1}),
    ],
)
def test_the_map_of_a_toml_text_finds_every_key(text: str, lines: dict[str, int] | None) -> None:
    if lines is None:
        with pytest.raises(SpecError, match="is a date"):
            parse(text.encode(), ".toml")
        return
    document = parse(text.encode(), ".toml")
    assert {key: document.lines[key,] for key in document.data} == lines
    assert set(_paths(document.data)) == set(document.lines)


def _paths(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in [(*path, key), *_paths(item, (*path, key))]]


ANCHORS = b"""\
x-rows: &rows
  format: messages
  max_rows: 100
base_model: /m
training: &t
  seed: &seed 3
datasets:
  - &first {<<: *rows, path: /a, max_rows: 7}
  - {<<: [*first, *rows], path: /b}
data_seed: *seed
again: *t
"<<": a name
"""


def test_anchors_aliases_and_merge_keys_are_written_out_with_the_lines_of_what_they_bring() -> None:
    document = parse(ANCHORS, ".yaml")
    assert document.data == {
        "base_model": "/m",
        "training": {"seed": 3},
        "datasets": [
            {"path": "/a", "max_rows": 7, "format": "messages"},
            {"path": "/b", "max_rows": 7, "format": "messages"},
        ],
        "data_seed": 3,
        "again": {"seed": 3},
        "<<": "a name",
    }
    lines = document.lines
    assert (lines["datasets", 0, "format"], lines["datasets", 0, "max_rows"], lines["data_seed",]) == (2, 8, 10)
    assert (lines["datasets", 1, "format"].via, lines["datasets", 1, "max_rows"].via) == (9, 9)  # type: ignore[attr-defined]
    assert (lines["again", "seed"], lines["again", "seed"].via) == (6, 11)  # type: ignore[attr-defined]


def test_what_an_alias_stands_for_is_a_copy() -> None:
    data = parse(b"a: &a {x: [1]}\nb: *a\nc: {<<: *a}\n", ".yaml").data
    data["b"]["x"].append(2)
    assert (data["a"], data["c"]) == ({"x": [1]}, {"x": [1]})


def test_a_key_that_holds_an_anchor_nobody_uses_is_a_key() -> None:
    assert parse(b"x-a: &a 1\nb: 2\n", ".yaml").data == {"x-a": 1, "b": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a " + "x" * 200_000 + "\nb: [" + ",".join(["*a"] * 9000) + "]", "more than 1048576 characters"),
        ("a: &a []\nb: [" + ",".join(["*a"] * 60_000) + "]", "more than 20000 keys"),
        (
            "a: &a {" + ",".join(f"k{n}: 1" for n in range(9000)) + "}\nb: {<<: [" + ",".join(["*a"] * 9000) + "]}",
            "more than",
        ),
        ("a: &a {<<: *a}", "inside its own anchor"),
        ("a: {<<: 7}", "merge key"),
        ("a: {<<: [[]]}", "merge key"),
        ("*a : 1", "a key must be a word"),
        ("&a b: 1", "an anchor on a key"),
        ("a: {<<: {x: 1}, <<: {y: 1}}", "twice"),
    ],
    ids=lambda text: text[:20],
)
def test_aliases_beyond_the_limits_and_without_meaning_are_refused(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse(text.encode(), ".yaml")


@pytest.mark.parametrize(
    "text", ["a: *secret", "a: &secret 1\nb: &secret 2", "a: &secret [*secret]", "a: *" + "s" * 9000]
)
def test_a_text_that_looks_like_an_alias_or_an_anchor_is_a_quote(text: str) -> None:
    """An example is `*important*`: the text is shown to its owner alone, and shortened."""
    with pytest.raises(SpecError) as caught:
        parse(text.encode(), ".yaml")
    assert "secret" in caught.value.shown or "sss" in caught.value.shown
    assert "secret" not in caught.value.message and "sss" not in caught.value.message
    assert len(caught.value.shown) < 400


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_place_of_each_text_is_known(suffix: str) -> None:
    text = {
        ".yaml": "# é\nbase_model: 'ä/m'\ndatasets: [{path: b}]\n",
        ".json": '{"base_model": "ä/m",\n "datasets": [{"path": "b"}]}',
        ".toml": "# é\nbase_model = 'ä/m'\n[[datasets]]\npath = \"b\"\n",
    }[suffix]
    document = parse(text.encode(), suffix)
    found = {path: document.text[begin:end].strip("'\"") for path, (begin, end) in document.spans.items()}
    assert found == {("base_model",): "ä/m", ("datasets", 0, "path"): "b"}


def test_values_that_cannot_be_read_are_told_together_where_they_are_asked_for() -> None:
    document = parse(b"a:\nb: 010\nc: 1\n", ".yaml", is_lenient=True)
    assert document.data == {"a": None, "b": None, "c": 1}
    assert [(each.key, each.line) for each in document.problems.values()] == [("a", 1), ("b", 2)]


def test_a_file_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(SpecError, match="300000 bytes"):
        parse(b"#" * 300_000, ".yaml")


def test_an_unknown_suffix_is_refused() -> None:
    with refused(SpecError, r"\.txt"):
        parse(b"a: 1", ".txt")


def _fill(unit: str, *, before: str = "", after: str = "") -> bytes:
    num_units = (MAX_BYTES - len(before) - len(after)) // len(unit.encode())
    return (before + unit * num_units + after).encode()


HOSTILE = {
    "yaml brackets": (".yaml", _fill("[")),
    "yaml braces": (".yaml", _fill("{")),
    "yaml dashes": (".yaml", _fill("- ")),
    "yaml questions": (".yaml", _fill("? ")),
    "yaml items": (".yaml", _fill("1,", before="a: [", after="1]")),
    "yaml keys": (".yaml", b"".join(b"k%d: 1\n" % n for n in range(22_000))),
    "yaml flow keys": (".yaml", _fill("a,", before="{")),
    "yaml directives": (".yaml", b"a: 1\n...\n" + b"".join(b"%%TAG !a%d! b\n" % n for n in range(15_000))),
    "yaml anchors": (".yaml", _fill("- &a x\n", before="a:\n")),
    "yaml comments": (".yaml", _fill("#\n", before="a: 1\n")),
    "yaml blanks": (".yaml", _fill(" ", before="a: 1\n")),
    "yaml quotes": (".yaml", _fill("\\n", before='a: "')),
    "yaml folds": (".yaml", _fill("x\n", before="a: >\n ")),
    "yaml colons": (".yaml", _fill(":", before="a")),
    "yaml digits": (".yaml", _fill("1", before="a: ")),
    "yaml doubtful digits": (".yaml", _fill("1", before="a: ", after=":")),
    "yaml sexagesimal": (".yaml", _fill(":1", before="a: 1", after="x")),
    "yaml underscores": (".yaml", _fill("1_", before="a: ", after="x")),
    "yaml long key": (".yaml", _fill("a", after=": 1")),
    "json brackets": (".json", _fill("[")),
    "json braces": (".json", _fill('{"a":')),
    "json items": (".json", _fill("1,", before='{"a": [', after="1]}")),
    "json lines": (".json", _fill("\n1,", before='{"a": [', after="1]}")),
    "json digits": (".json", _fill("1", before='{"a": ', after="}")),
    "json open string": (".json", _fill("\\n", before='{"a": "')),
    "json spaces": (".json", _fill(" ", before="{")),
    "toml brackets": (".toml", _fill("[", before="a = ")),
    "toml braces": (".toml", _fill("{a=", before="a = ")),
    "toml dots": (".toml", _fill("a.", after="a = 1")),
    "toml table dots": (".toml", _fill("a.", before="[", after="a]")),
    "toml inline dots": (".toml", _fill("a.", before="a = {", after="a = 1}")),
    "toml dots after a slip": (".toml", _fill("a.", before='x = "\\q"\n', after="a = 1")),
    "toml many dots": (".toml", b"".join(b"k%d%s = 1\n" % (n, b".a" * 40) for n in range(2_500))),
    "toml tables": (".toml", _fill("[[a]]\n")),
    "toml items": (".toml", _fill("1,", before="a = [", after="1]")),
    "toml digits": (".toml", _fill("1", before="a = ")),
    "toml hex": (".toml", _fill("f", before="a = 0x")),
    "toml long string": (".toml", _fill("\\\\", before='a = """', after='"""')),
    "toml open string": (".toml", _fill("x", before="a = '''")),
    "toml quotes": (".toml", _fill('"', before="a = ")),
    "toml lines": (".toml", _fill("\n")),
    "toml comments": (".toml", _fill("#\n")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_dealt_with_in_time(name: str) -> None:
    suffix, text = HOSTILE[name]
    assert len(text) <= MAX_BYTES
    began = time.process_time()
    try:
        parse(text, suffix)
    except SpecError as error:
        assert len(error.message) < 500
    assert time.process_time() - began < 30  # under 0.3 here; a hang, not a slow machine


@given(st.binary(max_size=300), st.sampled_from(SUFFIXES))
@settings(max_examples=100)
@example(b"\xff\xfea\x00", ".yaml")
@example(b"? a", ".yaml")
@example(b'{"": {"": 1}}', ".json")
@example(b"- - a\n -b", ".yaml")
@example(b"a: ''\n'': b", ".yaml")
def test_random_bytes_raise_nothing_but_a_spec_error(data: bytes, suffix: str) -> None:
    try:
        parse(data, suffix)
    except SpecError as error:
        assert error.message


@given(
    st.lists(
        st.sampled_from([*"abe019-+.:,'\"[]{}#&*!|>%@?=\\~\n \t_", "\n  ", "- ", ": ", "'''", '"""', "\u2028", "é"]),
        max_size=60,
    ).map("".join),
    st.sampled_from(SUFFIXES),
)
@settings(max_examples=150)
def test_nearly_right_text_raises_nothing_but_a_spec_error(text: str, suffix: str) -> None:
    try:
        document = parse(text.encode(), suffix)
    except SpecError:
        return
    assert set(_paths(document.data)) == set(document.lines)
    assert json.dumps(document.data, allow_nan=False).encode()
