"""The field report's matrix, and full fine-tuning of each model, through both backends: every cell trains and exports.

It is a small version of scripts/gpu-matrix, whose processes begin with their imports done: a fork for each cell.
The table is printed: `pytest -rA tests/worker/test_seed_matrix.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/gpu_matrix.py"
sys.path.append(str(SCRIPT.parent))
import gpu_matrix  # noqa: E402

import warm  # noqa: E402
from honed.inputs import basemodel  # noqa: E402
from honed.plan import plan  # noqa: E402
from honed.spec import jobfile  # noqa: E402
from honed.spec.config import Config  # noqa: E402
from honed.system import installed  # noqa: E402
from honed.system.device import Device, cpu  # noqa: E402
from honed.system.error import HonedError  # noqa: E402
from honed.system.installed import Installed  # noqa: E402
from zoo.model import build_checkpoint, write_facts  # noqa: E402

#: Seconds for two imports and sixteen cells.
TIMEOUT_SEC = 600
#: Backend, model, dtype, quantization and adapter of cells that Unsloth would not run as asked on a CPU.
REFUSED = {
    ("unsloth", "Qwen3-1.7B", "bfloat16", "none", "full"): "only adapters",
    ("unsloth", "Llama-3.2-1B", "bfloat16", "none", "full"): "only adapters",
    ("unsloth", "Mistral-7B", "bfloat16", "none", "full"): "only adapters",
    ("unsloth", "Llama-3.2-1B", "float16", "4bit", "lora"): "would load in bfloat16",
}


KEYS = ("model", "dtype", "quantization")
#: The report's table: bf16=true is bfloat16, bf16=false float32, fp16=true float16.
FIVE = [
    ("Qwen3-1.7B", "bfloat16", "4bit"),
    ("Qwen3-1.7B", "float32", "4bit"),
    ("Llama-3.2-1B", "float16", "4bit"),
    ("Mistral-7B", "bfloat16", "4bit"),
    ("Qwen3-1.7B", "bfloat16", "none"),
]


#: Cells of two GPUs.
PAIRS = "^transformers/Qwen3-1.7B/bfloat16/[48]bit/lora/fsdp$"


def run_script(
    tmp_path: Path, only: str, *arguments: str, popen: type[warm.Popen] = warm.RankPopen
) -> tuple[list[dict[str, Any]], str]:
    """Return the rows and the page."""
    command = [
        sys.executable,
        str(SCRIPT),
        "--tiny",
        f"--only={only}",
        f"--dir={tmp_path / 'work'}",
        f"--json={tmp_path / 'rows.json'}",
        f"--out={tmp_path / 'table.md'}",
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = warm.run(command, env=environment, timeout=TIMEOUT_SEC, popen=popen)
    logs = "".join(path.read_text()[-1500:] for path in (tmp_path / "work").glob("**/worker.log"))
    assert (tmp_path / "rows.json").exists(), done.stderr + logs
    rows = json.loads((tmp_path / "rows.json").read_text())
    failed = [row for row in rows if row["outcome"] == "failed"]
    assert done.returncode == bool(failed), done.stderr
    return rows, (tmp_path / "table.md").read_text()


@dataclass(frozen=True)
class Ran:
    """The rows of runs of the script, their pages, and the directory."""

    rows: list[dict[str, Any]]
    pages: str
    dir: Path


@pytest.fixture(scope="module")
def in_forks(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The field report's matrix, and two cells of two GPUs."""
    directory = tmp_path_factory.mktemp("in-forks")
    rows, pages = [], ""
    for only, popen in ((f"^transformers/.*seed$|{PAIRS}", warm.RankPopen), ("^unsloth/.*seed$", warm.UnslothPopen)):
        own_dir = directory / popen.kind
        own_dir.mkdir()
        ran, page = run_script(own_dir, only, popen=popen)
        rows += ran
        pages += page
    return Ran(rows, pages, directory)


