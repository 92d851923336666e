"""Generated external input (texts, values and damaged files), and the readers that must survive it.

A `Target` is one reader, its input, and its permitted results: a value, or a rejection with a message. Anything else is
a fault. tests/unit/test_fuzz.py runs each briefly, the same each time; scripts/fuzz for as long as wanted.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from honed.check import preflight
from honed.check.checklist import Asked
from honed.cli import honectl, terminal
from honed.inputs import basemodel, dataset, media, row
from honed.inputs.row import RowError
from honed.job import database, event
from honed.job.job import Attempt, Job, State
from honed.job.spool import Spool
from honed.page import report, story
from honed.run import outcome, runner, shim
from honed.run.runner import Exit
from honed.send import outbox
from honed.spec import config, document, jobfile
from honed.spec.config import Config
from honed.spec.media import MediaLimits
from honed.spec.spec import DatasetSpec
from honed.system.control import Request, Server, _Connection
from honed.system.device import cpu
from honed.system.error import DatasetError, HonedError, ModelError, SpecError
from honed.system.layout import Layout
from honed.system.personpath import PersonPath
from zoo import plain

#: Characters of a rejection; nobody reads a longer one.
MAX_MESSAGE = 16 * 1024
Run = Callable[[Path, Any], None]


@dataclass(frozen=True)
class Target:
    """A reader and its input."""

    name: str
    examples: st.SearchStrategy[Any]
    run: Run  #: gets a directory of its own; raises for anything but a value or a rejection
    is_native: bool = False  #: a C library reads; its crash is no fault of honed's, but must not end the whole run


# --- What comes from outside ------------------------------------------------------------------------------------------

#: Texts with which readers, terminals, logs and databases have had trouble.
NASTY = (
    "",
    " ",
    "\x1b[31mred\x1b]0;title\x07",
    "\x9b2J",
    "\u202ekcatta\u202c",
    "\u200f",
    "[bold]x[/bold]",
    "[/]",
    "\n",
    "a\nb",
    "\r\n",
    "\u2028",
    "\u0085",
    "\0",
    "\ud800",
    "\udcff",
    "\ufeff",
    "\ufffe",
    "<script>alert(1)</script>",
    "&lt;",
    "'; DROP TABLE jobs; --",
    "%s %(x)s {0} {x}",
    "$(reboot)",
    "../../etc/passwd",
    "=cmd()",
    "x" * 5000,
    "é" * 300,
    "null",
    "nan",
    "1e999",
    "0x10",
    "1_000",
    "010",
    "1:30",
    "2026-11-20",
    "yes",
    "~",
    "*a",
    "&a",
    "!!python/none",
    "- x",
    "#",
    "---",
    "...",
    "%TAG",
    "\\",
    '"',
    "'",
    "job:1",
    "/",
    "//",
    "~/x",
    "\U0001f600",
    "<image>",
    "<|im_end|>",
)
TEXT = st.one_of(st.sampled_from(NASTY), st.text(max_size=12))
INTEGERS = st.one_of(
    st.integers(-3, 40), st.sampled_from([2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**40, 10**400])
)
FLOATS = st.one_of(st.sampled_from([0.0, -0.0, 0.5, 1e-320, 1e308, math.nan, math.inf, -math.inf]), st.floats(width=32))
LEAVES = st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, TEXT)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
#: Nested deeper than any reader of ours needs, and less deep than JSON's own reader gives up at.
DEEP = st.builds(
    lambda depth, inner: functools.reduce(lambda value, _: [value], range(depth), inner),
    st.sampled_from([60, 200, 400, 900]),
    LEAVES,
)


def json_bytes(value: Any) -> bytes:
    """Return JSON as Python writes it, lone surrogates, NaN and huge numbers included."""
    return json.dumps(value).encode()


@st.composite
def mutated(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """Draw one of the seeds, cut, doubled, overwritten and spliced in a few places."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(len(data), 1) - 1))
        length = draw(st.integers(0, 12))
        match draw(st.integers(0, 4)):
            case 0:
                del data[at:]
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length] * draw(st.integers(1, 40))
            case 3:
                data[at : at + length] = draw(st.binary(max_size=12))
            case _:
                data[at:at] = draw(st.sampled_from(_TOKENS))
    return bytes(data)


