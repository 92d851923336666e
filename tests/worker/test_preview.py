"""`python -m honed.worker.preview`: a real run, on a directory with a tokenizer and nothing to train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import warm
from zoo.model import build_checkpoint
from zoo.tokenizer import build_tokenizer

#: honectl, whose preview's process starts warm.
HONECTL = Path(__file__).parents[1] / "process/warmpreview.py"
ROWS = [
    {"messages": [{"role": "user", "content": f"What is {n}+1?"}, {"role": "assistant", "content": f"It is {n + 1}."}]}
    for n in range(6)
]


@pytest.fixture
def spec_path(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    build_tokenizer("qwen3").save_pretrained(model)
    (model / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    lines = [json.dumps(row) for row in [ROWS[0], {"messages": ROWS[0]["messages"][:1]}, *ROWS[1:]]]
    lines[3] = lines[3].replace('"role": "user"', '"role": "user", "name": "Ann"')
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    path = tmp_path / "job.yaml"
    spec = {"base_model": str(model), "datasets": [{"path": str(tmp_path / "rows.jsonl")}]}
    path.write_text(yaml.safe_dump(spec))
    return path


def change(spec_path: Path, **keys: Any) -> None:
    spec_path.write_text(yaml.safe_dump(yaml.safe_load(spec_path.read_text()) | keys))


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "honed.worker.preview", *map(str, arguments)]
    return warm.run(command, popen=warm.WorkerPopen)


def test_rows_are_shown_as_they_will_be_trained_on(spec_path: Path) -> None:
    done = run(spec_path, "--json", "--rows", 3)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["row"] for row in rows] == [1, 3, 4]
    assert rows[0]["segments"] == [
        {"text": "<|im_start|>user\nWhat is 0+1?<|im_end|>\n<|im_start|>assistant\n", "trained": False},
        {"text": "<think>\n\n</think>\n\nIt is 1.<|im_end|>", "trained": True},
        {"text": "\n", "trained": False},
    ]
    assert [row["omitted"] for row in rows] == [[], [], [{"kind": "name", "message": 1, "text": "Ann"}]]
    assert 0 < rows[0]["num_trained"] < rows[0]["num_tokens"]
    assert not rows[0]["is_truncated"]
    assert rows[0]["dataset"].endswith("rows.jsonl")
    assert "line 2: no assistant turn" in done.stderr


def test_a_turn_of_weight_0_is_shown_as_context(spec_path: Path) -> None:
    first, second = ROWS[0]["messages"], ROWS[1]["messages"]
    rows = [
        {"messages": [first[0], first[1] | {"weight": 0}, *second]},
        {"messages": [first[0], first[1] | {"train": 0}]},
    ]
    (spec_path.parent / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run(spec_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("---") == 1
    assert "It is 1.<|im_end|>\n<|im_start|>user\nWhat is 1+1?" in done.stdout
    assert "assistant\n⟦<think>\n\n</think>\n\nIt is 2.<|im_end|>⟧" in done.stdout
    assert "row 2: no assistant turn to train on: all of them have weight 0" in done.stderr


def test_what_a_row_says_acts_on_no_terminal_and_forges_no_row(spec_path: Path) -> None:
    said = "\u202eturned\u202c \x9b2J\x1b[2J\nrows.jsonl: row 9: 7 tokens, 7 trained (100%)"
    rows = [{"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": said}]}]
    (spec_path.parent / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    change(spec_path, base_model=str(build_checkpoint(spec_path.parent / "whole")))  # which honectl checks first
    assert said in "".join(piece["text"] for piece in json.loads(run(spec_path, "--json").stdout)[0]["segments"])
    command = [sys.executable, str(HONECTL), "--root", str(spec_path.parent), "preview", str(spec_path)]
    plain = warm.run(command, check=True)
    as_json = warm.run([*command, "--json"], check=True)
    for done in (run(spec_path), run(spec_path, "--json"), plain, as_json):
        assert all(char.isprintable() or char == "\n" for char in done.stdout + done.stderr), ascii(done.stdout)
    assert not [line for line in plain.stdout.splitlines() if line.startswith("rows.jsonl: row 9")]


def test_rows_are_cut_and_rendered_as_the_spec_says(spec_path: Path) -> None:
    change(spec_path, training={"max_length": 24}, chat_template_kwargs={"enable_thinking": False}, eval_split=0.5)
    done = run(spec_path, "--rows", 9)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--- row ") == 3
    assert "24 tokens" in done.stdout
    assert "left out by the template: message 1, names of speakers: 'Ann'" in done.stdout
    assert "preview: names of speakers: write the name in the content" in done.stderr
    assert "truncated" in done.stdout
    change(spec_path, training={"max_length": 200})
    assert "assistant\n<think>\n\n</think>\n\n⟦It is " in run(spec_path).stdout


def test_a_fault_is_one_sentence_and_an_exit_status(spec_path: Path) -> None:
    (spec_path.parent / "rows.jsonl").write_text("{")
    done = run(spec_path, "--json")
    assert done.returncode == 65
    assert "line 1, column 2" in json.loads(done.stdout)["error"]["message"]
    done = run(spec_path)
    assert (done.returncode, done.stdout) == (65, "")
    assert "line 1, column 2" in done.stderr
    assert "Traceback" not in done.stderr
    change(spec_path, base_model=str(spec_path.parent / "nowhere"))
    done = run(spec_path)
    assert done.returncode == 66
    assert "Traceback" not in done.stderr
