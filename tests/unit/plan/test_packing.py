"""Packing is rejected, by name and before anything is loaded, for models that would mix the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from honed.inputs import basemodel
from honed.plan import packing
from honed.spec import jobfile
from honed.system.error import SpecError
from zoo import plain


def check(tmp_path: Path, config: dict[str, Any], **training: Any) -> None:
    base = plain.write_base_model(tmp_path / "base")
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    spec = jobfile.validate(plain.spec(base, tmp_path / "rows.jsonl", training=training))
    packing.check(spec, basemodel.inspect(base))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "mamba"}, "mamba has layers that carry state"),
        ({"model_type": "opt"}, "opt's attention does not use positions"),
        ({"model_type": "any", "text_config": {"model_type": "qwen3_5_text"}}, "qwen3_5_text has layers that carry"),
        ({"model_type": "own", "layer_types": ["full_attention", "mamba"]}, r"carry state .* \(mamba\)"),
    ],
)
@pytest.mark.parametrize("key", ["packing", "padding_free", "eval_packing"])
def test_packing_is_refused_where_rows_reach_each_other(
    tmp_path: Path, config: dict[str, Any], why: str, key: str
) -> None:
    training = {key: True} | ({"max_length": None} if key == "padding_free" else {})
    with pytest.raises(SpecError, match=rf"training\.{key}: .*{why}") as refused:
        check(tmp_path, config, **training)
    assert refused.value.hint.startswith(f"remove {key}")
    assert refused.value.fix == {f"training.{key}": None}
    check(tmp_path, config)


def test_rows_that_are_put_one_after_the_other_may_see_each_other(tmp_path: Path) -> None:
    check(tmp_path, {"model_type": "mamba"}, packing=True, packing_strategy="wrapped")


def test_packing_is_taken_where_attention_keeps_rows_apart(tmp_path: Path) -> None:
    check(tmp_path, {"layer_types": ["full_attention", "sliding_attention"]}, packing=True)