@pytest.mark.timeout(TIMEOUT_SEC + 60)
def test_every_cell_of_the_field_reports_matrix_trains_evaluates_saves_predictions_and_exports(in_forks: Ran) -> None:
    print(in_forks.pages)
    rows = [row for row in in_forks.rows if not row["cell"]["extra"]]
    assert len(rows) == 16
    refused = {}
    for row in rows:
        cell = row["cell"]
        key = (cell["backend"], cell["model"], cell["dtype"], cell["quantization"], cell["adapter"])
        if row["outcome"] == "refused":
            refused[key] = row
            continue
        assert row["outcome"] == "finished", (key, row["code"], row["message"])
        assert row["num_predictions"] == 4, (key, "two before the first step, two at the end, in the database")
        assert row["mismatches"] == [], key
        assert row["has_output"], (key, "every tensor that is exported is in the dtype that was trained")
        assert row["seen"]["has_unsloth"] == (cell["backend"] == "unsloth")
        assert row["tokens_per_sec"] > 0
        computed = "bfloat16" if row["planned"]["bf16"] else row["planned"]["load_dtype"]
        assert computed == cell["dtype"], "what is asked by name is had; weights that are all trained stay float32"
    assert set(refused) == set(REFUSED)
    # Each of the field report's five rows has predictions through both backends; one needs a GPU for Unsloth.
    saved = {(row["cell"]["backend"], *(row["cell"][name] for name in KEYS)) for row in rows if row["num_predictions"]}
    wanted = {(backend, *row) for backend in ("transformers", "unsloth") for row in FIVE}
    assert wanted - saved == {("unsloth", "Llama-3.2-1B", "float16", "4bit")}
    for key, words in REFUSED.items():
        assert (refused[key]["code"], words in refused[key]["message"]) == ("backend_unavailable", True)
    evaluated = [
        event
        for path in in_forks.dir.glob("*/work/**/events.jsonl")
        for event in path.open()
        if '"event": "evaluation"' in event
    ]
    ended = [row for row in in_forks.rows if row["outcome"] == "finished"]
    assert len(evaluated) == 2 * len(ended), "before the first step and after the last"


@pytest.mark.skipif(not installed.look().has("unsloth"), reason="needs Unsloth")
def test_the_row_that_unsloth_would_change_is_trained_without_it_unless_it_is_named(tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "llama", "llama", dtype="bfloat16")
    rows = write_facts(tmp_path / "facts.jsonl", 8)
    spec = jobfile.validate(
        {
            "base_model": str(tmp_path / "llama"),
            "datasets": [{"path": str(rows)}],
            "lora": {"r": 4},
            "dtype": "float16",
            "quantization": "4bit",
        }
    )
    model = basemodel.inspect(tmp_path / "llama", model_type=None)
    found = plan.make(spec, model, cpu(), config=Config(), installed=installed.look())
    assert (found.backend.name, found.precision.load_dtype) == ("transformers", "float16")
    assert any("in bfloat16 instead of the planned float16" in reason for reason in found.backend.reasons)


def test_cells_of_two_gpus_run_as_two_processes(in_forks: Ran) -> None:
    divided, refused = [row for row in in_forks.rows if row["cell"]["extra"]]
    assert (divided["outcome"], divided["mismatches"]) == ("finished", [])
    assert (divided["has_output"], divided["num_predictions"]) == (True, 4)
    assert (refused["outcome"], refused["code"]) == ("refused", "spec_invalid")


def test_where_a_fork_cannot_use_the_gpu_each_cell_has_a_process_of_its_own(tmp_path: Path) -> None:
    (row,), _ = run_script(tmp_path, "^transformers/Qwen3-1.7B/float32/none/lora$", "--fresh")
    assert (row["outcome"], row["mismatches"], row["has_output"]) == ("finished", [], True)


def test_the_real_shapes_have_the_published_number_of_parameters() -> None:
    counted = {name: gpu_matrix.count_parameters(shape) for name, shape in gpu_matrix.SHAPES.items()}
    assert counted == {
        "Qwen3-1.7B": 1_720_574_976,
        "Llama-3.2-1B": 1_235_814_400,
        "Mistral-7B": 7_241_732_096,
        "Qwen2.5-VL-3B": 3_754_622_976,
    }