_TOKENS = (
    b"\0",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\x80",
    b"\n",
    b"\r\n",
    b"\r",
    b"\t",
    b"[" * 300,
    b"{" * 300,
    b'{"a":' * 200,
    b"- " * 100,
    b'"',
    b"'",
    b'"""',
    b":",
    b",",
    b"=",
    b"#",
    b"&a ",
    b"*a",
    b"<<: ",
    b"!!int ",
    b"---\n",
    b"%TAG ! x\n",
    b"9" * 5000,
    b"1e99999",
    b"NaN",
    b"-Infinity",
    b"\\ud800",
    b"\\u0000",
    b"\x1b[2J",
    b"a.b.c.d=1\n",
    b"[[datasets]]\n",
    b"[a.b]\n",
)


@st.composite
def garbled(draw: st.DrawFn, value: Any) -> Any:
    """Draw a value in which some parts are changed: of another type, missing, or new."""
    for _ in range(draw(st.integers(1, 3))):
        value = draw(_garble(value))
    return value


@st.composite
def _garble(draw: st.DrawFn, value: Any) -> Any:
    is_here = draw(st.integers(0, 3)) == 0
    match value:
        case dict() if value and not is_here:
            key = draw(st.sampled_from(sorted(value)))
            if draw(st.integers(0, 4)) == 0:
                return {each: item for each, item in value.items() if each != key}
            return {**value, key: draw(_garble(value[key]))}
        case list() if value and not is_here:
            at = draw(st.integers(0, len(value) - 1))
            return [*value[:at], draw(_garble(value[at])), *value[at + 1 :]]
        case dict() if draw(st.booleans()):
            return {**value, draw(TEXT): draw(VALUES)}
        case list() if draw(st.booleans()):
            return [*value, draw(VALUES)]
        case int() | float() if draw(st.booleans()):
            return draw(INTEGERS | FLOATS)
        case str() if draw(st.booleans()):
            return draw(TEXT)
        case _:
            return draw(VALUES | DEEP)


# --- What may come of it ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def refusing(*kinds: type[HonedError], place: str = "") -> Iterator[None]:
    """Check that an error of these kinds in the block has a printable message of limited length that names its
    place."""
    try:
        yield
    except kinds as error:
        assert error.code != "error", error.message
        check_words(error.message)
        check_words(error.hint)
        assert error.message.strip()
        assert place in error.message, error.message


def check_words(text: str) -> None:
    """Check a message for a person: of limited length, and without control sequences for a terminal."""
    assert len(text) <= MAX_MESSAGE, len(text)
    text.encode()
    assert all(char.isprintable() or char == "\n" for char in text), ascii(text[:300])


# --- Specs and configuration ------------------------------------------------------------------------------------------

_SPEC = {
    "name": "capitals", "priority": 3, "base_model": "/m/base", "model_type": "qwen3", "dtype": "auto",
    "quantization": "none", "lora": {"r": 16, "target_modules": ["q_proj"], "lora_dropout": 0.1},
    "datasets": [{"path": "/d/a.jsonl", "fraction": 0.7, "columns": {"text": "body"}}, {"path": "/d/b", "fraction": 0.3}],
    "eval_split": 0.05, "training": {"learning_rate": 2e-4, "num_train_epochs": 3, "eval_strategy": "steps"},
    "predictions": {"num_samples": 5, "prompts": ["a", "b"]}, "retry": {"max_attempts": 2}, "output_dir": "/o",
    "depends_on": ["x", "7"], "report_to": ["tensorboard"], "chat_template_kwargs": {"enable_thinking": False},
    "notify": {"webhook": "https://example.org/x", "mail": "a@example.org"}, "media": {"max_pixels": 1000},
    "guard": {"metric": "exact_match", "max_drop": 0.1}, "save_interval_sec": 60, "trial": True,
}  # fmt: skip


def as_yaml(value: Any) -> str:
    """Return YAML in block style, with texts in double quotes."""
    return "".join(f"{line}\n" for line in _yaml_lines(value))


def _yaml_lines(value: Any) -> Iterator[str]:
    match value:
        case dict() if value:
            for key, item in value.items():
                lines = list(_yaml_lines(item))
                if isinstance(item, dict | list) and item:
                    yield f"{_quoted(key)}:"
                    yield from (f"  {line}" for line in lines)
                else:
                    yield f"{_quoted(key)}: {lines[0]}"
        case list() if value:
            for item in value:
                first, *more = _yaml_lines(item)
                yield f"- {first}"
                yield from (f"  {line}" for line in more)
        case str():
            yield _quoted(value)
        case float() if not math.isfinite(value):
            yield ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        case _:
            yield json.dumps(value)


