"""Outputs can be served: a clean process opens them as users do, with this transformers and with 4.57."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from honed.worker.model import leftover
from honed.worker.model.torchvision import mend
from worker.conftest import MakeJob
from zoo.vision import build_vision_checkpoint

mend()
ROOT = Path(__file__).parents[2]
OLDER = ROOT / "build/older"
OPENED = ROOT / "tests/opened.py"
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
QUESTION = "What is the capital of France?"
#: A family, and settings that a reader must find: none is at the default of its class in transformers 4.57.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "gemma3_text": {
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 3e5, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 777.0},
        },
    },
    "gpt_neox": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 555.0, "partial_rotary_factor": 0.5},
    },
    "mixtral": {
        "template": "mistral",
        "num_local_experts": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2e5},
    },
    "llava": {},
}
Seen = dict[tuple[str, str], dict[str, Any]]


def published(base: Path) -> Path:
    """Give a LLaVA the published names, which transformers 5 writes only after it has read them."""
    tensors = load_file(base / "model.safetensors")
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in tensors.items()}
    save_file(renamed, base / "model.safetensors", {"format": "pt"})
    return base


def asked(directory: Path, base: Path | None, question: str | None = None) -> list[Any]:
    return [str(directory), str(base) if base else None, question]


def opened(requests: list[list[Any]], *, older: bool) -> list[dict[str, Any]]:
    """Open outputs in a process that knows nothing of their training."""
    paths = [str(OLDER)] if older else []
    done = subprocess.run(
        [sys.executable, str(OPENED)],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout))


@pytest.mark.timeout(600)
def test_six_families_are_read_as_the_same_model_by_this_transformers_and_by_4_57(
    make_job: MakeJob, tmp_path: Path
) -> None:
    requests, names = [], []
    for family, settings in FAMILIES.items():
        base: Any = settings | {"dtype": "bfloat16"}
        if family == "llava":
            base = published(build_vision_checkpoint(tmp_path / "llava", family, dtype="bfloat16"))
        learns = {"max_steps": 60, "learning_rate": 5e-3, "per_device_train_batch_size": 4} if family == "llama" else {}
        full = make_job(
            family, model=base, num_rows=4, training=learns or {"max_steps": 1}, predictions={"sample_frequency": "off"}
        )
        modules = ["query_key_value"] if family == "gpt_neox" else LORA["target_modules"]
        lora = make_job(
            family,
            model=base,
            lora=LORA | {"target_modules": modules},
            save_merged="bfloat16",
            training={"max_steps": 2, "learning_rate": 2e-2},
            predictions={"sample_frequency": "off"},
        )
        for job in (full, lora):
            ended = job.run()
            assert ended.status == 0, ended.result
        # transformers 5 wrote this base, in a spelling that 4.57 misreads: an adapter needs one as it is published.
        stored = leftover.stored(Path(full.plan["base_model_path"])).keys()
        assert leftover.stored(full.output_dir).keys() == stored == leftover.stored(lora.output_dir / "merged").keys()
        whole = shutil.copytree(Path(full.plan["base_model_path"]), tmp_path / family / "base")
        shutil.copyfile(full.output_dir / "config.json", whole / "config.json")
        requests += [
            asked(full.output_dir, None, QUESTION if learns else None),
            asked(lora.output_dir, whole),
            asked(lora.output_dir / "merged", None),
            asked(whole, None),
        ]
        names += [f"{family}: {what}" for what in ("full", "adapter", "merged", "base")]
    ours = dict(zip(names, opened(requests, older=False), strict=True))
    for name, seen in ours.items():
        assert not seen["lost"], name
        if not name.endswith("base"):
            base_logits = torch.tensor(ours[f"{name.split(':')[0]}: base"]["logits"])
            assert (torch.tensor(seen["logits"]) - base_logits).abs().max() > 1e-3, f"{name} is not trained"
    assert ours["llama: full"]["answer"] == "Paris.<|eot_id|>"  # stops at the end of the turn, another token than eos
    if not OLDER.exists():
        pytest.skip("transformers 4.57 is not in build/older: run scripts/older")
    trained = {name: each for name, each in zip(names, requests, strict=True) if not name.endswith("base")}
    theirs = dict(zip(trained, opened([*trained.values()], older=True), strict=True))
    for name, seen in theirs.items():
        assert seen["transformers"].startswith("4.57."), seen["transformers"]
        one, other = torch.tensor(ours[name]["logits"]), torch.tensor(seen["logits"])
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-5), (name, float((one - other).abs().max()))
        assert not seen["lost"], (name, seen["lost"])
        assert [seen[key] for key in ("ids", "eos", "answer")] == [ours[name][key] for key in ("ids", "eos", "answer")]
