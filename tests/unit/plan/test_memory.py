"""Estimates of memory and disk before the run: sums over shapes, rejected jobs, and proposed changes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.inputs import basemodel
from honed.inputs.basemodel import BaseModelInfo, Tensor
from honed.inputs.media import Facts
from honed.job import out_of_memory
from honed.job.plan_file import Memory
from honed.plan import memory, parameter, precision, remedy
from honed.plan.activation import Row
from honed.plan.parameter import Parameter
from honed.spec import jobfile
from honed.spec.spec import JobSpec
from honed.system.device import Device
from honed.system.error import MemoryShortError
from zoo import plain

GIB = 2**30
H100 = Device("cuda", "NVIDIA H100", 0, "GPU-0", (9, 0), 80 * GIB, 80 * GIB)
L4 = Device("cuda", "NVIDIA L4", 0, "GPU-0", (8, 9), 24 * GIB, 24 * GIB)
T4 = Device("cuda", "Tesla T4", 0, "GPU-0", (7, 5), 16 * GIB, 16 * GIB)
CPU = Device("cpu", "a processor", total_bytes=24 * GIB, free_bytes=20 * GIB)
MPS = Device("mps", "Apple GPU", total_bytes=24 * GIB, free_bytes=20 * GIB)
RESERVE = GIB // 2


@pytest.fixture
def model(tmp_path: Path) -> BaseModelInfo:
    return basemodel.inspect(plain.write_base_model(tmp_path / "model"))


def llama(model: BaseModelInfo, *, hidden: int, mlp: int, layers: int, vocabulary: int, kv: int) -> BaseModelInfo:
    """Return a model of published shapes, of which only the headers exist."""
    shapes = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)}
    for layer in (f"model.layers.{number}" for number in range(layers)):
        shapes |= {f"{layer}.self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (kv, hidden) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj": (mlp, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (hidden, mlp)}
    tensors = tuple(Tensor(f"{name}.weight", "bfloat16", shape) for name, shape in shapes.items())
    number = sum(tensor.num_elements for tensor in tensors)
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "vocab_size": vocabulary,
    }
    stored = {"bfloat16": number}
    return replace(
        model, config=config, tensors=tensors, num_parameters=number, stored_dtypes=stored, num_weight_bytes=2 * number
    )


@pytest.fixture
def mistral_7b(model: BaseModelInfo) -> BaseModelInfo:
    return llama(model, hidden=4096, mlp=14336, layers=32, vocabulary=32000, kv=1024)


@pytest.fixture
def llama_70b(model: BaseModelInfo) -> BaseModelInfo:
    return llama(model, hidden=8192, mlp=28672, layers=80, vocabulary=128256, kv=1024)


def make(*, full: bool = False, **keys: Any) -> JobSpec:
    tuning = {} if full or "adapter" in keys else {"lora": {"r": 16}}
    return jobfile.validate({"base_model": "/m", "datasets": [{"path": "/d.jsonl"}], **tuning, **keys})


def estimate(model: BaseModelInfo, device: Device = CPU, spec: JobSpec | None = None, **options: Any) -> Memory:
    spec = spec or make()
    return memory.estimate(spec, model, device, precision.decide(spec, model, device), reserve_bytes=RESERVE, **options)


def check(model: BaseModelInfo, device: Device, spec: JobSpec) -> None:
    remedy.check(spec, estimate(model, device, spec), device, lambda changed: estimate(model, device, changed))


def refused(model: BaseModelInfo, device: Device, spec: JobSpec) -> MemoryShortError:
    with pytest.raises(MemoryShortError) as raised:
        check(model, device, spec)
    return raised.value


# --- Parameters -------------------------------------------------------------------------------------------------------

#: zoo.plain's model: four linear layers of 8 x 8, two of 16 x 8, one of 8 x 16; and the rest.
LINEAR = 4 * 64 + 3 * 128
REST = 2 * 32 * 8 + 3 * 8


def parameters(model: BaseModelInfo, *tensors: Tensor, **config: Any) -> dict[str, Parameter]:
    changed = replace(model, tensors=(*model.tensors, *tensors), config=model.config | config)
    return {each.name: each for each in parameter.parameters(changed)}


def test_weights_count_in_the_dtype_that_is_loaded(model: BaseModelInfo) -> None:
    assert estimate(model).weights_bytes == (LINEAR + REST) * 2
    assert estimate(model, spec=make(full=True)).weights_bytes == (LINEAR + REST) * 4


def test_quantization_state_is_counted_and_the_head_stays_as_it_is(model: BaseModelInfo) -> None:
    blocks = 4 * 1 + 3 * 2  # of 64, for each of them one byte of scale
    state = blocks + 7 * 4 + 7 * 4 * (16 + 256 + 1)
    assert estimate(model, spec=make(quantization="4bit")).weights_bytes == LINEAR // 2 + state + REST * 2
    rows = 4 * 8 + 2 * 16 + 8
    assert estimate(model, spec=make(quantization="8bit")).weights_bytes == LINEAR + rows * 4 + REST * 2


def test_experts_are_stacked_as_transformers_does(model: BaseModelInfo) -> None:
    experts = [
        Tensor(f"model.layers.0.block_sparse_moe.experts.{number}.{leaf}.weight", "float32", shape)
        for number in range(3)
        for leaf, shape in (("w1", (16, 8)), ("w2", (8, 16)), ("w3", (16, 8)))
    ]
    found = parameters(model, *experts)
    prefix = "model.layers.0.block_sparse_moe.experts"
    assert found[f"{prefix}.gate_up_proj"].shape == (3, 32, 8)
    assert found[f"{prefix}.down_proj"].shape == (3, 8, 16)
    assert {found[f"{prefix}.{leaf}"].role for leaf in ("gate_up_proj", "down_proj")} == {"experts"}


def test_a_head_that_is_stored_twice_is_loaded_once(model: BaseModelInfo) -> None:
    assert "lm_head.weight" in parameters(model)
    assert "lm_head.weight" not in parameters(model, tie_word_embeddings=True)


def test_masks_in_old_checkpoints_are_no_weights(model: BaseModelInfo) -> None:
    mask = Tensor("h.0.attn.bias", "float32", (1, 1, 1024, 1024))
    bias = Tensor("h.0.attn.c_attn.bias", "float32", (24,))
    frequencies = Tensor("model.layers.0.self_attn.rotary_emb.inv_freq", "float32", (4,))
    found = parameters(model, mask, bias, frequencies)
    assert bias.name in found
    assert not found.keys() & {mask.name, frequencies.name}


# --- What is trained --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "num_trained"),
    [
        ({}, 4 * (4 * 16 + 3 * 24)),  # head and embeddings left out
        ({"target_modules": ["q_proj", "v_proj"]}, 2 * 4 * 16),
        ({"target_modules": r".*\.(q|k)_proj"}, 2 * 4 * 16),
        ({"target_modules": ["lm_head"]}, 4 * 40),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, 4 * 16 + 256),
        ({"target_modules": ["q_proj"], "use_dora": True}, 4 * 16 + 8),
        ({"exclude_modules": ["gate_proj", "up_proj", "down_proj"]}, 4 * 4 * 16),
    ],
)
def test_target_modules_are_matched_as_peft_does(model: BaseModelInfo, lora: dict[str, Any], num_trained: int) -> None:
    found = estimate(model, spec=make(lora={"r": 4, **lora}))
    assert found.adapter_bytes == found.gradient_bytes == num_trained * 4
    assert parameter.trained(make(lora={"r": 4, **lora}), model).num_parameters == num_trained


def test_full_fine_tuning_counts_gradients_and_optimizer_of_every_parameter(model: BaseModelInfo) -> None:
    found = estimate(model, spec=make(full=True))
    assert found.adapter_bytes == 0
    assert found.gradient_bytes == model.num_parameters * 4
    assert found.optimizer_bytes == model.num_parameters * 8 + 4 * len(model.tensors)
    assert estimate(model, spec=make(full=True, training={"optim": "sgd"})).optimizer_bytes == 0


def test_states_follow_the_trained_dtype_unless_the_optimizer_has_its_own(mistral_7b: BaseModelInfo) -> None:
    def state(optim: str) -> float:
        found = estimate(mistral_7b, H100, make(full=True, master_weights="none", training={"optim": optim}))
        return round(found.optimizer_bytes / mistral_7b.num_parameters, 1)

    assert state("adamw_torch_fused") == 4  # two in bfloat16
    assert state("paged_adamw_32bit") == 8
    assert state("adamw_8bit") == 2.1  # embeddings in 32 bits, the rest in 8 with its scales
    assert state("adafactor") == 0


def test_states_that_can_be_paged_out_refuse_nothing(mistral_7b: BaseModelInfo) -> None:
    training = {"optim": "paged_adamw_32bit", "per_device_train_batch_size": 1}
    paged = make(full=True, master_weights="none", training=training)
    check(mistral_7b, replace(H100, total_bytes=40 * GIB), paged)
    assert estimate(mistral_7b, H100, paged).total_bytes > 80 * GIB


# --- Activations ------------------------------------------------------------------------------------------------------


def activations(model: BaseModelInfo, device: Device = H100, num_row_tokens: int | None = None, **training: Any) -> int:
    return estimate(model, device, make(training=training), num_row_tokens=num_row_tokens).activation_bytes


def test_activations_grow_with_batch_and_length_and_shrink_with_checkpointing(mistral_7b: BaseModelInfo) -> None:
    one = activations(mistral_7b, per_device_train_batch_size=1, loss_type="nll")
    assert activations(mistral_7b, per_device_train_batch_size=2, loss_type="nll") == 2 * one
    assert activations(mistral_7b, per_device_train_batch_size=1, max_length=2048, loss_type="nll") == 2 * one
    assert activations(mistral_7b, gradient_checkpointing=False) > 5 * activations(mistral_7b)


def test_the_largest_quantized_matrix_is_unpacked_in_a_pass(mistral_7b: BaseModelInfo) -> None:
    def added(device: Device, **keys: Any) -> int:
        plain, packed = (
            estimate(mistral_7b, device, make(**keys, quantization=each)).activation_bytes for each in ("none", "4bit")
        )
        return packed - plain

    assert added(H100) == 4096 * 14336 * 2
    assert added(CPU, dtype="float32") == 4096 * 14336 * 4


def test_a_cpu_widens_a_matrix_of_8_bits_before_it_is_half_precision(mistral_7b: BaseModelInfo) -> None:
    plain, packed = (
        estimate(mistral_7b, CPU, make(dtype="bfloat16", quantization=each)).activation_bytes
        for each in ("none", "8bit")
    )
    assert packed - plain == 4096 * 14336 * 10


def test_logits_of_a_large_vocabulary_dominate_unless_the_loss_is_chunked(model: BaseModelInfo) -> None:
    small = llama(model, hidden=1024, mlp=3072, layers=28, vocabulary=151936, kv=1024)
    logits = 8 * 1024 * 151936 * 10
    assert 0.6 < logits / activations(small, CPU) < 1
    assert activations(small, H100, loss_type="nll") == activations(small, CPU)
    assert activations(small, H100) < activations(small, CPU) / 3


def test_tables_of_which_single_tokens_are_trained_are_copied_in_each_pass(model: BaseModelInfo) -> None:
    apart = llama(model, hidden=128, mlp=128, layers=1, vocabulary=10**6, kv=128)
    tied = replace(apart, tensors=tuple(each for each in apart.tensors if not each.name.startswith("lm_head")))
    table, head = 10**6 * 128 * 2, {"embed_tokens": [3], "lm_head": [3]}

    def added(each: BaseModelInfo, asked: Any) -> int:
        asking, plain = ({"r": 4, **keys} for keys in ({"trainable_token_indices": asked}, {}))
        rows = {"num_row_tokens": 1, "num_rows": 1}
        return (
            estimate(each, H100, make(lora=asking), **rows).activation_bytes
            - estimate(each, H100, make(lora=plain), **rows).activation_bytes
        )

    assert added(tied, [3]) == added(apart, head) == 2 * table
    assert 0 < added(apart, [3]) <= table


def test_short_rows_take_less_and_long_ones_are_cut(mistral_7b: BaseModelInfo) -> None:
    assert activations(mistral_7b, num_row_tokens=100) < activations(mistral_7b) / 5
    assert activations(mistral_7b, num_row_tokens=5000) == activations(mistral_7b)
    assert activations(mistral_7b, num_row_tokens=100, packing=True) == activations(mistral_7b)
    assert estimate(mistral_7b, H100, make(training={"max_length": None}), num_row_tokens=5000).length == 5000


def test_eager_attention_keeps_its_scores(mistral_7b: BaseModelInfo) -> None:
    eager, sdpa = (estimate(mistral_7b, H100, make(attn_implementation=each)) for each in ("eager", "sdpa"))
    assert eager.activation_bytes - sdpa.activation_bytes == 5 * 8 * 32 * 1024 * 1024 * 2


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_a_job_that_fits_is_not_refused(mistral_7b: BaseModelInfo) -> None:
    check(mistral_7b, L4, make(quantization="4bit", training={"per_device_train_batch_size": 2}))
    check(mistral_7b, H100, make())


def test_a_refusal_names_the_sum_its_parts_and_the_device(mistral_7b: BaseModelInfo) -> None:
    error = refused(mistral_7b, L4, make(full=True, master_weights="none"))
    assert re.match(
        r"about [\d.]+ GiB is needed \(weights 13.5 GiB, gradients 13.5 GiB, optimizer 27.0 GiB, activations "
        r"[\d.]+ GiB; 8 rows of 1024 tokens at a time\), but NVIDIA L4 has only 23.5 GiB available for a job",
        error.message,
    )
    assert error.code == "memory_insufficient"


def test_what_is_only_taken_now_refuses_nothing(mistral_7b: BaseModelInfo) -> None:
    check(mistral_7b, replace(H100, free_bytes=GIB), make())


@pytest.mark.parametrize(
    ("device", "keys", "proposed"),
    [
        # One change is enough, and the smallest come first.
        (
            L4,
            {"training": {"gradient_checkpointing": False, "per_device_train_batch_size": 4}},
            ["gradient_checkpointing: true", "per_device_train_batch_size: 1 with gradient_accumulation_steps: 4"],
        ),
        (
            L4,
            {"training": {"per_device_train_batch_size": 64}},
            ["per_device_train_batch_size: 16 with gradient_accumulation_steps: 4", "max_length: 256"],
        ),
        (
            L4,
            {"training": {"per_device_train_batch_size": 6, "max_length": 8192}},
            ["per_device_train_batch_size: 2 with gradient_accumulation_steps: 3", "max_length: 2048"],
        ),
        (
            T4,
            {"training": {"per_device_train_batch_size": 1, "max_length": 8192}},
            ["max_length: 2048", "quantization: 4bit"],
        ),
        (replace(T4, total_bytes=8 * GIB), {"training": {"per_device_train_batch_size": 1}}, ["quantization: 4bit"]),
        # Full fine-tuning does not fit however small its batch.
        (L4, {"full": True}, ["lora: {r: 16} instead of full fine-tuning"]),
        (
            replace(H100, total_bytes=48 * GIB),
            {"full": True, "master_weights": "none", "training": {"per_device_train_batch_size": 1}},
            ["optim: adamw_8bit"],
        ),
    ],
)
def test_the_smallest_changes_that_fit_are_proposed(
    mistral_7b: BaseModelInfo, device: Device, keys: dict[str, Any], proposed: list[str]
) -> None:
    hint = refused(mistral_7b, device, make(**keys)).hint
    assert all(words in hint for words in proposed), hint
    assert [hint.index(words) for words in proposed] == sorted(hint.index(words) for words in proposed)
    assert hint.count("; or ") <= 2


def test_a_chunked_loss_is_proposed_where_logits_are_what_is_too_much(model: BaseModelInfo) -> None:
    small = llama(model, hidden=1024, mlp=3072, layers=28, vocabulary=151936, kv=1024)
    spec = make(training={"loss_type": "nll", "per_device_train_batch_size": 16})
    assert refused(small, T4, spec).hint.startswith("loss_type: chunked_nll (")


def test_where_one_change_is_not_enough_several_are_proposed_together(llama_70b: BaseModelInfo) -> None:
    hint = refused(llama_70b, replace(H100, total_bytes=48 * GIB), make(full=True)).hint
    assert hint.startswith("lora: {r: 16} instead of full fine-tuning, quantization: 4bit, ")


def test_where_nothing_helps_that_is_said(llama_70b: BaseModelInfo) -> None:
    assert refused(llama_70b, T4, make()).hint.startswith("use a smaller model")


def test_on_an_apple_gpu_nothing_is_quantized_so_nothing_of_that_is_proposed(mistral_7b: BaseModelInfo) -> None:
    error = refused(mistral_7b, replace(MPS, total_bytes=12 * GIB), make(quantization="4bit"))
    assert "weights 13.5 GiB" in error.message
    assert "quantization" not in error.hint


_PROPOSAL = re.compile(r"(\w+): (\w+)")


def test_every_proposal_fits_when_it_is_taken(mistral_7b: BaseModelInfo) -> None:
    """Each proposal of the hint is written into a job file, and that job is estimated."""
    training = {"gradient_checkpointing": False, "per_device_train_batch_size": 4}
    hint = refused(mistral_7b, L4, make(training=training)).hint
    for words in hint.split("; or "):
        changes: dict[str, Any] = {
            key: int(value) if value.isdigit() else value
            for key, value in _PROPOSAL.findall(words.replace("true", "1"))
        }
        top = {"quantization": changes.pop("quantization")} if "quantization" in changes else {}
        if "gradient_checkpointing" in changes:
            changes["gradient_checkpointing"] = True
        assert estimate(mistral_7b, L4, make(training=training | changes, **top)).fits, words


def test_a_proposal_never_breaks_a_rule_of_job_files(mistral_7b: BaseModelInfo) -> None:
    spec = make(training={"packing": True, "per_device_train_batch_size": 512})
    assert "max_length: null" not in refused(mistral_7b, L4, spec).hint


def test_a_merge_needs_a_module_at_a_time(llama_70b: BaseModelInfo, tmp_path: Path) -> None:
    spec = make(full=True, adapter=str(tmp_path)).model_copy(update={"kind": "merge"})
    check(llama_70b, CPU, spec)
    assert estimate(llama_70b, CPU, spec).activation_bytes == 0, "not both models at once"


def test_a_batch_has_no_more_rows_than_there_are(mistral_7b: BaseModelInfo) -> None:
    job = make(training={"per_device_train_batch_size": 512})
    whole = estimate(mistral_7b, H100, job, num_row_tokens=64)
    few = estimate(mistral_7b, H100, job, num_row_tokens=64, num_rows=12)
    assert (whole.batch_size, few.batch_size) == (512, 12)
    assert few.activation_bytes < whole.activation_bytes / 20


# --- Images, videos and sounds ----------------------------------------------------------------------------------------

EYES = {"hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "num_heads": 16, "patch_size": 14}
LANGUAGE = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
#: Seed 003's row: eight frames of a camera's size, and a question.
CLIP = Row(num_text_tokens=60, media=(Facts("video", "mp4", 1920, 1080, num_frames=300),))
PHOTO = Row(num_text_tokens=40, media=(Facts("image", "JPEG", 4000, 3000),))


@pytest.fixture
def seeing(model: BaseModelInfo) -> BaseModelInfo:
    """Return Qwen2.5-VL 3B, as far as its config and its processor's file go."""
    files = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12845056}
    (model.path / "preprocessor_config.json").write_text(json.dumps(files))
    tensors = (
        *(Tensor(f"model.layers.{n}.self_attn.q_proj.weight", "bfloat16", (2048, 2048)) for n in range(36)),
        *(Tensor(f"visual.blocks.{n}.attn.qkv.weight", "bfloat16", (3840, 1280)) for n in range(32)),
        Tensor("visual.merger.mlp.0.weight", "bfloat16", (5120, 5120)),
    )
    stored = {"bfloat16": sum(tensor.num_elements for tensor in tensors)}
    config = {"model_type": "qwen2_5_vl", **LANGUAGE, "vision_config": EYES}
    return replace(
        model,
        model_type="qwen2_5_vl",
        config=config,
        tensors=tensors,
        stored_dtypes=stored,
        num_parameters=stored["bfloat16"],
        has_vision=True,
    )