def as_toml(value: Any) -> str:
    """Return TOML of a mapping without null, its sections as inline tables."""
    return "".join(f"{_quoted(key)} = {_toml_value(item)}\n" for key, item in value.items())


def _toml_value(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{_quoted(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_toml_value, value)) + "]"
        case str():
            return _quoted(value)
        case None:
            return '"none"'
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return json.dumps(value)


def _quoted(text: str) -> str:
    """Return a text in double quotes, as YAML and TOML both read it."""
    short = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(short.get(char) or (char if " " <= char <= "~" else _escape(char)) for char in text) + '"'


def _escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _rendered(value: Any) -> dict[str, bytes]:
    made = {".yaml": as_yaml(value), ".json": json.dumps(value), ".toml": as_toml(value)}
    return {suffix: text.encode(errors="surrogatepass") for suffix, text in made.items()}


_SPEC_FILES = tuple(_rendered(_SPEC).items())


@st.composite
def _spec_bytes(draw: st.DrawFn) -> tuple[str, bytes]:
    suffix, data = draw(st.sampled_from(_SPEC_FILES))
    return draw(st.sampled_from([suffix, suffix, suffix, ".yml"])), draw(
        st.one_of(mutated((data,)), st.binary(max_size=60), TEXT.map(lambda text: text.encode(errors="surrogatepass")))
    )


def _run_spec_bytes(_directory: Path, example: tuple[str, bytes]) -> None:
    with refusing(SpecError):
        jobfile.loads(example[1], example[0])


def _run_spec_values(_directory: Path, value: Any) -> None:
    """Check for a spec or a rejection that names the key, equal in every format that can express the values."""
    if not isinstance(value, dict):
        return
    told = []
    for suffix, data in _rendered(value).items():
        with refusing(SpecError):
            told.append(jobfile.loads(data, suffix))
            continue
        told.append(None)
    by_format = dict(zip((".yaml", ".json", ".toml"), told, strict=True))
    assert by_format[".yaml"] == by_format[".json"]
    if _has_no_null(value):
        assert by_format[".toml"] == by_format[".json"]


def _has_no_null(value: Any) -> bool:
    match value:
        case dict():
            return all(map(_has_no_null, value.values()))
        case list():
            return all(map(_has_no_null, value))
        case _:
            return value is not None


#: Values that every format can represent.
_PLAIN_TEXT = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\ufeff\ufffe\uffff\u2028\u2029"), max_size=20
) | st.sampled_from([text for text in NASTY if text.isprintable() and 0 < len(text) < 100])
_PLAIN_VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _PLAIN_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_PLAIN_TEXT.filter(bool), inner, max_size=3),
    max_leaves=8,
)


def _run_round_trip(_directory: Path, value: dict[str, Any]) -> None:
    """Check that plain data are read as they were written, in all three formats, each key with its line."""
    documents = {suffix: document.parse(data, suffix) for suffix, data in _rendered(value).items()}
    for found in documents.values():
        assert found.data == value
        assert json.dumps(found.data) == json.dumps(value)  # 1 is not 1.0, nor true
        assert {(key,) for key in value} <= set(found.lines)


_CONFIG_TOML = as_toml(Config().model_dump(mode="json", exclude_none=True)).encode()
_CONFIG_SECTIONS = b"""\
# the administrator's
[spool]
settle_sec = 1.5
[jobs]
max_running = 2
runner = "process"
[policy]
allowed_paths = ["/srv", '/home']
[reporting]
metrics_api_url = "https://example.org/x"
"""


def _run_config(directory: Path, data: bytes) -> None:
    layout = Layout(directory)
    layout.config_path.parent.mkdir(parents=True, exist_ok=True)
    layout.config_path.write_bytes(data)
    with refusing(SpecError, place=str(layout.config_path)):
        config.load(layout)


# --- Data sets --------------------------------------------------------------------------------------------------------

_ROWS = (
    {
        "messages": [
            {"role": "user", "content": "a?"},
            {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
        ],
        "tools": '[{"name": "f"}]',
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": "b"},
        ],
        "images": ["cat.png"],
    },
    {"prompt": "a", "completion": "b"},
    {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
    {"instruction": "a", "input": "", "output": "b", "history": [["c", "d"]], "system": "s"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"text": "a", "audio": {"bytes": None, "path": "a.wav"}, "video": ["1.png", "2.png"]},
)
_FORMATS = ("auto", "messages", "prompt_completion", "alpaca", "sharegpt", "text")


def _csv_bytes(rows: list[dict[str, str]]) -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, ["prompt", "completion"])
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


