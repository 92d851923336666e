"""Rows that cannot be trained on: `honectl check` and a dropped job reject the same file with the same message."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from harness import DEADLINE_SEC, Instance


def turns(*roles_and_words: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": words, **more} for role, words in roles_and_words]}


GOOD = turns(("user", "Why?"), ("assistant", "So."))
ROWS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "preferences": ([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4, {}),
    "no-answers": ([{"prompt": "a"}] * 4, {}),
    "user-alone": ([turns(("user", "Why?"))] * 4, {}),
    "unknown-role": ([turns(("user", "Why?"), ("narrator", "So."))] * 4, {}),
    "weightless": ([turns(("user", "Why?"), ("assistant", "So."), weight=0)] * 4, {}),
    "weight-of-two": ([{"messages": [*GOOD["messages"][:1], {**GOOD["messages"][1], "weight": 2}]}] * 4, {}),
    "one-row-split": ([GOOD], {"eval_split": 0.5}),
    "no-objects": (["text", "more"], {}),
    "other-format": ([GOOD] * 4, {"format": "alpaca"}),
}


def test_check_and_drop_refuse_the_same_rows_with_the_same_code_and_message(instance: Instance) -> None:
    files = []
    for name, (rows, keys) in ROWS.items():
        path = instance.root / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        form = {"format": keys["format"]} if "format" in keys else {}
        more = {key: value for key, value in keys.items() if key != "format"}
        files.append(instance.drop(name, datasets=[{"path": str(path), **form}], **more))
    command = [
        sys.executable,
        "-m",
        "honed.cli.honectl",
        "--root",
        str(instance.root),
        "check",
        "--json",
        *map(str, files),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SEC, check=False)
    checked = {each["file"].rpartition("/")[2]: each["error"] for each in json.loads(shown.stdout)}
    assert instance.drain() == 0
    said = instance.rejected()
    assert said.keys() == checked.keys() == {f"{name}.json" for name in ROWS}
    for name, error in checked.items():
        assert error is not None, name
        told = " ".join(said[name].split())
        sentence = error.get("evidence") or error["message"]
        assert f"{error['code']}: {' '.join(sentence.split())}" in told, (name, error, told)
        assert " ".join(error["hint"].split()) in told
