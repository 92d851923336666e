"""Runs that only get worse are stopped with their last good checkpoint; healthy ones run to their end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from honed.worker.train import checkpoint, divergence
from worker.conftest import MakeJob
from worker.test_resume_state import cut, keys, resumed

OFF = {"sample_frequency": "off"}


def finite(path: Path) -> bool:
    import torch
    from safetensors.torch import load_file

    return all(bool(torch.isfinite(tensor).all()) for tensor in load_file(path).values())


def test_a_run_whose_gradients_explode_is_stopped_and_its_last_good_checkpoint_stays(make_job: MakeJob) -> None:
    training = {
        "max_steps": 150,
        "warmup_steps": 60,
        "lr_scheduler_type": "constant_with_warmup",
        "learning_rate": 1.0,
        "save_steps": 5,
        "per_device_train_batch_size": 1,
        "max_grad_norm": 0,
    }
    job = make_job("gpt2", dtype="float32", predictions=OFF, training=training)
    ended = job.run()
    print({step: round(loss, 1) for step, loss in ended.losses.items() if step > len(ended.losses) - 12})
    print(ended.result["error"])
    assert ended.status == 84
    [word] = [item["message"] for item in ended.of("log") if item.get("code") == "diverged"]
    assert "until step" in word
    good = int(word.split("until step ")[1].split(";")[0])
    assert ended.result["step"] - good <= 5
    found, damaged = checkpoint.find(job.dir / "checkpoints")
    assert found is not None
    assert not damaged
    assert found.step <= good
    assert finite(found.path / "model.safetensors")


def test_no_checkpoint_is_made_under_suspicion_at_an_epochs_end_either(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspicious: set[int] = set()
    look = divergence.Divergence.look

    def watched(self: divergence.Divergence, step: int, *args: Any, **kwargs: Any) -> Any:
        lost = look(self, step, *args, **kwargs)
        if self.is_suspicious:
            suspicious.add(step)
        return lost

    monkeypatch.setattr(divergence.Divergence, "look", watched)
    training = {
        "max_steps": 100,
        "warmup_steps": 60,
        "lr_scheduler_type": "constant_with_warmup",
        "learning_rate": 1.0,
        "save_strategy": "epoch",
        "per_device_train_batch_size": 1,
        "max_grad_norm": 0,
    }
    job = make_job(
        "gpt2", dtype="float32", num_rows=3, predictions=OFF, training=training, divergence={"num_steps": 1000}
    )
    ended = job.run()
    assert any(step % 3 == 0 for step in suspicious), "no epoch ended under suspicion"
    saved = {item["step"] for item in ended.of("checkpoint")}
    assert saved
    assert not saved & suspicious


def test_what_a_resumed_run_knows_of_its_steps_is_what_the_undisturbed_one_knows(make_job: MakeJob) -> None:
    """The cut lies between an epoch's last step and the epoch's end, which the resumed run makes up for."""
    wanted = keys(eval_strategy="steps", eval_steps=3) | {"predictions": OFF}
    kept = []
    for is_cut in (False, True):
        job = make_job(**wanted)
        if is_cut:
            cut(job, "evaluation", 6)
            resumed(job)
        else:
            job.run()
        found, _ = checkpoint.find(job.dir / "checkpoints")
        assert found is not None
        kept.append(found.progress.divergence)
    assert len(kept[0]["steps"]) == 11
    assert kept[1] == kept[0]


def test_weights_that_are_no_numbers_are_never_saved(
    make_job: MakeJob, tmp_path: Path, checkpoint_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are checked even if losses and gradients showed nothing."""
    from safetensors.torch import load_file, save_file

    monkeypatch.setattr(divergence.Divergence, "look", lambda *_, **__: None)
    base = tmp_path / "base"
    shutil.copytree(checkpoint_of("llama"), base)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] = float("inf")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    for save_steps in (1, 100):
        job = make_job(
            model=base, dtype="float32", predictions=OFF, training={"max_steps": 3, "save_steps": save_steps}
        )
        ended = job.run()
        assert ended.status == 84
        assert "are not finite" in ended.result["error"]["message"]
        assert not list((job.dir / "checkpoints").iterdir())
        assert not (job.output_dir / "model.safetensors").exists()


@pytest.mark.parametrize(
    "keys",
    [
        {"training": {"learning_rate": 5e-2, "warmup_steps": 0}, "lora": {"r": 4}},
        {"training": {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}, "num_rows": 3},
        {
            "training": {"learning_rate": 2e-2, "train_sampling_strategy": "sequential"},
            "lora": {"r": 2, "lora_dropout": 0.5},
        },
    ],
    ids=["high learning rate", "learned by heart", "dropout"],
)
def test_a_noisy_run_of_single_rows_is_left_alone(make_job: MakeJob, keys: dict[str, Any]) -> None:
    training = {"max_steps": 60, "per_device_train_batch_size": 1} | keys["training"]
    ended = make_job(dtype="float32", predictions=OFF, **(keys | {"training": training})).run()
    assert ended.status == 0, ended.result["error"]
    assert len(ended.losses) == 60