_JSONL = b"".join(json_bytes(each) + b"\n" for each in _ROWS)
_CSV = _csv_bytes([{"prompt": "a, b", "completion": 'c "d"\ne'}, {"prompt": "f", "completion": "g"}])


@st.composite
def _row_file(draw: st.DrawFn) -> tuple[str, bytes, str]:
    suffix = draw(st.sampled_from([".jsonl", ".json", ".csv"]))
    form = draw(st.sampled_from(_FORMATS))
    if draw(st.booleans()):
        seeds = {
            ".jsonl": (_JSONL,),
            ".json": (json_bytes(list(_ROWS)), json_bytes({"data": [_ROWS[2]]})),
            ".csv": (_CSV,),
        }
        return suffix, draw(mutated(seeds[suffix])), form
    rows = [draw(garbled(draw(st.sampled_from(_ROWS)))) for _ in range(draw(st.integers(1, 3)))]
    return ".jsonl", b"\n".join(map(json_bytes, rows)), form


def _dataset_spec(path: Path, form: str) -> DatasetSpec:
    return DatasetSpec.model_validate({"path": str(path), "format": form})


def _run_row_file(directory: Path, example: tuple[str, bytes, str]) -> None:
    suffix, data, form = example
    path = directory / f"rows{suffix}"
    path.write_bytes(data)
    _read_rows(directory, path, form)


def _read_rows(directory: Path, path: Path, form: str) -> None:
    made = _dataset_spec(path, form)
    try:
        with refusing(DatasetError, place=str(path)):
            found = dataset.inspect(made, num_rows=50)
            for words in (*found.bad, *found.broken, *found.overlooked):
                assert len(words) <= MAX_MESSAGE
        with refusing(DatasetError, place=str(path)):
            mixture = dataset.load([made], seed=1, has_chat_template=True, spill_dir=directory / "media")
            json.dumps([each.messages for each in mixture.examples], ensure_ascii=False).encode()
            "".join(each.prompt + each.completion + each.text for each in mixture.examples).encode()
    finally:
        path.unlink()


def _run_row(_directory: Path, example: tuple[Any, str, bool]) -> None:
    value, form, has_chat_template = example
    if not isinstance(value, dict):
        return
    with contextlib.suppress(RowError), refusing(DatasetError):
        row.convert(value, row.recognise(value) if form == "auto" else form, has_chat_template=has_chat_template)


@functools.cache
def _parquet_seeds() -> tuple[bytes, ...]:
    import pyarrow
    import pyarrow.parquet

    seeds = []
    for columns, options in (
        ({"prompt": ["a", "b"], "completion": ["c", "d"]}, {}),
        ({"messages": [_ROWS[5]["conversations"]], "n": [2**62]}, {"compression": "none"}),
        ({"text": ["a" * 50] * 300}, {"compression": "gzip", "data_page_version": "2.0"}),
    ):
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns), file, **options)
        seeds.append(file.getvalue())
    return tuple(seeds)


def _run_parquet(directory: Path, data: bytes) -> None:
    path = directory / "rows.parquet"
    path.write_bytes(data)
    _read_rows(directory, path, "auto")


# --- Base models ------------------------------------------------------------------------------------------------------

_HEADER = {
    "a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
    "__metadata__": {"format": "pt"},
}


@st.composite
def _safetensors(draw: st.DrawFn) -> bytes:
    header = draw(
        st.one_of(garbled(_HEADER).map(json_bytes), mutated((json.dumps(_HEADER).encode(),)), st.binary(max_size=40))
    )
    length = draw(
        st.one_of(st.just(len(header)), st.integers(0, 2**64 - 1), st.sampled_from([2**63, 2**64 - 1, 0, 99_999_999]))
    )
    return length.to_bytes(8, "little") + header + bytes(draw(st.sampled_from([22, 22, 22, 0, 21, 23])))


def _run_safetensors(directory: Path, data: bytes) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(data)
    with refusing(ModelError, place=str(path)):
        basemodel.read_header(path, hint="copy it")


def _model_dir(directory: Path) -> Path:
    """Make a model, a data set, an adapter and a job, once."""
    if not (directory / "model").is_dir():
        plain.write_base_model(directory / "model")
        plain.write_adapter(directory / "adapter")
        plain.write_dataset(directory / "rows.jsonl", num_rows=2)
    return directory


