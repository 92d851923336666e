"""A job's first rows rendered by its chat template, at `check`: imports nothing but Jinja and tokenizers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from honed.check import datacheck, preflight
from honed.check.checklist import Asked, Verdict
from honed.spec.config import Config
from honed.system import quote
from honed.system.device import Device
from honed.system.error import DatasetError, HonedError, ModelError
from honed.system.layout import Layout
from told import refused
from zoo import plain

pytest.importorskip("tokenizers")

CPU = Device("cpu", "a processor", total_bytes=24 * 2**30, free_bytes=20 * 2**30)
USER, SAID = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 2}}}],
}
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Desk:
    def __init__(self, path: Path) -> None:
        self.path, self.layout = path, Layout(path / "root")
        self.layout.jobs_dir.mkdir(parents=True)
        self.model = plain.write_tokenizer(plain.write_base_model(path / "model"))
        self.cache = datacheck.Cache()

    def config(self, name: str, **keys: Any) -> None:
        file = self.model / name
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    def check(self, rows: Sequence[dict[str, Any]], *, template: str = plain.TEMPLATE, **keys: Any) -> Verdict:
        data = self.path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.config("tokenizer_config.json", chat_template=template)
        path = self.path / "job.json"
        path.write_text(json.dumps(plain.spec(self.model, data, **keys), indent=1))
        return preflight.check(path, Asked(self.layout, config=Config(), device=CPU, cache=self.cache))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    made.config("config.json", vocab_size=258)
    header = {"model.embed_tokens.weight": ("F32", [258, 8]), "model.layers.0.self_attn.q_proj.weight": ("F32", [8, 8])}
    plain.write_safetensors(made.model / "model.safetensors", header)
    return made


def test_good_rows_are_taken_without_a_word(desk: Desk) -> None:
    rows = [{"messages": [SYSTEM, USER, SAID, USER, SAID]}, {"messages": [USER, SAID]}]
    assert desk.check(rows).warnings == []
    assert desk.check([{"prompt": "a", "completion": "b"}]).warnings == []
    assert desk.check([{"text": "a b c"}]).warnings == []


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([SYSTEM, USER, SAID], "System role not supported"),
        ([USER, USER, SAID], "Roles must alternate"),
        ([SAID, USER], "Roles must alternate"),
    ],
)
def test_rows_that_the_template_refuses_are_refused_with_its_words(
    desk: Desk, messages: list[dict[str, Any]], said: str
) -> None:
    with refused(DatasetError, said) as caught:
        desk.check([{"messages": messages}] * 3, template=STRICT)
    assert caught.value.message.startswith("line ")
    assert "datasets.0: " in caught.value.message
    assert "none of the first 3 rows can be trained on" in caught.value.message
    warnings = desk.check([{"messages": [USER, SAID]}, {"messages": messages}], template=STRICT).warnings
    [told] = [each for each in warnings if "1 of the first 2 rows cannot be trained on" in each]
    assert said in told


def test_a_template_that_renders_no_conversation_is_refused(desk: Desk) -> None:
    for template, said in (
        ("{{ raise_exception('not today') }}", "not today"),
        ("{% for m in messages %}{{ m.content.nothing.more }}{% endfor %}", "cannot render a question"),
        ("Hello", "leaves out text of the user"),
    ):
        with refused(DatasetError, said):
            desk.check([{"messages": [USER, SAID]}], template=template)


def test_a_prompt_that_rows_are_not_trained_with_is_told(desk: Desk) -> None:
    opened = plain.TEMPLATE + "{{ '<think>\n' if add_generation_prompt and thinking | default(true) }}"
    [told] = desk.check([{"messages": [USER, SAID]}] * 2, template=opened).warnings
    assert "the generation prompt differs from the training rows in 2 of 2 rows" in told
    assert "`chat_template_kwargs: {thinking: false}` to make prompts match the training rows" in told
    assert (
        desk.check([{"messages": [USER, SAID]}], template=opened, chat_template_kwargs={"thinking": False}).warnings
        == []
    )


def test_tools_without_a_place_in_the_template_are_told(desk: Desk) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    told = desk.check([{"messages": [USER, SAID], "tools": [tool]}] * 2).warnings
    assert any("the list of tools" in each for each in told)


def test_rows_of_which_nothing_is_trained_after_the_cut_are_refused(desk: Desk) -> None:
    long = {"role": "user", "content": "word " * 40}
    with pytest.raises(DatasetError, match=r"begins after token 64, where training\.max_length truncates") as caught:
        desk.check([{"messages": [long, SAID]}] * 2, training={"max_length": 64})
    assert "the longest of these rows has" in caught.value.hint
    [told] = desk.check([{"messages": [long, SAID]}, {"messages": [USER, SAID]}], training={"max_length": 64}).warnings
    assert "1 of the first 2 rows are skipped" in told
    assert desk.check([{"messages": [long, SAID]}] * 2, training={"max_length": 512}).warnings == []
    packed = {"max_length": 64, "packing": True, "packing_strategy": "wrapped"}  # which cuts nothing off
    assert not any("skipped" in told for told in desk.check([{"messages": [long, SAID]}], training=packed).warnings)


def test_tokens_beyond_the_embeddings_are_refused_where_rows_have_them(desk: Desk) -> None:
    plain.write_tokenizer(desk.model, special=("<|im_start|>", "<|im_end|>", "<|extra|>"))
    assert desk.check([{"messages": [USER, SAID]}]).plan is not None  # nobody uses it
    with refused(ModelError, r"token '<\|extra\|>' has the id 258, but the embeddings have only 258 rows"):
        desk.check([{"messages": [USER, {"role": "assistant", "content": "<|extra|>"}]}])


def test_tokens_that_only_the_config_adds_count_like_any_other(desk: Desk) -> None:
    plain.write_tokenizer(desk.model)
    desk.config("tokenizer_config.json", extra_special_tokens=["<|extra|>"])
    rows = [{"messages": [USER, SAID]}]
    [told] = desk.check(rows).warnings
    assert "tokenizer_config.json adds '<|extra|>' (258) to the tokens of tokenizer.json" in quote.show(told)
    with refused(ModelError, r"token '<\|extra\|>' has the id 258, but the embeddings have only 258 rows"):
        desk.check([{"messages": [USER, {"role": "assistant", "content": "<|extra|>"}]}])
    desk.config("tokenizer_config.json", pad_token="<|extra|>")
    with refused(ModelError, r"token '<\|extra\|>' has the id 258, but the embeddings have only 258 rows"):
        desk.check(rows)


def test_images_without_a_place_in_the_template_are_refused(desk: Desk) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (56, 56)).save(desk.path / "a.png")
    desk.config("config.json", model_type="qwen2_vl", architectures=[], vision_config={"depth": 1}, image_token_id=256)
    (desk.model / "preprocessor_config.json").write_text("{}")
    asked = {
        "role": "user",
        "content": [{"type": "image", "image": str(desk.path / "a.png")}, {"type": "text", "text": "2+2?"}],
    }
    with pytest.raises(DatasetError, match="rows with images, but the chat template has no placeholder for them"):
        desk.check([{"messages": [asked, SAID]}])
    plain.write_tokenizer(desk.model, special=("<|im_start|>", "<|im_end|>", "<|image|>"))
    template = plain.TEMPLATE.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ '<|image|>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}",
    )
    assert desk.check([{"messages": [asked, SAID]}], template=template).plan is not None


def test_a_turn_without_an_end_is_told(desk: Desk) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
    )
    told = desk.check([{"messages": [USER, SAID]}], template=template).warnings
    assert any("the model will not learn to stop" in each for each in told)


def test_nothing_is_refused_where_the_files_leave_open_what_they_mean(desk: Desk) -> None:
    rows = [{"messages": [SYSTEM, USER, SAID]}]
    with refused(DatasetError, "System role not supported"):  # without ids, rows are rendered all the same
        (desk.model / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "Own"}}))
        desk.check(rows, template=STRICT)
    for keys in ({"auto_map": {"AutoTokenizer": ["own.Own", None]}}, {"eos_token": None}):
        desk.config("tokenizer_config.json", auto_map=None, eos_token="<|im_end|>")
        file = desk.model / "tokenizer_config.json"
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if v is not None}))
        desk.config("tokenizer_config.json", **keys)
        assert desk.check(rows, template=STRICT).warnings == []


def test_a_template_that_takes_all_memory_is_named(desk: Desk) -> None:
    deep = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"
    with pytest.raises(HonedError, match="chat template"):
        desk.check([{"messages": [USER, SAID]}], template=deep)


def test_what_was_rendered_is_remembered_and_told_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datacheck, "SETTLED_NS", 0)
    rows = [{"messages": [USER, SAID]}, {"messages": [SYSTEM, USER, SAID]}]
    first = desk.check(rows, template=STRICT).warnings
    assert len(desk.cache._rendered) == 1
    assert len(first) == 1
    path = desk.path / "job.json"
    again = preflight.check(path, Asked(desk.layout, config=Config(), device=CPU, cache=desk.cache))
    assert again.warnings == first
    assert desk.check(rows, template=STRICT.replace("System", "Systems")).warnings != first


def test_the_check_of_rows_imports_nothing_of_the_training_stack(desk: Desk) -> None:
    desk.check([{"messages": [USER, SAID]}])
    code = (
        "import sys; from pathlib import Path; from honed.check import preflight\n"
        "from honed.check.checklist import Asked; from honed.spec.config import Config\n"
        "from honed.system.layout import Layout; from honed.system.device import cpu\n"
        "assert not {'jinja2', 'tokenizers', 'honed.text.chat'} & set(sys.modules)\n"
        f"preflight.check(Path({str(desk.path / 'job.json')!r}), Asked(Layout(Path({str(desk.layout.root)!r})),"
        " config=Config(), device=cpu()))\n"
        "assert {'jinja2', 'tokenizers', 'honed.text.chat'} <= set(sys.modules)\n"
        "assert not {'torch', 'transformers', 'trl', 'peft', 'datasets'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_rows_that_the_template_silences_are_told_with_what_becomes_of_the_job(desk: Desk) -> None:
    silenced = {"messages": [USER, {**SAID, "content": "", "reasoning_content": "two and two"}, USER, SAID]}
    said = "if more than a tenth of all rows are affected, the job is rejected: use a template"
    told = "\n".join(desk.check([silenced, silenced, *[{"messages": [USER, SAID]}] * 9]).warnings)
    assert "2 of the first 11 rows cannot be trained on and are skipped; the first" in told
    assert "leaves out all text of message 2, from the assistant" in told
    assert said in told
    assert said not in "\n".join(desk.check([silenced, *[{"messages": [USER, SAID]}] * 20]).warnings)
    with pytest.raises(DatasetError, match=r"none of the first 2 rows can be trained on: .* leaves out all") as caught:
        desk.check([silenced] * 2)
    assert "training_chat_template" in caught.value.hint


def test_what_helps_is_told_for_each_kind_of_text_that_is_left_out(desk: Desk) -> None:
    named = {"messages": [{**USER, "name": "Ann"}, SAID]}
    thought = {"messages": [USER, {**SAID, "reasoning_content": "two and two"}]}
    [told] = map(quote.show, desk.check([named, thought, thought]).warnings)
    assert "leaves out parts of 3 of 3 rows: reasoning in 2 (the first: data set 1, row 2, message 2: 'two and" in told
    assert "; reasoning: use a template that shows it" in told
    assert "; names of speakers: write the name in the content" in told
