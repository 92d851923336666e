"""Matrix of models, precisions and backends: each cell is checked, planned and trained as the daemon would do it.

    base models, random weights ─► check and plan ─► a worker for each cell ─► events, result and a look inside ─► rows

Imports cost more than the training of a cell: one process per backend imports, and is forked for every cell, so that a
crash costs only one. If importing has touched the GPU, a fork cannot use it, and each cell gets its own process. Both
run the main of `python -m honed.worker`.
"""

# ruff: noqa: ARG002 - transformers passes every callback all arguments
from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import plan_document

from honed.system.personpath import PersonPath

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "daemon")]

from honed.check import preflight  # noqa: E402
from honed.check.checklist import Asked  # noqa: E402
from honed.job import event, history  # noqa: E402
from honed.job.database import Database  # noqa: E402
from honed.job.job import Attempt, Job  # noqa: E402
from honed.plan import parallel  # noqa: E402
from honed.run import shim  # noqa: E402
from honed.spec.config import Config, DeviceConfig  # noqa: E402
from honed.system import device  # noqa: E402
from honed.system.error import HonedError  # noqa: E402
from honed.system.layout import Layout  # noqa: E402
from honed.worker.__main__ import ENVIRONMENT  # noqa: E402
from honed.worker.__main__ import main as worker_main  # noqa: E402
from honed.worker.model import division, torchvision  # noqa: E402

#: Seconds after which a cell's worker is killed.
CELL_TIMEOUT_SEC = 900
#: The outcome of a cell in its row.
FINISHED, REFUSED, FAILED = "finished", "refused", "failed"

torchvision.mend()  # checkpoints are built here, before a worker fixes it


# --- Models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A published model: the part of its config.json that determines shapes and arithmetic."""

    family: str
    template: str
    num_parameters: int  #: tied weights counted once; building fails if it differs
    config: dict[str, Any]
    tiny: dict[str, Any] = field(default_factory=dict)  #: overrides for the miniature
    has_vision: bool = False


SHAPES: dict[str, Shape] = {
    "Qwen3-1.7B": Shape(
        "qwen3", "qwen3", 1_720_574_976,
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
         "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
        {"tie_word_embeddings": True},
    ),
    "Llama-3.2-1B": Shape(
        "llama", "llama3", 1_235_814_400,
        {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
         "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
        {"tie_word_embeddings": True},
    ),
    "Mistral-7B": Shape(  # v0.1
        "mistral", "mistral", 7_241_732_096,
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768,
         "sliding_window": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    ),
    "Qwen2.5-VL-3B": Shape(
        "qwen2_5_vl", "chatml", 3_754_622_976,
        {"tie_word_embeddings": True,
         "text_config": {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008,
                         "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
                         "max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
                         "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0,
                                             "mrope_section": [16, 24, 24]}},
         "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                           "in_channels": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2,
                           "temporal_patch_size": 2, "window_size": 112, "tokens_per_second": 2,
                           "fullatt_block_indexes": [7, 15, 23, 31]}},
        {"tie_word_embeddings": True,
         "text_config": {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
                         "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
         "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
                           "out_hidden_size": 64, "patch_size": 14, "fullatt_block_indexes": [1]}},
        has_vision=True,
    ),
}  # fmt: skip


#: preprocessor_config.json, as published with Qwen2.5-VL.
IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def build(directory: Path, shape: Shape, *, tiny: bool) -> None:
    """Build a base model stored in bfloat16, as all of these are published. Real shapes are built on the GPU."""
    import torch

    from zoo.model import build_checkpoint

    if tiny and not shape.has_vision:
        build_checkpoint(directory, shape.family, template=shape.template, dtype="bfloat16", **shape.tiny)
        return
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cpu" if tiny else "cuda"):
            if shape.has_vision:
                _build_vision(directory, shape, tiny=tiny)
            else:
                build_checkpoint(directory, shape.family, template=shape.template, dtype="bfloat16", **shape.config)
    finally:
        torch.set_default_dtype(default_dtype)


def _build_vision(directory: Path, shape: Shape, *, tiny: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from zoo.tokenizer import build_tokenizer

    config = AutoConfig.for_model(shape.family, **(shape.tiny if tiny else shape.config))
    AutoModelForImageTextToText.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    build_tokenizer(shape.template).save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))