MODEL_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
    "dtype": "float32",
    "max_position_embeddings": 128,
    "head_dim": 4,
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "rope_scaling": {"type": "linear"},
    "tie_word_embeddings": False,
    "auto_map": {"AutoModel": "x.Y"},
}
_VISION_CONFIG = MODEL_CONFIG | {
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "depth": 1,
        "hidden_size": 8,
        "patch_size": 14,
        "num_heads": 2,
        "spatial_merge_size": 2,
        "image_size": 28,
        "window_size": 112,
    },
    "image_token_id": 5,
    "image_grid_pinpoints": [[14, 28]],
    "text_config": {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 32},
    "audio_config": {"d_model": 8, "encoder_layers": 1},
    "thinker_config": None,
}
_TOKENIZER = {
    "chat_template": [{"name": "default", "template": plain.TEMPLATE}],
    "eos_token": {"content": "<|im_end|>"},
    "added_tokens_decoder": {"1": {"content": "x"}},
}
_PROCESSOR = {
    "image_processor": {
        "patch_size": 14,
        "merge_size": 2,
        "min_pixels": 100,
        "max_pixels": 10000,
        "size": {"shortest_edge": 3, "longest_edge": 9},
    },
    "patch_size": 14,
    "feature_extractor": {"chunk_length": 30},
}
_ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
_INDEX = {"metadata": {"total_size": 1}, "weight_map": {"lm_head.weight": "model.safetensors"}}
#: A model's files that are garbled, one at a time.
_MODEL_FILES: dict[str, Any] = {
    "model/config.json": MODEL_CONFIG,
    "model/config.json+vision": _VISION_CONFIG,
    "model/tokenizer_config.json": _TOKENIZER,
    "model/processor_config.json": _PROCESSOR,
    "model/preprocessor_config.json": _PROCESSOR["image_processor"],
    "adapter/adapter_config.json": _ADAPTER,
    "model/model.safetensors.index.json": _INDEX,
    "model/generation_config.json": {"eos_token_id": [1]},
    "model/tokenizer.json": {"model": {"type": "BPE"}, "added_tokens": [{"id": 1, "content": "x"}]},
}


@st.composite
def _model_file(draw: st.DrawFn) -> tuple[str, bytes]:
    name = draw(st.sampled_from(sorted(_MODEL_FILES)))
    seed = _MODEL_FILES[name]
    return name, draw(
        st.one_of(garbled(seed).map(json_bytes), garbled(seed).map(json_bytes), mutated((json_bytes(seed),)))
    )


def _run_model_file(directory: Path, example: tuple[str, bytes]) -> None:
    """Run the whole check of a job whose model has one garbled file: it gives a verdict, or a rejection."""
    name, data = example
    _model_dir(directory)
    work = directory / "work"
    shutil.copytree(directory / "model", work / "model")
    shutil.copytree(directory / "adapter", work / "adapter")
    if name.endswith("+vision"):
        (work / "model/processor_config.json").write_text(json.dumps(_PROCESSOR))
    if name.endswith("index.json"):
        (work / "model/model.safetensors").rename(work / "model/model-1.safetensors")
    (work / name.removesuffix("+vision")).write_bytes(data)
    keys: dict[str, Any] = {"resources": {"gpus": 0}}
    if name.startswith("adapter"):
        keys |= {"adapter": str(work / "adapter"), "lora": None}
    path = work / "job.json"
    path.write_text(json.dumps(plain.spec(work / "model", directory / "rows.jsonl", **keys)))
    try:
        with refusing(HonedError), contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                preflight.check(path, Asked(Layout(work / "root"), config=Config(), device=cpu()))
            except HonedError as error:
                assert error.code != "error", said.getvalue()
                raise
    finally:
        shutil.rmtree(work)


# --- Media ------------------------------------------------------------------------------------------------------------