def test_an_image_takes_the_room_that_its_pixels_ask_for(seeing: BaseModelInfo) -> None:
    spec = make(training={"max_length": 32768, "gradient_checkpointing": True})
    large = estimate(seeing, H100, spec, rows=[PHOTO])
    assert large.num_media_tokens == pytest.approx(4000 * 3000 / 28**2, rel=0.02)
    assert large.length == large.num_media_tokens + 40
    assert large.media == ("image",)
    limited = make(training={"max_length": 32768, "gradient_checkpointing": True}, media={"max_image_size": 512})
    small = estimate(seeing, H100, limited, rows=[PHOTO])
    assert small.num_media_tokens == pytest.approx(512 * 384 / 28**2, rel=0.05)
    assert small.activation_bytes < large.activation_bytes / 20
    assert 0 < small.tower_bytes < large.tower_bytes / 20


def test_fewer_frames_take_less(seeing: BaseModelInfo) -> None:
    numbers = [
        estimate(seeing, H100, make(training={"max_length": 32768}, media={"num_frames": number}), rows=[CLIP])
        for number in (8, 4)
    ]
    assert numbers[0].num_media_tokens == 2 * numbers[1].num_media_tokens
    assert numbers[0].activation_bytes > 1.8 * numbers[1].activation_bytes