def count_parameters(shape: Shape) -> int:
    """Count the parameters of the real shape, tied ones once, without building a model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.for_model(shape.family, **shape.config)
    kind = AutoModelForImageTextToText if shape.has_vision else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


# --- Cells ------------------------------------------------------------------------------------------------------------

#: The field report's own matrix in honed's terms: its bf16 and fp16 are our dtype, and bf16=false is float32.
FIELD_REPORT = {
    ("Qwen3-1.7B", "bfloat16", "4bit", "lora"),
    ("Qwen3-1.7B", "float32", "4bit", "lora"),
    ("Llama-3.2-1B", "float16", "4bit", "lora"),
    ("Mistral-7B", "bfloat16", "4bit", "lora"),
    ("Qwen3-1.7B", "bfloat16", "none", "lora"),
    ("Qwen3-1.7B", "bfloat16", "none", "full"),
    ("Llama-3.2-1B", "bfloat16", "none", "full"),
    ("Mistral-7B", "bfloat16", "none", "full"),
}


@dataclass(frozen=True)
class Cell:
    """One job of the matrix."""

    backend: str
    model: str
    dtype: str
    quantization: str
    adapter: str  #: lora or full
    extra: str = ""  #: a key of EXTRAS

    @property
    def name(self) -> str:
        """The text that --only is matched with; cells of the field report end in `seed`."""
        asked = (self.model, self.dtype, self.quantization, self.adapter)
        extra = f"/{self.extra}" if self.extra else ""
        return "/".join((self.backend, *asked)) + extra + (" seed" if asked in FIELD_REPORT and not extra else "")


def cells() -> list[Cell]:
    """Return every model in every precision with both backends. A quantized base cannot be fully trained.

    The vision model has the cases that failed in the field: an adapter on it, and the same on its 4-bit form.
    """
    ways = [("none", "lora"), ("4bit", "lora"), ("8bit", "lora"), ("none", "full")]
    return [
        Cell(backend, model, dtype, quantization, adapter)
        for backend, model, dtype, (quantization, adapter) in itertools.product(
            ("transformers", "unsloth"), SHAPES, ("bfloat16", "float16", "float32"), ways
        )
        if not SHAPES[model].has_vision or (adapter == "lora" and quantization != "8bit")
    ]


LORA = {"r": 16, "target_modules": "all-linear"}
#: Additional keys of a cell's job.
EXTRAS: dict[str, dict[str, Any]] = {
    **{mode: {"resources": {"gpus": 2}, "parallel": mode} for mode in ("ddp", "fsdp")},
    "flash": {"attn_implementation": "flash_attention_2"},
    "saved": {"lora": LORA | {"modules_to_save": ["embed_tokens", "lm_head"]}},
}


def first() -> list[Cell]:
    """Return the cells decided without a GPU, by reading code, on the smaller models: ten minutes. See docs/gpu.md."""
    return [
        Cell("unsloth", "Qwen3-1.7B", "auto", "4bit", "lora"),
        Cell("transformers", "Qwen3-1.7B", "auto", "4bit", "lora"),
        Cell("unsloth", "Llama-3.2-1B", "float16", "none", "lora"),
        Cell("unsloth", "Llama-3.2-1B", "auto", "none", "full"),
        Cell("transformers", "Llama-3.2-1B", "auto", "none", "full"),
        Cell("unsloth", "Llama-3.2-1B", "float16", "none", "full"),
        Cell("unsloth", "Llama-3.2-1B", "auto", "none", "lora", "saved"),
        Cell("unsloth", "Llama-3.2-1B", "float32", "none", "lora"),  # is rejected
        Cell("transformers", "Llama-3.2-1B", "auto", "none", "full", "flash"),
        Cell("transformers", "Qwen2.5-VL-3B", "auto", "none", "lora", "flash"),
        Cell("unsloth", "Qwen2.5-VL-3B", "auto", "none", "lora", "flash"),
    ]


def pairs() -> list[Cell]:
    """Return the cells of two GPUs: the whole model on each, or half of every weight. 8-bit weights are not divided."""
    return [
        Cell("transformers", "Qwen3-1.7B", "bfloat16", quantization, adapter, mode)
        for mode in ("ddp", "fsdp")
        for quantization, adapter in (("none", "lora"), ("4bit", "lora"), ("8bit", "lora"), ("none", "full"))
    ]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    cell: Cell
    outcome: str
    num_predictions: int = 0  #: in the database's training_predictions
    tokens_per_sec: float | None = None  #: trained tokens, from the end of the first step to the end of the last
    estimated_bytes: int | None = None
    used_bytes: int | None = None  #: torch's peak on a GPU; the process's resident peak on a CPU
    mismatches: tuple[str, ...] = ()  #: between the plan and what trained
    mended: tuple[str, ...] = ()  #: differences that the worker's own audit found and fixed before
    code: str = ""
    message: str = ""
    planned: dict[str, Any] = field(default_factory=dict)  #: the plan's precision
    seen: dict[str, Any] = field(default_factory=dict)  #: the facts recorded by `Look`
    has_output: bool = False


@dataclass(frozen=True)
class Bench:
    """The directory, device and settings with which the cells run."""

    dir: Path
    device: device.Device
    tiny: bool
    fresh: bool = False  #: no forks: each cell imports separately
    visible: str = ""  #: CUDA_VISIBLE_DEVICES of a cell of two GPUs

    @property
    def layout(self) -> Layout:
        return Layout(self.dir)

    @property
    def config(self) -> Config:
        return Config(device=DeviceConfig(gpus=[] if self.tiny else None))

    def model_dir(self, model: str) -> Path:
        return self.dir / "models" / model

    def spec(self, cell: Cell) -> dict[str, Any]:
        """Return the job file's content."""
        steps = 3 if self.tiny else 10
        return {
            "base_model": str(self.model_dir(cell.model)),
            "backend": cell.backend,
            "dtype": cell.dtype,
            "quantization": cell.quantization,
            **({"lora": LORA} if cell.adapter == "lora" else {}),
            **EXTRAS.get(cell.extra, {}),
            "datasets": [{"path": str(self.dir / "facts.jsonl")}],
            "eval_split": 0.2,
            "training": {
                "max_steps": steps,
                "per_device_train_batch_size": 2 if self.tiny else 4,
                "learning_rate": 1e-4,
                "max_length": 256 if self.tiny else 1024,
                "eval_strategy": "steps",
                "eval_steps": steps,
                "save_strategy": "no",
                "save_total_limit": 1,
            },
            "predictions": {"num_samples": 2, "max_new_tokens": 4 if self.tiny else 16},
        }