@functools.cache
def _pictures() -> tuple[bytes, ...]:
    import numpy as np
    from PIL import Image

    pixels = np.arange(16 * 12 * 3, dtype="uint8").reshape(12, 16, 3)
    picture, seeds = Image.fromarray(pixels), []
    for form in ("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP", "PPM", "ICO", "JPEG2000"):
        file = io.BytesIO()
        with contextlib.suppress(OSError, KeyError):  # a Pillow without that codec
            options = (
                {"exif": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"}
                if form == "JPEG"
                else {}
            )
            picture.save(file, form, **options)
            seeds.append(file.getvalue())
    file = io.BytesIO()
    picture.convert("P").save(file, "GIF", save_all=True, append_images=[picture.convert("P")] * 3, duration=10)
    return (*seeds, file.getvalue())


@functools.cache
def _recordings() -> tuple[bytes, ...]:
    import wave

    import av
    import numpy as np

    sound = io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(1600))
    film = io.BytesIO()
    with av.open(film, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        for n in range(5):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), n * 40, dtype="uint8"), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return sound.getvalue(), film.getvalue()


_LIMITS = MediaLimits(max_pixels=10_000, num_frames=4)


def _run_picture(directory: Path, example: tuple[bytes, str]) -> None:
    data, suffix = example
    path = directory / f"x{suffix}"
    path.write_bytes(data)
    for kind in ("image", "video"):
        each = media.Media(kind, path)
        if kind == "video" and suffix not in (".gif", ".webp", ".png"):
            continue
        with refusing(media.MediaError, place=str(path)):
            media.probe(each)
        with refusing(media.MediaError, place=str(path)):
            media.image(each, _LIMITS) if kind == "image" else media.frames(each, _LIMITS)
    path.unlink()


def _run_recording(directory: Path, example: tuple[bytes, str]) -> None:
    data, kind = example
    path = directory / "x.mp4"
    path.write_bytes(data)
    each = media.Media("video" if kind == "video" else "audio", path)
    with refusing(media.MediaError, place=str(path)):
        media.probe(each)
    with refusing(media.MediaError, place=str(path)):
        media.frames(each, _LIMITS) if kind == "video" else media.audio(each, 8000)
    path.unlink()


# --- What workers tell ------------------------------------------------------------------------------------------------

_EVENTS: tuple[dict[str, Any], ...] = (
    {"event": "started", "pid": 3, "versions": {"torch": "2"}, "backend": "unsloth"},
    {"event": "stage", "stage": "train"},
    {"event": "log", "level": "warning", "message": "x", "code": "mask_invalid"},
    {"event": "audit", "when": "loaded", "model_dtype": "float32", "config_dtype": "float32", "embedding_dtype": "float32",
     "quantization": None, "counts": [{"role": "base", "dtype": "float32", "device": "cpu", "num_parameters": 3}],
     "mended": ["x"]},
    {"event": "data", "num_train": 3, "num_eval": 1, "num_truncated": 0, "num_dropped": 0,
     "lengths": {"width": 8, "counts": [1, 2]}},
    {"event": "example", "segments": [{"text": "a", "trained": True}, {"text": "b", "trained": False}]},
    {"event": "memory", "when": "built", "weights_bytes": 3, "adapter_bytes": 4, "resident_peak_bytes": 5},
    {"event": "step", "step": 3, "num_steps": 10, "epoch": 0.5, "loss": 1.5, "learning_rate": 1e-4, "eta_sec": 5.0},
    {"event": "evaluation", "step": 3, "epoch": 0.5, "metrics": {"eval_loss": 1.0}},
    {"event": "samples", "rows": [{"sample_index": 0, "thumbnails": ["/9j/4AAQ"]}]},
    {"event": "predictions", "step": 3, "epoch": 0.5, "num_failed": 0, "scores": {"exact_match": 1.0},
     "rows": [{"sample_index": 0, "prompt": "p", "ground_truth": "g", "prediction": "q"}]},
    {"event": "guard", "step": 3, "epoch": 0.5, "metric": "exact_match", "line": 0.5, "scores": {"exact_match": 1.0}},
    {"event": "trial", "verdict": "learns", "loss_before": 2.0, "loss_after": 1.0, "whole_sec": 5, "peak_bytes": 5},
    {"event": "checkpoint", "step": 3, "path": "/x"},
    {"event": "fallback", "from": "unsloth", "to": "transformers", "reason": "r"},
    {"event": "artifact", "name": "output_dir", "path": "/x"},
    {"event": "finished", "outcome": "succeeded", "step": 3, "metrics": {"loss": 1.0}},
)  # fmt: skip
EVENT_LINES = st.lists(
    st.one_of(
        st.sampled_from(_EVENTS)
        .flatmap(garbled)
        .map(lambda value: json_bytes({"time": 1.8e9, **value} if isinstance(value, dict) else value)),
        st.sampled_from(_EVENTS).map(lambda value: json_bytes({"time": 1.8e9, **value})),
        mutated(tuple(json_bytes({"time": 1.8e9, **each}) for each in _EVENTS)),
        st.binary(max_size=30),
    ),
    max_size=5,
).map(lambda lines: b"".join(line + b"\n" for line in lines))


