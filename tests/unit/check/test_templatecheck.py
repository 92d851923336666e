"""The chat templates that a job names, as far as they are known before a tokenizer is loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from honed.check import templatecheck
from honed.inputs import basemodel
from honed.spec import jobfile, variant
from honed.spec.spec import JobSpec
from honed.system import quote
from honed.system.error import SpecError
from told import refused
from zoo import plain


def shipped(name: str) -> Path:
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / f"chat_templates/{name}.jinja"


def job(**keys: Any) -> JobSpec:
    return jobfile.validate({"base_model": "/m", "datasets": [{"path": "/d"}], **keys})


def test_trls_training_variant_is_found_by_the_whole_text() -> None:
    asked = job(chat_template=str(shipped("qwen3")), training_chat_template="trl")
    assert templatecheck.for_rows(asked, None) == shipped("qwen3_training")
    assert templatecheck.check(asked, None)
    assert templatecheck.for_rows(job(chat_template=str(shipped("qwen3"))), None) is None


def test_a_template_without_a_variant_is_refused_and_the_key_is_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(shipped("qwen3").read_text() + "\n")
    with pytest.raises(SpecError, match=r"training_chat_template: trl: .* has no training variant") as caught:
        templatecheck.check(job(chat_template=str(tmp_path / "own.jinja"), training_chat_template="trl"), None)
    assert caught.value.fix == {"training_chat_template": None}
    assert "qwen3_8" in caught.value.hint


def test_a_file_of_ones_own_is_looked_at(tmp_path: Path) -> None:
    own = tmp_path / "rows.jinja"
    own.write_text("{{ messages }}{% generation %}{% endgeneration %}")
    asked = job(chat_template=str(shipped("qwen3")), training_chat_template=str(own))
    assert templatecheck.check(asked, None)
    assert templatecheck.for_rows(asked, None) == own
    own.write_text("{% if %}")
    with pytest.raises(SpecError, match=r"training_chat_template: .*rows.jinja, line 1: not a Jinja template"):
        templatecheck.check(asked, None)
    own.unlink()
    with pytest.raises(SpecError, match="training_chat_template: no such file"):
        templatecheck.check(asked, None)


@pytest.mark.parametrize(
    ("value", "said"),
    [(True, "got true"), ("training", "got 'training'"), ("chat.jinja", "got 'chat.jinja'"), (3, "got 3")],
)
def test_the_key_takes_trl_or_a_path(value: Any, said: str) -> None:
    with refused(SpecError, f"training_chat_template: .*{said}") as caught:
        job(training_chat_template=value)
    assert ("write trl" in str(caught.value.hint) + caught.value.shown) == (value in (True, "training"))


def test_what_is_no_argument_of_a_template_is_refused() -> None:
    with pytest.raises(SpecError, match="chat_template_kwargs: `tokenize` cannot be passed") as caught:
        templatecheck.check(job(chat_template_kwargs={"tokenize": True, "enable_thinking": False}), None)
    assert caught.value.fix == {"chat_template_kwargs.tokenize": None}


def test_without_trl_there_is_no_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    variant._variants.cache_clear()
    try:
        assert variant.find("{{ messages }}") is None
        assert variant.names() == []
    finally:
        variant._variants.cache_clear()


def test_a_file_without_any_jinja_is_no_template(tmp_path: Path) -> None:
    rows = plain.write_dataset(tmp_path / "rows.jsonl")
    with pytest.raises(SpecError, match=r"chat_template: .*rows\.jsonl is not a Jinja template"):
        templatecheck.check(job(chat_template=str(rows)), None)


def test_a_name_that_no_template_uses_is_told(tmp_path: Path) -> None:
    model = basemodel.inspect(plain.write_base_model(tmp_path / "model"))
    (tmp_path / "rows.jinja").write_text("{{ messages }}{{ reasoning_effort }}")
    keys: dict[str, Any] = {
        "chat_template": str(shipped("qwen3")),
        "training_chat_template": str(tmp_path / "rows.jinja"),
    }
    assert templatecheck.unused(job(chat_template_kwargs={"enable_thinking": False}, **keys), model) == []
    assert templatecheck.unused(job(chat_template_kwargs={"reasoning_effort": "low"}, **keys), model) == []
    [told] = templatecheck.unused(job(chat_template_kwargs={"enable_thinkin": False}, **keys), model)
    unused = "chat_template_kwargs.enable_thinkin: the chat template does not use it, so it has no effect"
    assert quote.show(told) == f"{unused} (did you mean enable_thinking?)"
    assert quote.hide(told) == unused
    assert len(templatecheck.unused(job(chat_template_kwargs={"enable_thinking": False}), model)) == 1
    assert templatecheck.unused(job(), model) == []