def write_data(path: Path, *, tiny: bool) -> None:
    """Write conversations that consist almost entirely of an answer: on a GPU about as long as a row may be."""
    capitals = ("France, Paris", "Germany, Berlin", "Italy, Rome", "Spain, Madrid", "Japan, Tokyo", "Norway, Oslo")
    facts = ["The capital of {} is {}.".format(*fact.split(", ")) for fact in capitals]
    answer = " ".join(facts[:2] if tiny else facts * 16)
    rows = [
        {"messages": [{"role": "user", "content": f"Name capitals, {n}."}, {"role": "assistant", "content": answer}]}
        for n in range(12 if tiny else 48)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- A look inside ----------------------------------------------------------------------------------------------------


def look(path: Path) -> None:
    """Record the actual training state in `path`, through a transformers callback in every trainer of this process."""
    import torch
    import transformers.trainer
    from transformers import TrainerCallback

    class Look(TrainerCallback):
        """Callback that records flags, dtypes and autocast while the model trains, independently of any report."""

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step:
                return
            from accelerate.state import AcceleratorState

            scaler = getattr(kwargs.get("optimizer"), "scaler", None)
            self.seen: dict[str, Any] = {
                "device": next(model.parameters()).device.type,
                "bf16": args.bf16,
                "fp16": args.fp16,
                "mixed_precision": AcceleratorState().mixed_precision,
                "has_scaler": scaler is not None,
                "parameters": _parameters(model),
                "has_unsloth": "unsloth" in sys.modules,
                "config_dtype": _word(getattr(model.config, "dtype", None)),
                "compute_dtypes": sorted(
                    {_word(module.compute_dtype) for module in model.modules() if hasattr(module, "compute_dtype")}
                ),
                "autocast": "not seen",
            }
            self._scaler = scaler
            kind = next(model.parameters()).device.type

            def on_forward(*_: Any) -> None:
                is_on = torch.is_autocast_enabled(kind)
                self.seen["autocast"] = _word(torch.get_autocast_dtype(kind)) if is_on else "off"
                hook.remove()

            # A hook on the model itself would run outside the forward that accelerate has wrapped.
            hook = model.get_input_embeddings().register_forward_hook(on_forward)
            path.write_text(json.dumps(self.seen))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen["scale"] = self._scaler.get_scale() if self._scaler is not None else None
            path.write_text(json.dumps(self.seen))

    transformers.trainer.DEFAULT_CALLBACKS.append(Look)


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _parameters(model: Any) -> dict[str, int]:
    """Count parameters by role and dtype: trained, frozen, norm (also frozen), quantized (bitsandbytes)."""
    found: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if division.class_of(parameter) in ("Params4bit", "Int8Params"):
            role = "quantized"
        elif parameter.requires_grad:
            role = "trained"
        else:
            role = "norm" if re.search(r"norm|\bln_", name) else "frozen"
        found[f"{role} {_word(parameter.dtype)}"] += parameter.numel()
    return dict(found)


def mismatches(planned: dict[str, Any], seen: dict[str, Any], *, on_cuda: bool, is_divided: bool = False) -> list[str]:
    """Describe the differences between the recorded state and the plan."""
    if not seen:
        return []
    flag = "bf16" if planned["bf16"] else "fp16" if planned["fp16"] else "no"
    autocast = {"bf16": "bfloat16", "fp16": "float16", "no": "off"}[flag]
    is_full = planned["adapter_dtype"] is None
    wanted: dict[str, Any] = {
        "bf16": planned["bf16"],
        "fp16": planned["fp16"],
        "mixed_precision": flag,
        "autocast": autocast,
        "has_scaler": planned["fp16"] and on_cuda,
        "config_dtype": planned["load_dtype"],
    }
    if planned["quantization"] == "4bit":
        wanted["compute_dtypes"] = [planned["compute_dtype"]]
    found = [f"{key} {seen[key]}, not {value}" for key, value in wanted.items() if seen[key] != value]
    dtypes = {
        "trained": [planned["load_dtype"] if is_full else planned["adapter_dtype"]],
        "frozen": [planned["load_dtype"]],
        "norm": [planned["load_dtype"], "float32"],  # some families and backends keep them so
        "quantized": {"4bit": [planned["load_dtype"] if is_divided else "uint8"], "8bit": ["int8"]}.get(
            planned["quantization"], ["none"]
        ),
    }
    for which, number in seen["parameters"].items():
        role, dtype = which.split()
        if dtype not in dtypes[role]:
            found.append(f"{number:,} {role} parameters {dtype}, not {dtypes[role][0]}")
    if planned["quantization"] != "none" and not any(which.startswith("quantized") for which in seen["parameters"]):
        found.append(f"not quantized, planned {planned['quantization']}")
    return found


# --- Running ----------------------------------------------------------------------------------------------------------


def plan(bench: Bench, number: int, cell: Cell) -> Row | None:
    """Check a cell's job as the daemon does and create its directory; return a row if it is rejected."""
    layout = bench.layout.job(number)
    layout.dir.mkdir(parents=True)
    spec_path = layout.dir / "spec.json"
    spec_path.write_text(json.dumps(bench.spec(cell)))
    try:
        verdict = preflight.check(spec_path, Asked(bench.layout, bench.config, bench.device, job_id=number))
    except HonedError as error:
        return Row(cell, REFUSED, code=error.code, message=error.message)
    made = verdict.plan
    if bench.device.kind != "cuda" and verdict.spec.resources.num_ranks > 1:  # a plan for a CPU has one process
        division_of = parallel.choose(verdict.spec, verdict.spec.parallel, made.memory, made.memory)
        made = replace(made, parallel=division_of)
    identity = {"id": number, "name": cell.name, "user_id": str(os.getuid()), "instance": str(bench.dir)}
    plan_document.write(
        *(layout.dir, verdict.spec, made), job=identity, warnings=verdict.warnings, output_dir=str(verdict.output_dir)
    )
    return None


def in_child(work: Callable[[], int], log_path: Path, *, timeout_sec: int) -> tuple[int, int]:
    """Run `work` in a fork, with its output in `log_path`. Returns its exit status and its peak of resident bytes."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.setsid()
            log_fd = os.open(log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
            os.dup2(log_fd, 1)
            os.dup2(log_fd, 2)
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(timeout_sec)  # the kernel ends a hang
            status = work()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 70
        except BaseException:  # noqa: BLE001 - a fork must not continue as its parent
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, status, usage = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024


def work(job_dir: Path, backend: str) -> int:
    """Run `python -m honed.worker` with the recording callback."""
    import_libraries(backend)
    os.chdir(job_dir)
    if os.environ.get("RANK", "0") == "0":
        look(job_dir / "seen.json")
    sys.argv = ["honed.worker", str(job_dir), "1"]
    return worker_main()


def import_libraries(backend: str) -> None:
    """Import in the backend's own order; an import error is reported again by the worker."""
    from honed.worker.model import load

    try:
        load.choose(backend).import_libraries()
        from honed.worker.train import trainer  # noqa: F401
    except HonedError as error:
        print(f"{backend}: {error.message}", file=sys.stderr)


def serve(bench: Bench, backend: str, numbers: list[int]) -> int:
    """Import once, then run each job in a fork, or in a new process if importing has touched the GPU."""
    if "torch" in sys.modules:
        assert ("unsloth" in sys.modules) == (backend == "unsloth"), "a backend is imported into a clean process"
    os.chdir(bench.dir)  # Unsloth leaves a cache in the working directory
    num_ranks = {number: _read(bench.layout.job(number).plan_path)["parallel"]["num_ranks"] for number in numbers}
    is_fresh = bench.fresh
    if not is_fresh and 1 in num_ranks.values():
        import_libraries(backend)
        import torch

        is_fresh = torch.cuda.is_initialized()
    for number in numbers:
        job_dir = bench.layout.job(number).dir
        (job_dir / "attempts/1").mkdir(parents=True, exist_ok=True)
        log_path = job_dir / "attempts/1/worker.log"
        command = [sys.executable, __file__, "--work", str(job_dir), backend]
        if num_ranks[number] > 1:
            behind = [sys.executable, "-I", "-S", str(shim.__file__), str(job_dir / "attempts/1"), "1", *command]
            given = {"HONED_NUM_RANKS": "2", "CUDA_VISIBLE_DEVICES": bench.visible}
            status, peak = in_child(lambda c=behind, g=given: _replace(c, g), log_path, timeout_sec=CELL_TIMEOUT_SEC)
            status = _read(job_dir / "attempts/1/exit.json").get("status", status)
        elif is_fresh:
            status, peak = in_child(lambda c=command: _replace(c), log_path, timeout_sec=CELL_TIMEOUT_SEC)
        else:
            status, peak = in_child(lambda d=job_dir: work(d, backend), log_path, timeout_sec=CELL_TIMEOUT_SEC)
        (job_dir / "ended.json").write_text(json.dumps({"status": status, "resident_bytes": peak}))
    return 0


def _replace(command: list[str], given: dict[str, str] | None = None) -> int:
    os.environ.update(given or {})
    os.execvp(command[0], command)


def row(bench: Bench, database: Database, number: int, cell: Cell) -> Row:
    """Build the row of a cell from its worker's files."""
    layout = bench.layout.job(number)
    attempt = layout.attempt(1)
    planned = _read(layout.plan_path)
    ended, result, seen = (
        _read(path) for path in (layout.dir / "ended.json", attempt.result_path, layout.dir / "seen.json")
    )
    reading = event.read(PersonPath.own(attempt.events_path), 0)
    started = Attempt(1, cell.backend, time.time())
    job = Job(number, cell.name, time.time(), "spec.json", os.getuid(), planned["output_dir"], attempts=(started,))
    database.put_job(job)
    database.apply(job, reading)
    is_finished = ended.get("status") == 0 and result.get("outcome") == "succeeded"
    error = result.get("error") or {}
    return Row(
        cell,
        FINISHED if is_finished else FAILED,
        num_predictions=len(list(history.present(history.predictions(bench.layout.database_path, number)))),
        tokens_per_sec=_speed(reading.events, result),
        estimated_bytes=planned["memory"]["total_bytes"],
        used_bytes=_peak(reading.events, on_cuda=bench.device.kind == "cuda") or ended.get("resident_bytes"),
        mismatches=tuple(
            mismatches(planned["precision"], seen, on_cuda=bench.device.kind == "cuda", is_divided=cell.extra == "fsdp")
        ),
        mended=_mended(reading.events),
        code="" if is_finished else error.get("code") or f"status {ended.get('status')}",
        message=error.get("message", ""),
        planned=planned["precision"],
        seen=seen,
        has_output=_has_output(Path(planned["output_dir"]), cell, planned["precision"]),
    )


def _peak(events: list[event.Event], *, on_cuda: bool) -> int | None:
    """Return the reported peak memory: of the GPU, or, on a CPU, of the process."""
    key = "device_peak_bytes" if on_cuda else "resident_peak_bytes"
    return max((item.data[key] for item in events if item.kind == "memory" and key in item.data), default=None)


def _mended(events: list[event.Event]) -> tuple[str, ...]:
    """Return the differences that the audits fixed, each once."""
    return tuple(dict.fromkeys(text for item in events if item.kind == "audit" for text in item.data["mended"]))


def _has_output(output_dir: Path, cell: Cell, precision: dict[str, Any]) -> bool:
    """Tell whether the exported weights exist, with every tensor in the trained dtype."""
    name = "adapter_model.safetensors" if cell.adapter == "lora" else "model*.safetensors"
    files = sorted(output_dir.glob(name))
    dtypes = {dtype for path in files for dtype in _stored(path)}
    return dtypes == {precision["adapter_dtype"] or precision.get("save_dtype") or precision["load_dtype"]}


def _stored(path: Path) -> set[str]:
    from honed.inputs.basemodel import DTYPES

    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {DTYPES[tensor["dtype"]][0] for name, tensor in header.items() if name != "__metadata__"}


def _speed(events: list[event.Event], result: dict[str, Any]) -> float | None:
    """Return trained tokens per second from the first step's end to the last's: the first one warms up."""
    times = [item.time for item in events if item.kind == "step"]
    tokens = (result.get("metrics") or {}).get("num_trained_tokens")
    if len(times) < 2 or not tokens or times[-1] == times[0]:
        return None
    return tokens / len(times) * (len(times) - 1) / (times[-1] - times[0])


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.exists() else {}


def run(bench: Bench, chosen: list[Cell], *, say: Callable[[str], None]) -> list[Row]:
    """Run every cell in the given order."""
    bench.layout.state_dir.mkdir(parents=True, exist_ok=True)
    (bench.dir / "models").mkdir(exist_ok=True)
    write_data(bench.dir / "facts.jsonl", tiny=bench.tiny)
    models = sorted({cell.model for cell in chosen})
    say(f"building {', '.join(models)}")
    unbuilt = _build(bench, models)
    database = Database(bench.layout.database_path)
    numbered = dict(enumerate(chosen, start=1))
    rows: dict[int, Row] = {}
    for number, cell in numbered.items():
        refused = unbuilt.get(cell.model)
        found = Row(cell, REFUSED, code=refused[0], message=refused[1]) if refused else plan(bench, number, cell)
        if found is not None:
            rows[number] = found
    for backend in ("transformers", "unsloth"):
        numbers = [number for number, cell in numbered.items() if number not in rows and cell.backend == backend]
        if not numbers:
            continue
        say(f"{backend}: {len(numbers)} cells")
        limit = CELL_TIMEOUT_SEC * (len(numbers) + 1)
        in_child(lambda b=backend, n=numbers: serve(bench, b, n), bench.dir / f"{backend}.log", timeout_sec=limit)
        for number in numbers:
            rows[number] = row(bench, database, number, numbered[number])
            shutil.rmtree(bench.layout.job(number).dir / "output", ignore_errors=True)  # gigabytes, on a GPU
    return [rows[number] for number in numbered]


def _build(bench: Bench, models: list[str]) -> dict[str, tuple[str, str]]:
    """Build base models; return code and message of each whose kind is rejected."""
    unbuilt: dict[str, tuple[str, str]] = {}
    _build_in_child(bench, [model for model in models if bench.tiny or SHAPES[model].has_vision], tiny=True)
    for model in [each for each in models if SHAPES[each].has_vision]:
        refused = plan(bench, 0, Cell("transformers", model, "bfloat16", "none", "lora"))
        shutil.rmtree(bench.layout.job(0).dir)
        if refused is not None:
            unbuilt[model] = refused.code, refused.message
    for model in [] if bench.tiny else [each for each in models if each not in unbuilt]:
        shutil.rmtree(bench.model_dir(model), ignore_errors=True)
        _build_in_child(bench, [model], tiny=False)
    return unbuilt


def _build_in_child(bench: Bench, models: list[str], *, tiny: bool) -> None:
    """Build base models in a process of their own."""

    def make() -> int:
        for model in models:
            build(bench.model_dir(model), SHAPES[model], tiny=tiny)
        return 0

    if not models:
        return
    log_path = bench.dir / "build.log"
    status, _ = in_child(make, log_path, timeout_sec=CELL_TIMEOUT_SEC * len(models))
    if status:
        log = log_path.read_text()[-3000:]
        raise SystemExit(f"gpu-matrix: {', '.join(models)} cannot be built (status {status}):\n{log}")


# --- The table --------------------------------------------------------------------------------------------------------


def _is_flash(row: Row) -> bool:
    return row.planned.get("attn_implementation") == "flash_attention_2"


def _trains_in(row: Row, dtype: str) -> bool:
    found = [which for which in row.seen.get("parameters", {}) if which.startswith("trained")]
    return found == [f"trained {dtype}"]


#: Facts that only a CUDA device can show: the cells they concern, and the check of a cell that ran.
NEEDS_CUDA: dict[str, tuple[Callable[[Row], bool], Callable[[Row], bool]]] = {
    "two GPUs train one model, over NCCL": (
        lambda row: row.cell.extra == "ddp",
        lambda row: row.outcome == FINISHED and row.num_predictions == 4 and row.has_output,
    ),
    "two GPUs have half of every weight each (FSDP2, over NCCL), and the export is whole": (
        lambda row: row.cell.extra == "fsdp",
        lambda row: row.outcome == FINISHED and row.num_predictions == 4 and row.has_output,
    ),
    "fp16: the forward pass runs under float16 autocast (accelerate's native_amp)": (
        lambda row: bool(row.planned.get("fp16")),
        lambda row: row.seen.get("autocast") == "float16",
    ),
    "fp16: a GradScaler scales the loss": (
        lambda row: bool(row.planned.get("fp16")),
        lambda row: bool(row.seen.get("has_scaler")),
    ),
    "fp16: gradients can be unscaled: every trained parameter is float32": (
        lambda row: bool(row.planned.get("fp16")),
        lambda row: _trains_in(row, "float32"),
    ),
    "fp16: steps are taken: the scale has not collapsed, and the job finished": (
        lambda row: bool(row.planned.get("fp16")),
        lambda row: row.outcome == FINISHED and (row.seen.get("scale") or 0) >= 1,
    ),
    "Unsloth trains whole weights in float32, under bfloat16 autocast": (
        lambda row: row.cell.backend == "unsloth" and row.cell.adapter == "full" and bool(row.planned.get("bf16")),
        lambda row: row.outcome == FINISHED and _trains_in(row, "float32") and row.seen.get("autocast") == "bfloat16",
    ),
    "Unsloth's QLoRA trains float32 adapters, under bfloat16 autocast": (
        lambda row: (
            row.cell.backend == "unsloth"
            and row.planned.get("quantization") == "4bit"
            and bool(row.planned.get("bf16"))
        ),
        lambda row: row.outcome == FINISHED and _trains_in(row, "float32") and row.seen.get("autocast") == "bfloat16",
    ),
    "Unsloth trains embeddings and head in float32 beside a bfloat16 base": (
        lambda row: row.cell.backend == "unsloth" and row.cell.extra == "saved",
        lambda row: row.outcome == FINISHED and _trains_in(row, "float32"),
    ),
    "FlashAttention trains, and all predictions are made": (
        _is_flash,
        lambda row: row.outcome == FINISHED and row.num_predictions == 4,
    ),
}


def table(rows: Iterable[Row]) -> str:
    """Return the cells as a markdown table."""
    head = (
        "backend",
        "model",
        "precision",
        "quantization",
        "training",
        "finished",
        "predictions saved",
        "trained tokens/s",
        "peak memory estimated",
        "used",
        "mismatches",
        "error code",
    )
    lines = [head, tuple("---" for _ in head)]
    lines += [
        (
            row.cell.backend,
            row.cell.model,
            row.cell.dtype,
            row.cell.quantization,
            f"{row.cell.adapter} {row.cell.extra}".strip(),
            "yes" if row.outcome == FINISHED else row.outcome,
            str(row.num_predictions or ""),
            "" if row.tokens_per_sec is None else f"{row.tokens_per_sec:,.0f}",
            _size(row.estimated_bytes),
            _size(row.used_bytes),
            _differences(row),
            row.code,
        )
        for row in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _differences(row: Row) -> str:
    """Describe the remaining differences, and count the fixed ones."""
    left = "; ".join(row.mismatches) or ("none" if row.seen else "")
    return left + (f" ({len(row.mended)} mended)" if row.mended else "")


def reasons(rows: list[Row]) -> str:
    """List the reasons for rejections and failures, and the fixed differences, each once."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.outcome != FINISHED:
            found.setdefault((row.code, row.message), []).append(row.cell.name)
    for row in rows:
        for text in row.mended:
            found.setdefault(("mended", text), []).append(row.cell.name)
    return "".join(
        f"- {len(names)} × `{code}`: {message.replace(chr(10), ' ')[:400]} ({names[0]}{' …' if names[1:] else ''})\n"
        for (code, message), names in found.items()
    )


def proofs(rows: list[Row]) -> str:
    """Return a table of the facts that only CUDA can show, and whether they were shown."""
    on_cuda = [row for row in rows if row.seen.get("device") == "cuda"]
    lines = ["| what only CUDA can show | shown |", "| --- | --- |"]
    for what, (is_meant, is_shown) in NEEDS_CUDA.items():
        ran = [row for row in on_cuda if is_meant(row)]
        word = f"{sum(map(is_shown, ran))} of {len(ran)} cells" if ran else "needs CUDA"
        lines.append(f"| {what} | {word} |")
    return "\n".join(lines) + "\n"


def page(bench: Bench, rows: list[Row], *, seconds: float) -> str:
    names = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "datasets", "unsloth")
    versions = ", ".join(f"{name} {_version(name)}" for name in names)
    where = bench.device.name + (f", driver {device.driver_version()}" if bench.device.kind == "cuda" else " (CPU)")
    size = "miniatures of the models" if bench.tiny else "real shapes, random weights"
    ended = Counter(row.outcome for row in rows)
    counts = ", ".join(f"{number} {word}" for word, number in ended.items())
    return (
        f"{time.strftime('%Y-%m-%d')}, {where}; {size}; Python {platform.python_version()}, {versions}; "
        f"{len(rows)} cells in {seconds:.0f} s: {counts}.\n\n"
        f"{table(rows)}\n{proofs(rows)}\n{reasons(rows)}"
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return ""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.1f} MiB"


def main() -> int:
    if sys.argv[1:2] == ["--work"]:
        return work(Path(sys.argv[2]), sys.argv[3])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="in miniature, on the CPU")
    parser.add_argument("--out", type=Path, help="write the tables there, too")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--fresh", action="store_true", help="no forks: each cell in a process that imports for itself")
    parser.add_argument("--first", action="store_true", help="what is to be proven first: eleven cells, ten minutes")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cells whose name the regular expression matches")
    parser.add_argument("--dir", type=Path, help="work there and leave everything (default: a temporary directory)")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path[:2], os.environ.get("PYTHONPATH", "")]))
    if options.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gpus = [] if options.tiny else [each for each in device.probe() if each.kind == "cuda"]
    here = device.cpu() if options.tiny else device.probe()[0]
    if here.kind != "cuda" and not options.tiny:
        print("gpu-matrix: there is no NVIDIA GPU here; --tiny runs the matrix in miniature", file=sys.stderr)
        return 1
    if here.kind == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = here.uuid or "0"  # a job of one GPU must see only one
    alike = next((each for each in device.alike(gpus) if len(each) > 1), [])[:2]
    if not options.tiny and not alike:
        print("gpu-matrix: there are no two GPUs alike: the cells of two GPUs are left out", file=sys.stderr)
    wanted = [*(first() if options.first else cells()), *(pairs() if options.tiny or alike else [])]
    chosen = [cell for cell in wanted if re.search(options.only, cell.name)]
    if not chosen:
        print(f"gpu-matrix: no cell's name matches {options.only!r}", file=sys.stderr)
        return 2
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(prefix="honed-gpu-matrix-") as temporary:
        directory = options.dir.resolve() if options.dir else Path(temporary)
        bench = Bench(directory, here, options.tiny, options.fresh, ",".join(str(each.uuid) for each in alike))
        bench.dir.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        rows = run(bench, chosen, say=lambda text: print(f"gpu-matrix: {text}", file=sys.stderr, flush=True))
        text = page(bench, rows, seconds=time.monotonic() - began)
    print(text)
    if options.out:
        options.out.write_text(text)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if all(row.outcome != FAILED for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