def test_the_largest_picture_counts_with_the_pixels_from_on_which_fewer_are_less(seeing: BaseModelInfo) -> None:
    def pixels(row: Row, **media: int) -> int:
        spec = make(training={"max_length": 32768}, media=media)
        return estimate(seeing, H100, spec, rows=[CLIP, row], num_rows=2).num_pixels

    assert pixels(PHOTO) == 4000 * 3000
    assert pixels(PHOTO, max_pixels=1_000_000) == pytest.approx(1_000_000, rel=0.01)
    assert pixels(PHOTO, max_image_size=400) == 400 * 300
    # The processor makes 12.8 million of these 50: a half is still too many for it, a quarter is not.
    assert pixels(Row(40, (Facts("image", "JPEG", 8000, 6250),))) == 25_000_000
    sound = Row(40, (Facts("audio", "wav", duration_sec=3.0),))
    assert estimate(seeing, H100, make(), rows=[sound], num_rows=1).num_pixels == 0


def test_small_pictures_among_the_first_rows_say_nothing_of_the_others(seeing: BaseModelInfo) -> None:
    small = Row(40, (Facts("image", "PNG", 150, 150),))
    assert estimate(seeing, H100, make(), rows=[small], num_rows=1).num_pixels == 150 * 150
    assert estimate(seeing, H100, make(), rows=[small], num_rows=None).num_pixels == out_of_memory.ASSUMED_PIXELS
    assert estimate(seeing, H100, make(), rows=[small] * 150, num_rows=150).num_pixels == out_of_memory.ASSUMED_PIXELS
    assert estimate(seeing, H100, make(), rows=[PHOTO], num_rows=None).num_pixels == 4000 * 3000