def _job(**changes: Any) -> Job:
    attempts = (Attempt(1, "transformers", 1.8e9),)
    return Job(
        **{
            "id": 1,
            "name": "x",
            "submitted_at": 1.8e9,
            "source": "x.yaml",
            "uid": 1000,
            "output_dir": "/o",
            "attempts": attempts,
            "state": State.RUNNING,
            **changes,
        }
    )


def _run_events(directory: Path, data: bytes) -> None:
    """Process events as the daemon counts and sends them, and as honectl and the report show them."""
    for each in directory.iterdir():
        shutil.rmtree(each)
    layout, job = Layout(directory), _job()
    spool = Spool(layout, lock=False)
    (spool.state_dir(State.FAILED) / "1.json").write_bytes(job.to_json())
    path = layout.job(1).attempt(1).events_path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    reading = event.read(PersonPath.own(path), 0)
    assert reading.offset == len(data)
    made = database.Database(layout.database_path)
    made.put_job(job)
    made.apply(job, reading)
    made.close()
    box = outbox.Outbox(layout.outbox_dir, max_bytes=10**8)
    assert box.put(job, reading) == 0
    _, _, num_bad = outbox.read(layout.outbox_dir, outbox.Position(0, 0), max_rows=10**6, max_bytes=10**9)
    assert not num_bad
    for arguments in (
        ["list"],
        ["list", "--json"],
        ["show", "1"],
        ["show", "1", "--json"],
        ["logs", "1"],
        ["watch", "1"],
        ["predictions", "1"],
        ["predictions", "1", "--csv"],
        ["predictions", "1", "--json"],
    ):
        # A program gets CSV unchanged; a terminal, as which this output poses, gets it escaped.
        terminal.console._force_terminal = True if "--csv" in arguments else None
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            honectl.main(["--root", str(directory), *arguments])
        terminal.console._force_terminal = None
        text = said.getvalue()
        text.encode()
        if "--json" in arguments:
            json.loads(text)
        check_shown(text.replace("\r\n", "\n"))
    page = report.render(story.gather(spool, layout, job), now=1.8e9).decode()
    assert "<script" not in page.lower()


def check_shown(text: str) -> None:
    """Check that the text contains no control characters that act on a terminal."""
    text.encode()
    assert all(char.isprintable() or char == "\n" for char in text), ascii(text[:300])


_RESULT = {
    "outcome": "failed",
    "step": 3,
    "metrics": {"train_loss": 0.5},
    "artifacts": {"output_dir": "/x", "merged": None},
    "error": {"code": "mask_invalid", "message": "m", "hint": "h"},
}
_EXIT = {
    "start": 1,
    "status": 0,
    "signal": None,
    "ended_at": 1.8e9,
    "max_resident_bytes": 5,
    "was_out_of_memory": False,
    "was_asked": False,
    "service_result": "success",
    "system_state": "running",
    "ran": True,
    "ended_monotonic": 7.5,
    "boot_id": "b",
}


def _files(*seeds: Any) -> st.SearchStrategy[bytes]:
    chosen = st.sampled_from(seeds)
    return st.one_of(chosen.flatmap(garbled).map(json_bytes), mutated(tuple(map(json_bytes, seeds))))


def _run_result(directory: Path, example: tuple[bytes, bytes]) -> None:
    """Read result.json and exit.json, and build the entry that they end in."""
    attempt = Layout(directory).job(1).attempt(1)
    attempt.dir.mkdir(parents=True, exist_ok=True)
    attempt.result_path.write_bytes(example[0])
    attempt.exit_path.write_bytes(example[1])
    shim.has_ended(str(attempt.dir), 1)
    ended = runner.exit_of(runner.read_exit_record(Layout(directory).files(1).attempt(1), 1))
    for each in (ended, Exit(0, None), Exit(81, None)):
        judged = outcome.judge(PersonPath.of(attempt.result_path, 3), each)
        job = _job(error=judged.error.as_dict() if judged.error else None, outcome=judged.code)
        entry = job.with_attempt(outcome=judged.code, step=judged.step or 0).to_json()
        assert len(entry) < 8 * MAX_MESSAGE
        assert Job.from_json(entry, State.FAILED).error == job.error
        json.dumps([judged.metrics, judged.artifacts]).encode()


