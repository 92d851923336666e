"""What is promised of each family of models, for some of them; `scripts/torture --families` tries all."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import warm

#: Families, each with what could break it: names of checkpoints that are not the module's (fused experts, vision
#: models, heads), balancing losses, averages of unequal batches, ignored padding, routers in float32, shared blocks,
#: infinite numbers and kinds of positions in a config.
FAMILIES: dict[str, list[str]] = {
    "qwen3_moe": ["resumed", "best", "divided", "adapted"],
    "gpt_neox": ["resumed", "best"],
    "gemma3": ["resumed", "exported"],
    "qwen2_5_vl": ["best", "divided"],
    "rwkv": ["divided"],
    "deepseek_v3": ["merged", "bfloat16"],
    "zamba2": ["merged", "exported"],
    "mamba": ["merged", "adapted"],
    "bamba": ["exported"],
    "gemma4": ["exported"],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Family → promise → `holds`, or how it is broken; tried by a process that has only imported the libraries."""
    out = tmp_path_factory.mktemp("families") / "results"
    program = Path(__file__).parents[1] / "promises.py"
    asked = json.dumps({"families": FAMILIES})
    with out.open("wb") as file:
        process = warm.RankPopen(
            [sys.executable, str(program), asked],
            stdout=file,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.wait(1200) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return {each["family"]: each["promises"] for each in lines}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_keeps_what_is_promised(results: dict[str, dict[str, str]], family: str) -> None:
    assert {name: text for name, text in results[family].items() if not text.startswith("holds")} == {}
    assert list(results[family]) == FAMILIES[family]
