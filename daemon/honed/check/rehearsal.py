"""The rehearsal of a job: one step on a small model of its family, where errors of peft, bitsandbytes or the family's
own code are to be expected.

A program of the worker's package does it (`python -m honed.worker.rehearsal`), as a child of the check, with the
check's rights, no device, and limits of memory and time. Most jobs need none: plain adapters and full fine-tuning of
the families in `DENSE` and `MIXTURES` are known to work. Its answer is kept (run/rehearsed.py). A rehearsal that cannot
be finished never refuses a job; it is a warning.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from honed.check import templatecheck
from honed.inputs.basemodel import BaseModelInfo
from honed.plan.plan import Plan
from honed.run import rehearsed
from honed.run.rehearsed import Kept, Rehearsed
from honed.spec import export, kind
from honed.spec.config import Config, SpoolConfig
from honed.spec.spec import JobSpec, LoraSpec
from honed.system import installed, python
from honed.system.layout import Layout

#: Families whose plain jobs need no rehearsal: with any dropout, and
DENSE = frozenset(
    {
        "bloom",
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt2",
        "gpt_neox",
        "granite",
        "helium",
        "idefics3",
        "internvl",
        "llama",
        "llava",
        "llava_next",
        "llava_onevision",
        "mistral",
        "mistral3",
        "ministral3",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3",
        "qwen3_vl",
        "seed_oss",
        "smollm3",
        "smolvlm",
        "stablelm",
        "starcoder2",
    }
)
#: with experts, which take no dropout.
MIXTURES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5_moe",
        "glm4_moe",
        "gpt_oss",
        "hunyuan_v1_moe",
        "mixtral",
        "olmoe",
        "qwen2_moe",
        "qwen3_moe",
    }
)
#: Layers of those with experts that take an adapter like any other.
_LINEAR = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
#: Packages whose versions decide the answer.
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "trl", "accelerate", "honed")
_UNSEEN = (
    "no row with an image could be tried on a small model of this job's family ({}): errors of its processor and its "
    "vision encoder show only once the job runs"
)
#: A constant of Linux's prctl(2).
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def check(
    job_spec: JobSpec,
    model: BaseModelInfo,
    made: Plan,
    config: Config,
    *,
    sees: bool,
    places: Sequence[Path],
    keep: Callable[[Kept], None],
    begins: Callable[[], None],
) -> list[str]:
    """Return a warning if the job could not be rehearsed. Raises the error of its first step.

    `sees`: its rows have images. `places` have kept answers; `keep` is called with a new one, and `begins` where one
    has to be found: that may take minutes.
    """
    if not config.spool.rehearsal_cpu_sec or not is_needed(job_spec, model, made, sees=sees):
        return []
    key = _key(job_spec, model, made, sees=sees)
    answer = next(filter(None, (rehearsed.read(place, key) for place in places)), None)
    if answer is None:
        begins()
        answer, is_lasting = _run(job_spec, made, config, sees=sees)
        if is_lasting:
            keep(Kept(key, answer))
    if answer.error is not None:
        raise answer.error
    if answer.outcome == "passed":
        return [_UNSEEN.format(answer.why)] if answer.why else []
    return [
        f"no step of this job could be tried on a small model of its family ({answer.why}): errors of peft and of the "
        "family's own code show only once the job runs"
    ]


def kept_in(layout: Layout, uid: int) -> list[Path]:
    """Return the directories with kept answers about a user's jobs: honed's, and the user's own."""
    return [
        rehearsed.directory(layout.cache_dir, uid),
        *([_own_dir()] if layout.is_of_system and uid == os.getuid() else []),
    ]


def keeper(layout: Layout) -> Callable[[Kept], None]:
    """Return what keeps answers for the calling user: beside honed's cache, which only honed writes."""
    place = _own_dir() if layout.is_of_system else rehearsed.directory(layout.cache_dir, os.getuid())
    return lambda kept: rehearsed.write(place, kept)


def _own_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "honed" / "rehearsed"


def is_needed(job_spec: JobSpec, model: BaseModelInfo, made: Plan, *, sees: bool) -> bool:
    """Tell whether a job may meet errors that only a step shows."""
    if not kind.of(job_spec).has_rows or job_spec.adapter is not None or made.backend.name != "transformers":
        return False
    if "auto_map" in model.config and job_spec.trust_remote_code:
        return False  # the check runs no code that comes with a model
    if model.is_quantized and model.quantization is None:
        return False  # stored in another library's format, which a small model has not
    if sees and job_spec.train_parts:
        return True  # an encoder that is trained is in the step, too
    if model.model_type in MIXTURES:
        return job_spec.lora is not None and not _is_plain_for_experts(job_spec.lora)
    return model.model_type not in DENSE or (job_spec.lora is not None and not _is_plain(job_spec.lora))