_REQUESTS = (
    {"verb": "list"},
    {"verb": "show", "id": "7"},
    {"verb": "requeue", "id": "x", "from_start": True},
    {"verb": "status"},
    {"verb": "refusal", "id": "x.yaml"},
)


def _run_request(_directory: Path, line: bytes) -> None:
    """Check that every line gets an answer, which is one line of JSON."""
    server = Server.__new__(Server)
    server._answer, server._faults = _echo, {}
    answer = server._respond(line.split(b"\n")[0], _Connection(None, 1000, frozenset()))  # type: ignore[arg-type]
    assert isinstance(answer, bytes)
    assert answer.count(b"\n") == 1
    told = json.loads(answer)
    assert told["ok"] or told["error"]["code"] == "usage", told


def _echo(request: Request) -> dict[str, str]:
    return {"verb": request.verb, "id": str(request.arguments.get("id", ""))}


_OUTBOX_ROW = {"kind": "metric", "idempotency_key": "x", "job_id": "1", "value": 0.5}


def _run_outbox(directory: Path, example: tuple[bytes, bytes]) -> None:
    path = directory / "outbox"
    outbox.make_dirs(path)
    (path / "1.jsonl").write_bytes(example[0])
    (path / "2.jsonl").write_bytes(json_bytes(_OUTBOX_ROW) + b"\n")
    for name in ("sender/cursor.json", "sender/trouble.json", "lost.json"):
        (path / name).write_bytes(example[1])
    outbox.read_cursor(path)
    outbox.read_trouble(path)
    outbox.num_lost(path)
    outbox.num_waiting_bytes(path)
    rows, position, _ = outbox.read(path, outbox.Position(0, 0), max_rows=100, max_bytes=10**6)
    assert rows[-1].data == _OUTBOX_ROW
    assert position.segment == 2
    outbox.read(path, outbox.read_cursor(path), max_rows=100, max_bytes=10**6)
    Job.from_json(_job().to_json(), State.QUEUED)
    with contextlib.suppress(ValueError):
        Job.from_json(example[1], State.QUEUED)


# --- All of them ------------------------------------------------------------------------------------------------------

TARGETS: tuple[Target, ...] = (
    Target("spec files", _spec_bytes(), _run_spec_bytes),
    Target("spec values", garbled(_SPEC), _run_spec_values),
    Target("spec round trip", st.dictionaries(_PLAIN_TEXT.filter(bool), _PLAIN_VALUES, min_size=1, max_size=4), _run_round_trip),
    Target("honed.toml", st.one_of(mutated((_CONFIG_TOML, _CONFIG_SECTIONS)),
           garbled(Config().model_dump(mode="json", exclude_none=True)).filter(lambda value: isinstance(value, dict))
           .map(lambda value: as_toml(value).encode(errors="surrogatepass"))), _run_config),
    Target("rows", st.tuples(st.sampled_from(_ROWS).flatmap(garbled), st.sampled_from(_FORMATS), st.booleans()), _run_row),
    Target("row files", _row_file(), _run_row_file),
    Target("parquet", st.deferred(lambda: mutated(_parquet_seeds())), _run_parquet, is_native=True),
    Target("safetensors headers", _safetensors(), _run_safetensors),
    Target("model files", _model_file(), _run_model_file),
    Target("pictures", st.tuples(st.deferred(lambda: mutated(_pictures())), st.sampled_from([".png", ".gif", ".jpg", ".webp"])),
           _run_picture, is_native=True),
    Target("recordings", st.tuples(st.deferred(lambda: mutated(_recordings())), st.sampled_from(["video", "audio"])),
           _run_recording, is_native=True),
    Target("events", EVENT_LINES, _run_events),
    Target("results and exits", st.tuples(_files(_RESULT, {**_RESULT, "outcome": "succeeded"}), _files(_EXIT)), _run_result),
    Target("requests", st.one_of(_files(*_REQUESTS), st.binary(max_size=40)), _run_request),
    Target("outbox", st.tuples(_files(_OUTBOX_ROW), _files({"segment": 1, "offset": 3}, {"num_rows": 5}, {"trouble": "x"},
           json.loads(_job().to_json()))), _run_outbox),
)  # fmt: skip


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """A directory for a target's files, in memory where the machine has /dev/shm."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="honed-fuzz-", dir=place) as made:
        yield Path(made)


__all__ = ["TARGETS", "Target", "directory"]
