"""Settings files of other tools, beside the data that they name; the model is the test's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

CORPUS = Path(__file__).resolve().parents[1] / "data/convert"
FILES = sorted(path.name for path in CORPUS.iterdir() if path.name != "README.md")


def write(place: Path, *, num_rows: int = 40) -> Path:
    """Copy the corpus into a directory, and write the rows that it names."""
    shutil.copytree(CORPUS, place, dirs_exist_ok=True)
    chats = [
        {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(num_rows)
    ]
    orders = [{"instruction": f"Say {n}.", "input": "", "output": f"{n}!"} for n in range(num_rows)]
    info = {
        "facts": {"file_name": "alpaca.json"},
        "facts_held_out": {"file_name": "alpaca.json", "columns": {"prompt": "instruction", "response": "output"}},
        "talk": {
            "file_name": "held-out.jsonl",
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": {"role_tag": "role", "content_tag": "content"},
        },
        "preferences": {"file_name": "alpaca.json", "ranking": True},
        "hub": {"hf_hub_url": "org/rows", "subset": "main", "split": "train", "num_samples": 5},
    }
    (place / "data").mkdir()
    (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in chats))
    (place / "data/held-out.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in chats))
    (place / "data/alpaca.json").write_text(json.dumps(orders))
    (place / "data/dataset_info.json").write_text(json.dumps(info))
    return place