def _is_plain(lora: LoraSpec) -> bool:
    return not lora.use_dora and lora.init_lora_weights in (True, False, "gaussian")


def _is_plain_for_experts(lora: LoraSpec) -> bool:
    named = set() if lora.target_modules == "all-linear" else set(lora.target_modules)
    return _is_plain(lora) and not lora.lora_dropout and named <= _LINEAR and not lora.modules_to_save


def _key(job_spec: JobSpec, model: BaseModelInfo, made: Plan, *, sees: bool) -> str:
    """Return a hash of all that decides the answer."""
    training = job_spec.training
    precision = {key: value for key, value in made.precision.as_dict().items() if key != "reasons"}
    decides = {
        "config": model.config,
        "model_type": job_spec.model_type,
        "kind": job_spec.kind,
        "lora": job_spec.lora.model_dump(mode="json") if job_spec.lora else None,
        "exports": [item.name for item in export.asked(job_spec)],
        "parts": [job_spec.parts.model_dump(mode="json"), list(job_spec.train_parts)],
        "precision": precision,
        "checkpointing": [training.gradient_checkpointing, training.gradient_checkpointing_kwargs],
        "router_aux_loss_coef": training.as_kwargs().get("router_aux_loss_coef"),
        "device": made.device.kind,
        "versions": {name: installed.version(name) for name in _PACKAGES},
        "seen": _seen(job_spec, model) if sees else None,
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()


def _seen(job_spec: JobSpec, model: BaseModelInfo) -> list[Any]:
    """Return what decides about a row with an image: the processor's and the tokenizer's files, and the template."""
    facts: list[Any] = [templatecheck.source(job_spec, model), job_spec.media.model_dump(mode="json")]
    facts.append({name: installed.version(name) for name in ("torchvision", "pillow")})
    for path in sorted(model.path.glob("*.json")):
        if path.name.endswith(("processor_config.json", "tokenizer_config.json", "tokenizer.json")):
            info = path.stat()
            facts.append([path.name, info.st_size, info.st_mtime_ns])
    return facts


def _run(job_spec: JobSpec, made: Plan, config: Config, *, sees: bool = False) -> tuple[Rehearsed, bool]:
    """Run the program. Return its answer, and whether that would be the same next time."""
    request = json.dumps({"spec": job_spec.model_dump(mode="json"), "plan": made.as_dict(), "sees": sees})
    try:
        # Its files are ours, so that nothing of it is left where a limit ends it.
        with tempfile.TemporaryDirectory(prefix="honed-rehearsal-", ignore_cleanup_errors=True) as place:
            return _ask(request, config.spool, place)
    except OSError as error:
        return Rehearsed("unknown", why=f"its process did not start: {error.strerror or error}"), False


def _ask(request: str, limits: SpoolConfig, place: str) -> tuple[Rehearsed, bool]:
    """Start the program and ask it. Raises OSError if it cannot be started."""
    process = subprocess.Popen(
        python.module("honed.worker.rehearsal", str(limits.rehearsal_cpu_sec)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": place, "OMP_NUM_THREADS": "2", "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=_die_with_parent,  # noqa: PLW1509
        text=True,
    )
    is_late = False
    try:
        try:
            answered, _ = process.communicate(request + "\n", timeout=limits.rehearsal_timeout_sec)
        except subprocess.TimeoutExpired:
            is_late = True
            process.kill()
            answered, _ = process.communicate()
        answer = Rehearsed.from_dict(json.loads(answered.rstrip("\n").rpartition("\n")[2]))
    except (ValueError, KeyError, TypeError):
        if is_late:
            return Rehearsed("unknown", why=f"it took more than {limits.rehearsal_timeout_sec:g} s"), False
        if process.wait() == -signal.SIGXCPU:
            return Rehearsed("unknown", why=f"it took more than {limits.rehearsal_cpu_sec} s of CPU time"), False
        return Rehearsed("unknown", why=f"its process ended with status {process.wait()}"), False
    else:
        return answer, answer.outcome != "unknown" and not is_late  # of which the machine may be the cause
    finally:
        process.kill()
        process.wait()


def _die_with_parent() -> None:
    """Have it killed when the check dies: nobody else ends it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