def test_where_each_image_is_one_size_to_the_model_nothing_is_said_of_pixels(seeing: BaseModelInfo) -> None:
    (seeing.path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 336, "width": 336}}))
    assert estimate(seeing, H100, make(), rows=[PHOTO], num_rows=1).num_pixels == 0


def test_a_list_of_frames_counts_whole_as_it_is_taken(seeing: BaseModelInfo) -> None:
    def seen(*, is_list: bool) -> Row:
        return Row(60, (Facts("video", "JPEG", 640, 480, num_frames=32, is_list=is_list),))

    spec = make(training={"max_length": 32768})
    listed, directory = (estimate(seeing, H100, spec, rows=[seen(is_list=is_list)]) for is_list in (True, False))
    assert (listed.num_frames, directory.num_frames) == (32, 8)
    assert listed.num_media_tokens == 4 * directory.num_media_tokens
    small = replace(H100, total_bytes=listed.total_bytes * 9 // 10)

    def estimated(changed: JobSpec) -> Memory:
        return estimate(seeing, small, changed, rows=[seen(is_list=True)])

    said = remedy.remedies(spec, small, estimated, media=listed.media, num_frames=listed.num_frames)
    assert any(words.startswith("media: {num_frames: 24}") for words, _ in said)


def test_a_row_that_is_left_out_for_its_length_takes_no_room(seeing: BaseModelInfo) -> None:
    found = estimate(seeing, H100, make(training={"max_length": 1024}), rows=[PHOTO], num_row_tokens=100)
    assert (found.length, found.num_media_tokens, found.tower_bytes) == (100, 0, 0)


def test_eyes_that_are_trained_keep_what_they_saw(seeing: BaseModelInfo) -> None:
    training = {"max_length": 32768, "gradient_checkpointing": False}
    frozen = estimate(seeing, H100, make(training=training), rows=[CLIP])
    trains = estimate(seeing, H100, make(training=training, lora={"finetune_vision_layers": True}), rows=[CLIP])
    assert trains.tower_bytes > 10 * frozen.tower_bytes
    assert trains.adapter_bytes > frozen.adapter_bytes


def test_eyes_are_not_counted_as_quantized(seeing: BaseModelInfo) -> None:
    found = estimate(seeing, H100, make(quantization="4bit"), rows=[])
    eyes = 2 * (32 * 3840 * 1280 + 5120 * 5120)
    assert eyes < found.weights_bytes < eyes + 36 * 2048 * 2048


def test_what_does_not_fit_is_helped_by_fewer_frames_and_smaller_images(seeing: BaseModelInfo) -> None:
    spec = make(
        training={"max_length": 131072, "gradient_checkpointing": True, "per_device_train_batch_size": 1},
        media={"num_frames": 64},
    )
    small = replace(H100, name="a small one", total_bytes=20 * 2**30)
    with pytest.raises(MemoryShortError) as refused:
        remedy.check(
            spec,
            estimate(seeing, small, spec, rows=[CLIP]),
            small,
            lambda changed: estimate(seeing, small, changed, rows=[CLIP]),
        )
    assert "of which are for video" in refused.value.message
    assert "media: {num_frames:" in str(refused.value.hint)
    assert "media: {max_image_size:" in str(refused.value.hint)
    assert "max_length" not in str(refused.value.hint)
