"""Every combination of stored dtype, asked dtype, quantization and adapter trains with flags that match the model, or
is rejected before loading.

Families, stored dtype, asked dtype, quantization and adapter are combined pairwise by default: each two settings meet
in some cell; --all runs every cell. Every cell trains, evaluates, predicts and exports, and is observed while it
trains: the trainer's flags, accelerate's mixed precision, autocast in the forward pass, and the dtype of every
parameter.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from honed.spec import jobfile
from honed.system.error import SpecError
from worker.conftest import Ended, MakeJob, WorkerJob
from zoo.model import FAMILIES

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import gpu_matrix

Cell = tuple[str, str, str, str, str]
STORED = ("float32", "bfloat16", "float16")
ASKED = ("auto", "bfloat16", "float16", "float32")
WAYS = (("none", "lora"), ("4bit", "lora"), ("8bit", "lora"), ("none", "full"))

CELLS: list[Cell] = [
    (family, stored, asked, quantization, adapter)
    for family, stored, asked, (quantization, adapter) in itertools.product(FAMILIES, STORED, ASKED, WAYS)
]


def pairwise(cells: Sequence[Cell]) -> list[Cell]:
    """Return few cells, always the same, in which each pair of settings meets that meets in any cell."""

    def pairs(cell: Cell) -> set[tuple[tuple[int, str], ...]]:
        return set(itertools.combinations(enumerate(cell), 2))

    missing = set().union(*map(pairs, cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs(cell) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


PAIRWISE = pairwise(CELLS)

Watch = Callable[[WorkerJob], tuple[Ended, dict[str, Any]]]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """A function that runs a job in this process, and observes its trainer at the start."""
    import transformers.trainer

    callbacks = list(transformers.trainer.DEFAULT_CALLBACKS)
    path = tmp_path / "seen.json"
    gpu_matrix.look(path)

    def run(job: WorkerJob) -> tuple[Ended, dict[str, Any]]:
        path.unlink(missing_ok=True)
        return job.run(), json.loads(path.read_text()) if path.exists() else {}

    yield run
    transformers.trainer.DEFAULT_CALLBACKS[:] = callbacks


def train(make_job: MakeJob, watch: Watch, cell: Cell) -> None:
    family, stored, asked, quantization, adapter = cell
    keys: dict[str, Any] = {"lora": {"r": 4, "lora_dropout": 0.1}} if adapter == "lora" else {}
    job = make_job(
        family,
        model={"dtype": stored},
        dtype=asked,
        quantization=quantization,
        eval_split=0.2,
        training={"max_steps": 3, "learning_rate": 1e-2},
        predictions={"num_samples": 2, "max_new_tokens": 4},
        **keys,
    )
    planned = job.plan["precision"]
    ended, seen = watch(job)
    assert ended.status == 0, (ended.result, planned)
    check_choice(planned, asked, adapter)
    is_full = adapter == "full"
    assert gpu_matrix.mismatches(planned, seen, on_cuda=False) == []
    autocasts = asked == "bfloat16" or (asked == "auto" and stored == "bfloat16")
    check_flags(seen, autocasts=autocasts if is_full else None)
    assert len(ended.losses) == 3
    assert all(loss is not None for loss in ended.losses.values())
    assert ended.of("evaluation")
    assert [item["num_failed"] for item in ended.of("predictions")] == [0] * len(ended.of("predictions"))
    exported = "adapter_model.safetensors" if adapter == "lora" else "model.safetensors"
    dtypes = gpu_matrix._stored(job.output_dir / exported)
    assert dtypes == {stored if is_full else planned["adapter_dtype"]}, "an output has the dtype that was stored"


def check_choice(planned: dict[str, Any], asked: str, adapter: str) -> None:
    """Check that a dtype asked for by name is loaded, and that full fine-tuning loads float32."""
    if adapter == "full":
        assert planned["load_dtype"] == "float32"
    elif asked != "auto":
        assert planned["load_dtype"] == asked


def check_flags(seen: dict[str, Any], *, autocasts: bool | None) -> None:
    """Check that the flag matches the model's parameters, not just the plan: on a CPU, bf16 or none. float32 weights
    that are all trained may be under autocast."""
    kept = [which for which in seen["parameters"] if not which.startswith("quantized")]
    of_model = {which.split()[1] for which in kept if which.startswith("frozen")} or {kept[0].split()[1]}
    assert len(of_model) == 1, "one dtype for all that is not quantized and not an adapter"
    (dtype,) = of_model
    wanted = dtype == "bfloat16" if autocasts is None else autocasts
    assert (seen["bf16"], seen["fp16"]) == (wanted, False)
    assert seen["autocast"] == ("bfloat16" if wanted else "off")
    assert seen["config_dtype"] == dtype, "what Unsloth's own check reads"


@pytest.mark.parametrize("cell", PAIRWISE, ids="-".join)
def test_each_two_settings_train_together(make_job: MakeJob, watch: Watch, cell: Cell) -> None:
    train(make_job, watch, cell)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in PAIRWISE], ids="-".join)
def test_every_other_cell_trains_too(make_job: MakeJob, watch: Watch, cell: Cell) -> None:
    train(make_job, watch, cell)


def test_every_pair_of_settings_is_in_some_cell() -> None:
    for places in itertools.combinations(range(5), 2):
        pairs = {tuple(cell[place] for place in places) for cell in CELLS}
        assert {tuple(cell[place] for place in places) for cell in PAIRWISE} == pairs


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_a_quantized_base_trained_whole_is_refused_before_anything_is_looked_at(asked: str, quantization: str) -> None:
    document = {
        "base_model": "/no/such/model",
        "datasets": [{"path": "/no/such/file.jsonl"}],
        "dtype": asked,
        "quantization": quantization,
    }
    with pytest.raises(SpecError, match="quantization") as raised:
        jobfile.validate(document)
    assert "lora" in (raised.value.hint or "") + raised.value.message


@pytest.fixture(scope="module")
def stored_in_4bit(checkpoint_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as bitsandbytes saves it, whose config names float16 as the compute dtype."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    base, directory = checkpoint_of("qwen3"), tmp_path_factory.mktemp("stored") / "4bit"
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
    )
    AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization).save_pretrained(directory)
    AutoTokenizer.from_pretrained(base).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("asked", ASKED)
def test_a_checkpoint_stored_in_4bit_computes_in_the_dtype_it_is_loaded_in(
    make_job: MakeJob, watch: Watch, stored_in_4bit: Path, asked: str
) -> None:
    job = make_job(model=stored_in_4bit, dtype=asked, lora={"r": 4}, training={"max_steps": 2})
    ended, seen = watch(job)
    assert ended.status == 0, (ended.result, job.plan["precision"])
    assert gpu_matrix.mismatches(job.plan["precision"], seen, on_cuda=False) == []
