"""Base models and adapters as found on disk, complete and damaged; no torch, no weights."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from honed.inputs import basemodel
from honed.run import snapshot
from honed.system.error import ModelError
from told import refused
from zoo import plain


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return plain.write_base_model(tmp_path / "model")


def edit_config(model_dir: Path, **keys: Any) -> None:
    """Set keys of config.json; None removes one."""
    path = model_dir / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def shard(model_dir: Path) -> Path:
    """Split the single file of weights into two shards and an index; returns the index."""
    (model_dir / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    plain.write_safetensors(model_dir / names[0], {"model.embed_tokens.weight": ("BF16", [32, 8])})
    plain.write_safetensors(model_dir / names[1], {"model.norm.weight": ("F32", [8])})
    index = model_dir / "model.safetensors.index.json"
    weight_map = {"model.embed_tokens.weight": names[0], "model.norm.weight": names[1]}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_a_checkpoint_is_known_from_its_headers(model_dir: Path) -> None:
    info = basemodel.inspect(model_dir)
    assert info.model_type == "llama"
    assert info.architectures == ("LlamaForCausalLM",)
    assert info.num_parameters == 2 * 32 * 8 + 4 * 64 + 3 * 128 + 3 * 8
    assert info.stored_dtypes == {"float32": info.num_parameters}
    assert info.stored_dtype == "float32"
    assert info.has_chat_template
    assert not info.is_quantized
    assert not info.has_vision


def test_shards_count_as_one_checkpoint(model_dir: Path) -> None:
    shard(model_dir)
    info = basemodel.inspect(model_dir)
    assert info.stored_dtypes == {"bfloat16": 256, "float32": 8}
    assert info.stored_dtype == "bfloat16"


def test_what_is_stored_counts_and_not_what_the_config_claims(model_dir: Path) -> None:
    edit_config(model_dir, dtype="bfloat16")
    assert basemodel.inspect(model_dir).stored_dtype == "float32"


def test_the_old_torch_dtype_key_is_read(model_dir: Path) -> None:
    edit_config(model_dir, dtype=None, torch_dtype="bfloat61")
    with refused(ModelError, "torch_dtype: 'bfloat61' is not a dtype"):
        basemodel.inspect(model_dir)


def test_tied_embeddings_are_fine(model_dir: Path) -> None:
    plain.write_safetensors(model_dir / "model.safetensors", {"model.embed_tokens.weight": ("BF16", [32, 8])})
    edit_config(model_dir, tie_word_embeddings=True)
    assert basemodel.inspect(model_dir).num_parameters == 256


def test_the_job_file_may_name_the_model_type(model_dir: Path) -> None:
    edit_config(model_dir, model_type=None)
    assert basemodel.inspect(model_dir, model_type="llama").model_type == "llama"


def test_a_bitsandbytes_checkpoint_counts_its_packed_parameters(model_dir: Path) -> None:
    plain.write_safetensors(
        model_dir / "model.safetensors",
        {
            "model.embed_tokens.weight": ("F16", [32, 8]),
            "model.layers.0.self_attn.q_proj.weight": ("U8", [32, 1]),
            "model.layers.0.self_attn.q_proj.weight.absmax": ("F32", [1]),
            "model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4": ("U8", [50]),
        },
    )
    edit_config(model_dir, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}, dtype="float16")
    info = basemodel.inspect(model_dir)
    assert info.is_quantized
    assert info.quantization == "4bit"
    assert info.num_parameters == 256 + 64
    assert info.stored_dtype == "float16"


def test_pickled_weights_are_read_where_the_administrator_allows_it(model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    info = basemodel.inspect(model_dir, allow_pickle=True)
    assert info.is_pickled
    assert info.stored_dtype == "float32"


@pytest.mark.parametrize("key", ["vision_config", "audio_config"])
def test_a_model_with_eyes_or_ears_is_recognised(model_dir: Path, key: str) -> None:
    edit_config(model_dir, **{key: {"hidden_size": 8}})
    assert basemodel.inspect(model_dir).lacks_processor
    (model_dir / "preprocessor_config.json").write_text("{}")
    info = basemodel.inspect(model_dir)
    assert (info.has_vision, info.has_audio) == (key == "vision_config", key == "audio_config")
    assert not info.lacks_processor


def test_chat_templates_are_found_where_the_tokenizer_finds_them(model_dir: Path) -> None:
    settings = model_dir / "tokenizer_config.json"
    settings.write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]})
    )
    assert basemodel.inspect(model_dir).chat_template == "D"
    (model_dir / "chat_template.jinja").write_text("J")
    assert basemodel.inspect(model_dir).chat_template == "J"
    (model_dir / "chat_template.jinja").unlink()
    settings.write_text("{}")
    (model_dir / "chat_template.json").write_text(json.dumps({"chat_template": "a processor's, not a tokenizer's"}))
    assert not basemodel.inspect(model_dir).has_chat_template


# --- Damage -----------------------------------------------------------------------------------------------------------


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path / name, size)


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(content.encode() if isinstance(content, str) else content)


def remove(*names: str) -> Callable[[Path], object]:
    return lambda path: [(path / name).unlink() for name in names]


def header(entries: Any, num_data_bytes: int = 0) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_data_bytes)


def without_shard(path: Path) -> None:
    shard(path)
    (path / "model-00002-of-00002.safetensors").unlink()


def with_foreign_shard(path: Path) -> None:
    shard(path).write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))


def with_wrong_index(path: Path) -> None:
    weight_map = json.loads(shard(path).read_text())["weight_map"]
    weight_map["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def with_pipe(path: Path) -> None:
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")


def with_dangling_link(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("../../blobs/gone")


WEIGHTS = "model.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no config": (remove("config.json"), "weights without a config.json", "copy config.json"),
    "empty config": (write("config.json", ""), "config.json: the file is empty", "copy it again"),
    "broken config": (write("config.json", '{"model_type": '), "config.json: not JSON", "copy it again"),
    "config is a list": (write("config.json", "[1]"), "config.json: expected a JSON object", "copy it again"),
    "config nested too deeply": (write("config.json", "[" * 100_000), "config.json: not JSON", "copy it again"),
    "no model_type": (
        lambda path: edit_config(path, model_type=None),
        "config.json: no model_type",
        "model_type: qwen3",
    ),
    "mistyped dtype": (
        lambda path: edit_config(path, dtype="bfloat61"),
        "config.json: dtype: 'bfloat61'",
        "correct it",
    ),
    "dtype is a list": (lambda path: edit_config(path, dtype=[1]), "config.json: dtype: a list of 1", "correct it"),
    "unnamed quantization": (
        lambda path: edit_config(path, quantization_config={"bits": 4}),
        "config.json: quantization_config has no quant_method",
        "unquantized",
    ),
    "no weights": (remove(WEIGHTS), "no weights", "fetch the model again"),
    "only gguf": (lambda path: (path / WEIGHTS).rename(path / "m.Q4.gguf"), "no weights", "GGUF"),
    "only pickle": (
        lambda path: (path / WEIGHTS).rename(path / "pytorch_model.bin"),
        "pytorch_model.bin: pickled",
        "save_pretrained",
    ),
    "empty weights": (cut(WEIGHTS, 0), "model.safetensors: the file is empty", "fetch this file again"),
    "a few bytes": (cut(WEIGHTS, 5), "model.safetensors: 5 bytes", "fetch this file again"),
    "cut in the header": (cut(WEIGHTS, 100), "model.safetensors: truncated: its header", "fetch this file again"),
    "cut in the weights": (cut(WEIGHTS, 1500), "model.safetensors: truncated", "fetch this file again"),
    "absurd header length": (write(WEIGHTS, b"\xff" * 64), "model.safetensors: not a safetensors file", "fetch"),
    "an error page": (write(WEIGHTS, "<html>404</html>" * 9), "model.safetensors: not a safetensors file", "fetch"),
    "garbage header": (
        write(WEIGHTS, struct.pack("<Q", 4) + b"{..}"),
        "header cannot be read",
        "fetch this file again",
    ),
    "header is a list": (write(WEIGHTS, header([1, 2])), "header cannot be read", "fetch this file again"),
    "no tensor at all": (write(WEIGHTS, header({})), "lists no weights", "fetch the model again"),
    "unknown dtype": (
        write(WEIGHTS, header({"a": {"dtype": "F7", "shape": [1], "data_offsets": [0, 1]}}, 1)),
        "header cannot be read .*F7",
        "fetch",
    ),
    "overlapping tensors": (
        write(WEIGHTS, header({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, 4)),
        "do not match its shape or the other tensors",
        "fetch",
    ),
    "too many bytes": (
        write(WEIGHTS, header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 40)),
        "36 bytes more than its header describes",
        "fetch",
    ),
    "weights are a pipe": (with_pipe, "model.safetensors: not a regular file", "fetch this file again"),
    "weights are a dangling link": (with_dangling_link, "model.safetensors: no such file", "fetch this file again"),
    "missing shard": (without_shard, "model-00002-of-00002.safetensors: this shard of the weights is missing", "fetch"),
    "shard elsewhere": (with_foreign_shard, "shard '../elsewhere.safetensors' is outside", "plain file names"),
    "index names what is not there": (with_wrong_index, "'lm_head.weight' is not in it", "fetch"),
    "broken index": (
        lambda path: shard(path).write_text('{"weight_map": 3}'),
        "index.json: no weight_map",
        "fetch this file again",
    ),
    "no tokenizer": (remove("tokenizer.json"), "no tokenizer", "copy the tokenizer's files"),
    "cut tokenizer": (cut("tokenizer.json", 20), "tokenizer.json: truncated", "copy the tokenizer again"),
    "empty tokenizer": (cut("tokenizer.json", 0), "tokenizer.json: the file is empty", "copy the tokenizer again"),
    "broken tokenizer_config": (write("tokenizer_config.json", "{"), "tokenizer_config.json: not JSON", "again"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_refused_with_its_file_and_the_remedy(model_dir: Path, name: str) -> None:
    damage, message, remedy = DAMAGE[name]
    damage(model_dir)
    with refused(ModelError, message) as raised:
        basemodel.inspect(model_dir)
    assert str(model_dir) in raised.value.message
    assert remedy in raised.value.hint


def test_a_file_and_a_missing_directory_are_no_base_models(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        basemodel.inspect(tmp_path / "gone")
    with pytest.raises(ModelError, match="is a file"):
        basemodel.inspect(model_dir / "config.json")


# --- Adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter_dir(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    plain.write_safetensors(path / "adapter_model.safetensors", {"a.lora_A.weight": ("F32", [4, 8])})
    return path


def test_an_adapter_is_known_from_its_header(adapter_dir: Path) -> None:
    info = basemodel.inspect_adapter(adapter_dir)
    assert info.num_parameters == 32
    assert info.config["r"] == 4


def test_an_adapter_named_as_base_model_is_told_where_it_belongs(adapter_dir: Path) -> None:
    with pytest.raises(ModelError, match="an adapter") as raised:
        basemodel.inspect(adapter_dir)
    assert "`adapter:`" in raised.value.hint


def test_a_base_model_named_as_adapter_is_refused(model_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"a full model .*not an adapter"):
        basemodel.inspect_adapter(model_dir)


def test_an_adapter_without_weights_or_with_pickled_ones_is_refused(adapter_dir: Path) -> None:
    (adapter_dir / "adapter_model.safetensors").rename(adapter_dir / "adapter_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        basemodel.inspect_adapter(adapter_dir)
    (adapter_dir / "adapter_model.bin").unlink()
    with pytest.raises(ModelError, match=r"adapter_model.safetensors: no such file"):
        basemodel.inspect_adapter(adapter_dir)


# --- Names ------------------------------------------------------------------------------------------------------------


def test_a_hub_id_is_found_in_the_local_cache(tmp_path: Path) -> None:
    repository = tmp_path / "hub/models--Qwen--Qwen3-1.7B"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc123")
    snapshot = plain.write_base_model(repository / "snapshots/abc123")
    found = basemodel.resolve("Qwen/Qwen3-1.7B", cache_dir=tmp_path, allow_hub=False)
    assert found == snapshot
    assert basemodel.resolve("Qwen/Qwen3-1.7B", cache_dir=tmp_path, allow_hub=False, revision="abc123") == snapshot
    with pytest.raises(basemodel.UncachedError, match="at v2 is not in the local cache") as raised:
        basemodel.resolve("Qwen/Qwen3-1.7B", cache_dir=tmp_path, allow_hub=True, revision="v2")
    assert (raised.value.missing.repo_id, raised.value.missing.revision) == ("Qwen/Qwen3-1.7B", "v2")


def test_a_snapshot_that_is_fetched_counts_when_every_file_is_there(tmp_path: Path) -> None:
    path = plain.write_base_model(snapshot.snapshot_dir(tmp_path, "a/b", "abc123"))
    sizes = {each.name: each.stat().st_size for each in path.iterdir()}
    snapshot.write(tmp_path, snapshot.Record("a/b", "abc123", sizes | {"merges.txt": 3}, code=False))
    with pytest.raises(ModelError, match="only partly in the local cache"):
        basemodel.resolve("a/b", cache_dir=tmp_path, allow_hub=False, revision="abc123")
    (path / "merges.txt").write_text("a b")
    assert basemodel.resolve("a/b", cache_dir=tmp_path, allow_hub=False, revision="abc123") == path


def test_a_hub_id_that_is_not_cached_is_refused_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"policy\.hub") as raised:
        basemodel.resolve("Qwen/Qwen3-1.7B", cache_dir=tmp_path, allow_hub=False)
    assert f"HF_HOME={tmp_path} hf download Qwen/Qwen3-1.7B" in raised.value.hint


@pytest.mark.parametrize("revision", ["../../../etc", "/etc"])
def test_a_revision_cannot_lead_out_of_the_cache(tmp_path: Path, revision: str) -> None:
    with pytest.raises(ModelError, match="is not a revision"):
        basemodel.resolve("a/b", cache_dir=tmp_path, allow_hub=False, revision=revision)


def test_what_another_job_makes_is_found_when_it_is_there(tmp_path: Path) -> None:
    assert basemodel.resolve("job:stage1", cache_dir=tmp_path, allow_hub=False, jobs={"stage1": tmp_path}) == tmp_path
    with pytest.raises(ModelError, match="the output of job 'stage1' does not exist yet"):
        basemodel.resolve("job:stage1", cache_dir=tmp_path, allow_hub=False)