def test_a_cell_that_crashes_or_hangs_costs_itself_alone(tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    assert (
        gpu_matrix.in_child(lambda: os.kill(os.getpid(), signal.SIGKILL) or 0, log_path, timeout_sec=TIMEOUT_SEC)[0]
        == -9
    )
    assert gpu_matrix.in_child(lambda: 1 // 0, log_path, timeout_sec=TIMEOUT_SEC)[0] == 70
    assert "ZeroDivisionError" in log_path.read_text()
    assert gpu_matrix.in_child(lambda: time.sleep(60) or 0, log_path, timeout_sec=1)[0] == -signal.SIGALRM
    status, num_bytes = gpu_matrix.in_child(lambda: 0, log_path, timeout_sec=TIMEOUT_SEC)
    assert status == 0
    assert num_bytes > 2**20


PLANNED = {
    "bf16": True,
    "fp16": False,
    "load_dtype": "bfloat16",
    "compute_dtype": "bfloat16",
    "adapter_dtype": "float32",
    "quantization": "4bit",
}
SEEN = {
    "bf16": True,
    "fp16": False,
    "mixed_precision": "bf16",
    "autocast": "bfloat16",
    "has_scaler": False,
    "config_dtype": "bfloat16",
    "compute_dtypes": ["bfloat16"],
    "parameters": {"trained float32": 10, "frozen bfloat16": 100, "quantized uint8": 50},
}


@pytest.mark.parametrize(
    ("planned", "seen", "expected"),
    [
        ({}, {}, []),
        ({}, {"bf16": False, "fp16": True}, ["bf16 False, not True", "fp16 True, not False"]),  # a backend's flip
        ({}, {"autocast": "off"}, ["autocast off, not bfloat16"]),
        ({}, {"mixed_precision": "fp16"}, ["mixed_precision fp16, not bf16"]),
        ({}, {"compute_dtypes": ["float16"]}, ["compute_dtypes ['float16'], not ['bfloat16']"]),
        (
            {},
            {"parameters": {"trained float32": 1, "frozen float16": 9, "quantized uint8": 1}},
            ["9 frozen parameters float16, not bfloat16"],
        ),
        (
            {},
            {"parameters": {"trained bfloat16": 1, "quantized uint8": 1}},
            ["1 trained parameters bfloat16, not float32"],
        ),
        (
            {"quantization": "8bit"},
            {"parameters": {"trained float32": 1, "frozen bfloat16": 9}},
            ["not quantized, planned 8bit"],
        ),
        (
            {"bf16": False, "fp16": True, "load_dtype": "float16", "compute_dtype": "float16"},
            {
                "bf16": False,
                "fp16": True,
                "mixed_precision": "fp16",
                "autocast": "float16",
                "config_dtype": "float16",
                "compute_dtypes": ["float16"],
                "parameters": {"trained float32": 1, "quantized uint8": 1},
            },
            ["has_scaler False, not True"],
        ),
    ],
)
def test_a_difference_between_plan_and_trainer_is_named(
    planned: dict[str, Any], seen: dict[str, Any], expected: list[str]
) -> None:
    assert gpu_matrix.mismatches(PLANNED | planned, SEEN | seen, on_cuda=True) == expected


def test_what_only_a_gpu_can_show_is_listed_until_one_has_shown_it() -> None:
    def shown(*rows: gpu_matrix.Row) -> tuple[int, int]:
        text = gpu_matrix.proofs([*rows])
        return text.count("needs CUDA"), text.count("1 of 1 cells")

    fp16, wide = {"fp16": True}, {"parameters": {"trained float32": 1}, "device": "cuda"}
    half = wide | {"autocast": "float16", "has_scaler": True, "scale": 65536.0}
    bf16, under = {"bf16": True}, wide | {"autocast": "bfloat16"}
    flash = {"attn_implementation": "flash_attention_2"}
    cell, number = gpu_matrix.Cell, len(gpu_matrix.NEEDS_CUDA)
    asked = cell("transformers", "Llama-3.2-1B", "float16", "4bit", "lora")
    on_cuda = gpu_matrix.Row(asked, gpu_matrix.FINISHED, planned=fp16, seen=half)
    assert shown(replace(on_cuda, seen=half | {"device": "cpu"})) == (number, 0)
    assert shown(on_cuda) == (number - 4, 4)
    assert gpu_matrix.proofs([on_cuda, replace(on_cuda, seen=half | {"scale": 0.0})]).count("1 of 2 cells") == 1
    rest = [
        gpu_matrix.Row(cell("unsloth", "m", "auto", "none", "full"), gpu_matrix.FINISHED, planned=bf16, seen=under),
        gpu_matrix.Row(
            cell("unsloth", "m", "auto", "4bit", "lora"),
            gpu_matrix.FINISHED,
            planned=bf16 | {"quantization": "4bit"},
            seen=under,
        ),
        gpu_matrix.Row(
            cell("unsloth", "m", "auto", "none", "lora", "saved"), gpu_matrix.FINISHED, planned=bf16, seen=under
        ),
        gpu_matrix.Row(
            cell("transformers", "m", "auto", "none", "lora", "flash"),
            gpu_matrix.FINISHED,
            4,
            planned=bf16 | flash,
            seen=under,
        ),
        *(
            gpu_matrix.Row(
                cell("transformers", "m", "auto", "none", "lora", mode),
                gpu_matrix.FINISHED,
                4,
                planned=bf16,
                seen=under,
                has_output=True,
            )
            for mode in ("ddp", "fsdp")
        ),
    ]
    assert shown(on_cuda, *rest) == (0, number)
    halved = {"parameters": {"trained bfloat16": 1}, "device": "cuda", "autocast": "off"}
    assert shown(*(replace(row, seen=halved, num_predictions=3) for row in rest)) == (4, 0)


def test_what_is_to_be_proven_first_is_planned_for_a_gpu_as_it_is_meant(tmp_path: Path) -> None:
    gpu = Device("cuda", "NVIDIA H100", 0, "GPU-0", (9, 0), 80 * 2**30, 80 * 2**30)
    names = ("unsloth", "unsloth_zoo", "flash_attn", "bitsandbytes")
    here = Installed(dict.fromkeys(names, "1"), frozenset(names))
    bench = gpu_matrix.Bench(tmp_path, gpu, tiny=True)
    found: dict[str, str] = {}
    for cell in gpu_matrix.first():
        if not bench.model_dir(cell.model).exists():
            gpu_matrix.build(bench.model_dir(cell.model), gpu_matrix.SHAPES[cell.model], tiny=True)
        asked, model = jobfile.validate(bench.spec(cell)), basemodel.inspect(bench.model_dir(cell.model))
        try:
            made = plan.make(asked, model, gpu, config=Config(), installed=here)
        except HonedError as error:
            found[cell.name] = error.message
            continue
        assert made.backend.name == cell.backend
        found[cell.name] = "{load_dtype} {bf16} {fp16} {adapter_dtype}".format(**made.precision.as_dict())
    assert len(found) == len(gpu_matrix.first())
    assert found == {
        "unsloth/Qwen3-1.7B/auto/4bit/lora": "bfloat16 True False float32",
        "transformers/Qwen3-1.7B/auto/4bit/lora": "bfloat16 True False float32",
        "unsloth/Llama-3.2-1B/float16/none/lora": "float16 False True float32",
        "unsloth/Llama-3.2-1B/auto/none/full": "float32 True False None",
        "transformers/Llama-3.2-1B/auto/none/full": "float32 True False None",
        "unsloth/Llama-3.2-1B/float16/none/full": "float32 False True None",
        "unsloth/Llama-3.2-1B/auto/none/lora/saved": "bfloat16 True False float32",
        "unsloth/Llama-3.2-1B/float32/none/lora": "backend: unsloth: Unsloth computes float32 "
        "models in half precision, under autocast",
        "transformers/Llama-3.2-1B/auto/none/full/flash": "float32 True False None",
        "transformers/Qwen2.5-VL-3B/auto/none/lora/flash": "bfloat16 True False float32",
        "unsloth/Qwen2.5-VL-3B/auto/none/lora/flash": "bfloat16 True False float32",
    }


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is an NVIDIA GPU here")
def test_without_a_gpu_the_real_matrix_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=TIMEOUT_SEC, check=False
    )
    assert done.returncode == 1
    assert "--tiny" in done.stderr
