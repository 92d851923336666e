"""Token counts of images, videos and sounds, read from files as the hub has them; the numbers are the families' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from honed.inputs import modality
from honed.inputs.modality import Senses, Tower


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.language_model.layers.0.self_attn.q_proj", "language"),
        ("model.layers.3.mlp.gate_proj", "language"),
        ("lm_head", "language"),
        ("model.visual.blocks.0.attn.qkv", "vision"),
        ("visual.merger.mlp.0", "projector"),
        ("model.visual.deepstack_merger_list.2.linear_fc1", "projector"),
        ("model.vision_tower.vision_model.encoder.layers.0.mlp.fc1", "vision"),
        ("vision_tower.vision_model.embeddings.position_embedding", "vision"),
        ("model.multi_modal_projector.linear_1", "projector"),
        ("multi_modal_projector.linear", "projector"),
        ("model.connector.modality_projection.proj", "projector"),
        ("model.vision_model.encoder.layers.0.self_attn.out_proj", "vision"),
        ("thinker.audio_tower.layers.0.fc1", "audio"),
        ("audio_tower.proj", "projector"),
        ("audio_tower.layers.0.self_attn.q_proj", "audio"),
        ("model.embed_audio.embedding_projection", "projector"),
    ],
)
def test_a_modules_name_tells_its_part(name: str, part: str) -> None:
    assert modality.part(name) == part


def senses(directory: Path, config: dict[str, Any], **files: dict[str, Any]) -> Senses:
    for name, content in files.items():
        (directory / f"{name}_config.json").write_text(json.dumps(content))
    return modality.look(directory, config)


QWEN2_VL = {"embed_dim": 1280, "hidden_size": 3584, "depth": 32, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14}
QWEN2_5_VL = {"hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "num_heads": 16, "out_hidden_size": 2048}
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}


def test_qwen_counts_patches_of_the_image_as_it_is(tmp_path: Path) -> None:
    files = {"preprocessor": {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}}
    found = senses(tmp_path, {"vision_config": QWEN2_5_VL}, **files)
    assert found.eyes == Tower(hidden=1280, mlp=3420, layers=32, heads=16)
    assert found.image(1280, 720).tokens == 46 * 26
    assert found.image(1280, 720).positions == 4 * 46 * 26
    assert found.image(10, 10).tokens == 4  # made larger
    assert found.image(8000, 8000).tokens <= 12845056 // 28**2 < found.image(8000, 8000).tokens * 1.02
    assert found.video(8, 640, 480).tokens == 4 * found.image(640, 480).tokens  # two frames a token


def test_the_width_of_qwen2_vls_eyes_is_not_that_of_the_language_model(tmp_path: Path) -> None:
    assert senses(tmp_path, {"vision_config": QWEN2_VL}).eyes == Tower(hidden=1280, mlp=5120, layers=32, heads=16)


def test_other_families_have_a_number_of_tokens_of_their_own(tmp_path: Path) -> None:
    clip = {"image_size": 336, "patch_size": 14, "hidden_size": 1024, "num_hidden_layers": 24}
    llava = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    found = senses(tmp_path, {"vision_config": clip, "image_seq_length": 576}, processor=llava)
    assert (found.image(1920, 1080).tokens, found.image(1920, 1080).positions) == (576, 576)
    gemma = {"vision_config": SIGLIP | {"image_size": 896, "patch_size": 14}, "mm_tokens_per_image": 256}
    found = senses(tmp_path, gemma, processor={"image_seq_length": 256})
    assert (found.image(50, 50).tokens, found.image(50, 50).positions) == (256, 4096)


def test_tiles_are_counted_with_the_whole_that_goes_before_them(tmp_path: Path) -> None:
    config = {"vision_config": SIGLIP | {"image_size": 364, "patch_size": 14}, "scale_factor": 2}
    image = {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}, "do_image_splitting": True}
    found = senses(tmp_path, config, processor={"image_seq_len": 169}, preprocessor=image)
    assert found.image(1000, 1000).positions == 17 * 26 * 26
    assert found.image(1000, 1000).tokens - 17 * 169 == pytest.approx(40, abs=5)  # what is written around them
    assert found.video(4, 100, 100).positions == 4 * 26 * 26  # frames are not split
    pinpoints = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    clip = {"image_size": 336, "patch_size": 14, "hidden_size": 1024, "num_hidden_layers": 24}
    (tmp_path / "preprocessor_config.json").unlink()
    found = senses(tmp_path, {"vision_config": clip, "image_grid_pinpoints": pinpoints}, processor={})
    assert found.image(1000, 1000).positions == 5 * 576


def test_sound_is_as_long_as_it_is_and_its_tower_always_full(tmp_path: Path) -> None:
    ears = {"d_model": 1280, "encoder_layers": 32, "encoder_ffn_dim": 5120, "encoder_attention_heads": 20}
    found = senses(tmp_path, {"audio_config": ears}, preprocessor={"chunk_length": 30, "sampling_rate": 16000})
    assert found.ears == Tower(hidden=1280, mlp=5120, layers=32, heads=20)
    assert (found.sound(10).tokens, found.sound(10).positions) == (250, 1500)
    assert found.sound(90).tokens == 750


def test_files_that_say_nothing_are_no_fault_of_the_estimate(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{")
    found = senses(tmp_path, {"model_type": "llama"}, processor={"size": [1, 2], "image_processor": [], "x": None})
    assert (found.eyes, found.ears) == (None, None)
    assert found.image(100, 100).tokens > 0
    assert found.sound(1).tokens == 25
