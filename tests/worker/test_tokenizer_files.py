"""An output's tokenizer is the base model's, byte for byte but for what a reader needs, and its answers end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from honed.worker.model import tokenizer as tokenizers
from honed.worker.model import tokenizer_files
from worker.conftest import Ended, MakeJob, WorkerJob
from worker.test_merge import merge_job

QUICK = {"max_steps": 1, "per_device_train_batch_size": 2}
KEEP = {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": None}


@pytest.fixture
def base(tmp_path: Path, checkpoint_of: Callable[..., Path]) -> Path:
    """A byte-level base model, whose files may be changed."""
    return Path(shutil.copytree(checkpoint_of("llama", template="chatml"), tmp_path / "base"))


def edit(file: Path, **keys: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    written = (json.loads(file.read_text()) if file.exists() else {}) | keys
    file.write_text(json.dumps({key: value for key, value in written.items() if value is not None}))


def read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text()))


def ran(job: WorkerJob) -> Ended:
    ended = job.run()
    assert ended.status == 0, ended.result
    return ended


def outputs(job: WorkerJob) -> list[Path]:
    merged = job.output_dir / "merged"
    return [job.output_dir, *([merged] if merged.exists() else [])]


@pytest.mark.parametrize("keys", [{}, {"lora": {"r": 2}, "save_merged": "bfloat16"}])
def test_the_files_are_the_bases_byte_for_byte(make_job: MakeJob, base: Path, keys: dict[str, Any]) -> None:
    edit(base / "tokenizer_config.json", **KEEP, made_by="somebody")
    edit(base / "generation_config.json", eos_token_id=read(base / "config.json")["eos_token_id"], temperature=0.7)
    (base / "special_tokens_map.json").write_text('{"eos_token":   "<|im_end|>"}')
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    job = make_job(model=base, training=QUICK, **keys)
    ran(job)
    names = [path.name for path in base.iterdir() if path.suffix != ".safetensors" and path.is_file()]
    for made in outputs(job):
        for name in [*{*names} - {"config.json"}, "additional_chat_templates/rag.jinja"]:
            assert (made / name).read_bytes() == (base / name).read_bytes(), name
    assert "Changes to the base" not in (job.output_dir / "README.md").read_text()


@pytest.mark.parametrize("keys", [{}, {"lora": {"r": 2}, "save_merged": "bfloat16"}])
def test_a_class_that_readers_do_not_have_or_that_changes_ids_is_replaced(
    make_job: MakeJob, base: Path, keys: dict[str, Any]
) -> None:
    edit(base / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast", extra_special_tokens=["<|im_start|>"])
    job = make_job(model=base, training=QUICK, **keys)
    ended = ran(job)
    assert any("tokenizer.json is loaded as it is" in text for text in ended.messages("warning"))
    card = (job.output_dir / "README.md").read_text()
    assert "tokenizer_class is PreTrainedTokenizerFast instead of LlamaTokenizerFast" in card
    assert "extra_special_tokens is named additional_special_tokens" in card
    for made in outputs(job):
        assert (made / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
        found = read(made / "tokenizer_config.json")
        assert (found["tokenizer_class"], found["additional_special_tokens"]) == (
            tokenizer_files.PLAIN,
            ["<|im_start|>"],
        )
        assert "extra_special_tokens" not in found
        opened = AutoTokenizer.from_pretrained(made)
        oracle = tokenizers.from_file(base / "tokenizer.json")
        ids = oracle.encode(tokenizers.TEXT, add_special_tokens=False).ids
        assert opened(tokenizers.TEXT, add_special_tokens=False)["input_ids"] == ids


def test_a_class_of_transformers_5_alone_is_replaced(make_job: MakeJob, base: Path) -> None:
    assert read(base / "tokenizer_config.json")["tokenizer_class"] == "TokenizersBackend"
    job = make_job(model=base, training=QUICK, lora={"r": 2})
    assert not any("as it is" in text for text in ran(job).messages("warning"))
    assert read(job.output_dir / "tokenizer_config.json")["tokenizer_class"] == tokenizer_files.PLAIN
    assert "transformers 4 does not know that class" in (job.output_dir / "README.md").read_text()


@pytest.mark.parametrize("keys", [{}, {"lora": {"r": 2}, "save_merged": "bfloat16"}])
@pytest.mark.parametrize("shipped", [True, False])
def test_answers_end_where_the_trained_turns_do(
    make_job: MakeJob, base: Path, keys: dict[str, Any], shipped: bool
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    end, other = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    edit(base / "tokenizer_config.json", eos_token="<|im_start|>")
    edit(base / "config.json", eos_token_id=other)
    edit(base / "generation_config.json", eos_token_id=other, max_new_tokens=7)
    if not shipped:
        (base / "generation_config.json").unlink()
    job = make_job(model=base, training=QUICK, **keys)
    ended = ran(job)
    assert any("set `training.eos_token: '<|im_end|>'`" in text for text in ended.messages("info"))
    for made in outputs(job):
        found = read(made / "generation_config.json")
        assert (found["eos_token_id"], found.get("max_new_tokens")) == ([other, end], 7 if shipped else None)
    assert "these tokens end the trained turns" in (job.output_dir / "README.md").read_text()

    named = make_job(model=base, training=QUICK | {"eos_token": "<|im_end|>"}, **keys)
    ended = ran(named)
    assert not any("eos" in text for text in ended.messages("warning"))
    for made in outputs(named):
        assert read(made / "generation_config.json")["eos_token_id"] == [end, other]
        assert read(made / "tokenizer_config.json")["eos_token"] == "<|im_end|>"
        assert AutoTokenizer.from_pretrained(made).eos_token_id == end
    card = (named.output_dir / "README.md").read_text().replace("\\", "")
    assert "eos_token is <|im_end|> instead of <|im_start|>" in card


def test_a_named_end_that_ends_no_turn_is_refused(make_job: MakeJob, base: Path) -> None:
    ended = make_job(model=base, training=QUICK | {"eos_token": "<|im_start|>"}).run()
    assert ended.result["error"]["code"] == "spec_invalid"
    assert "does not end the turns of the chat template" in ended.result["error"]["message"]


def test_the_jobs_template_is_the_outputs_only_one(make_job: MakeJob, base: Path, tmp_path: Path) -> None:
    source = (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").unlink()
    edit(base / "tokenizer_config.json", **KEEP, chat_template="{{ messages }}")
    own = tmp_path / "own.jinja"
    own.write_text(source)
    job = make_job(model=base, training=QUICK, lora={"r": 2}, save_merged="bfloat16", chat_template=str(own))
    ran(job)
    for made in outputs(job):
        assert (made / "chat_template.jinja").read_text() == source
        assert "chat_template" not in read(made / "tokenizer_config.json")
    assert "chat_template.jinja: the job's chat_template" in (job.output_dir / "README.md").read_text()


def test_a_merge_job_keeps_the_adapters_ends_and_its_tokenizer(make_job: MakeJob, base: Path, tmp_path: Path) -> None:
    edit(base / "tokenizer_config.json", eos_token="<|im_start|>")
    trained = make_job(model=base, training=QUICK | {"eos_token": "<|im_end|>"}, lora={"r": 2})
    ran(trained)
    job = merge_job(tmp_path / "merging", base, trained.output_dir, dtype="bfloat16")
    ran(job)
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (job.output_dir / name).read_bytes() == (trained.output_dir / name).read_bytes()
