"""`python -m honed.worker.rehearsal CPU_SECONDS`: one step of a job on a small model of the same family, on the CPU.

It finds the errors that peft, bitsandbytes and the family's own code raise for this job, before anything is loaded. The
check starts it (check/rehearsal.py), with a request on stdin and an answer on stdout, each a line of JSON:

    < {"spec": {…}, "plan": {…}, "sees": false}
    > {"outcome": "passed" | "refused" | "unknown", "error"?: {"code", "message", "hint", …}, "why"?: "…"}

Of several answers the last one counts: a job whose rows have images (`sees`) is tried on text first, and then on a row
with one small image (pictured.py), which may take longer than there is time. `passed` with a `why` means on text alone.

The small model has to compute something as it is, without adapter, quantization and labels, before the job is tried on
it: where it does not, the fault is that of making it small, and the answer is `unknown`. An error of the job itself is
believed if a model made small in another way shows it, too, or if it is of a known sort.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from honed.job.plan_file import PlanFile
from honed.spec import kind
from honed.spec.spec import JobSpec, LoraSpec
from honed.system import quote
from honed.system.error import ErrorRecord, HonedError
from honed.system.layout import JobLayout
from honed.text.maskcheck import IGNORED
from honed.worker import cause, imports, pictured, remedy
from honed.worker.assignment import Assignment
from honed.worker.pictured import Pictured

#: Bytes of memory of its own that the process may have. Libraries' code does not count.
MAX_BYTES = 2 * 1024**3
#: Parameters of a small model, at most: a model that stays larger is not tried.
MAX_PARAMETERS = 300_000_000
#: Rows and tokens of the one batch.
NUM_ROWS, NUM_TOKENS = 2, 16
#: Ranks of adapters: a small model's matrices have less to choose from.
MAX_RANK = 4
#: Tokens whose vectors are trained.
MAX_TOKENS = 8


@dataclass(frozen=True)
class Answer:
    outcome: Literal["passed", "refused", "unknown"]
    error: HonedError | None = None
    why: str = ""

    def to_line(self) -> str:
        error: ErrorRecord | None = self.error.as_dict() if self.error else None
        return json.dumps({"outcome": self.outcome, "error": error, "why": self.why}) + "\n"


UNSEEN = Answer("passed", why="a step with an image takes more time or memory than a check may use")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _limit(int(sys.argv[1]))
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    request = json.loads(sys.stdin.readline())
    job = _assignment(request["spec"], request["plan"], Path(tempfile.gettempdir()))  # the check removes it
    imports.prepare(job)
    from honed.worker.model import torchvision

    torchvision.mend()
    with imports.quick():
        import peft  # noqa: F401
        import torch.distributed.tensor  # peft uses it, and leaves its import to accelerate
        import transformers
    torch.backends.mkldnn.set_flags(False)  # it writes code, which the check's unit does not let run
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    answer = rehearse(job)
    if request["sees"] and answer.outcome == "passed":
        answers.write(UNSEEN.to_line())  # it stands if a limit ends this process
        answers.flush()
        answer = see(job)
    answers.write(answer.to_line())
    answers.close()


def _limit(cpu_sec: int) -> None:
    """Limit time and memory. The check's limit of addresses is lifted: the libraries of a GPU take many."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_sec, cpu_sec + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))


def _assignment(spec: dict[str, Any], plan: dict[str, Any], job_dir: Path) -> Assignment:
    layout, plan_file = JobLayout(job_dir), PlanFile({**plan, "spec": spec})
    precision = plan_file.precision
    return Assignment(
        job_id=0,
        name="rehearsal",
        spec=_small_spec(JobSpec.model_validate(spec)),
        base_model_path=plan_file.base_model_path,
        output_dir=job_dir / "output",
        backend="transformers",
        precision=replace(
            precision,
            load_dtype="bfloat16" if precision.load_dtype == "float16" else precision.load_dtype,
            compute_dtype="bfloat16" if precision.compute_dtype == "float16" else precision.compute_dtype,
            attn_implementation="sdpa" if precision.attn_implementation == "sdpa" else "eager",
        ),
        plan=plan_file,
        layout=layout,
        attempt=layout.attempt(1),
        date=datetime.now(UTC),
    )


def _small_spec(spec: JobSpec) -> JobSpec:
    """Return the spec with an adapter for few layers: numbers of layers have no meaning in a small model."""
    if spec.lora is None:
        return spec
    lora, wanted = spec.lora, spec.lora.target_modules
    if isinstance(wanted, str):
        wanted = "all-linear" if _chooses_layers(wanted) else wanted
    else:
        wanted = list(dict.fromkeys(_LAYER.sub("", name) for name in wanted))
    changes = {
        "r": min(lora.r, MAX_RANK),
        "rank_pattern": {key: min(value, MAX_RANK) for key, value in (lora.rank_pattern or {}).items()} or None,
        "layers_to_transform": None,
        "target_modules": wanted,
        "trainable_token_indices": _few_tokens(lora),
    }
    return spec.model_copy(update={"lora": lora.model_copy(update=changes)})


def _few_tokens(lora: LoraSpec) -> list[int] | dict[str, list[int]] | None:
    """Return the first tokens in place of those whose vectors are trained: a small model has few."""
    asked = lora.trainable_token_indices
    if isinstance(asked, dict):
        return {name: [*range(min(len(ids), MAX_TOKENS))] for name, ids in asked.items()}
    return asked and [*range(min(len(asked), MAX_TOKENS))]


#: What comes before a module's name within its layer.
_LAYER = re.compile(r".*\.?(?:layers?|h|blocks?)\.\d+\.")


def _chooses_layers(pattern: str) -> bool:
    return bool(re.search(r"\d", pattern))


# --- The rehearsal ----------------------------------------------------------------------------------------------------


def see(job: Assignment) -> Answer:
    """Try a row with an image, for a job that passes with rows of text."""
    try:
        row = pictured.load(job)
    except Exception as error:  # noqa: BLE001 - whatever the template or the processor does not like about this row
        # It says nothing of the job's own rows, so its quotes are no secret.
        return Answer("passed", why=quote.show(error.said) if isinstance(error, HonedError) else words(error))
    answer = rehearse(job, row)
    return answer if answer.outcome == "refused" else Answer("passed", why=answer.why)


def rehearse(job: Assignment, row: Pictured | None = None) -> Answer:
    """Try one step of the job on models made small, the smallest first; with a row of its own if there is one."""
    whys: list[str] = []
    failed: list[tuple[_Small, Exception]] = []
    try:
        for small in _small_models(job, row, whys):
            if (error := _failure(small)) is None:
                return Answer("passed")
            failed.append((small, error))
    except _ShortageError as shortage:
        if not failed:
            return Answer("unknown", why=str(shortage))
    if not failed:
        return Answer("unknown", why="; ".join(dict.fromkeys(whys)))
    small, error = failed[0]
    if is_of_the_device(error) and job.plan.device is not None and job.plan.device.kind != "cpu":
        return Answer("unknown", why=f"on this machine's CPU: {words(error)}")
    wanted = job.spec.lora.target_modules if job.spec.lora is not None else ""
    if isinstance(wanted, str) and _chooses_layers(wanted):  # tried with all layers instead
        return Answer("unknown", why=f"target_modules chooses layers by number; with all of them: {words(error)}")
    fix = remedy.find(small.job, error, small.model_of, lambda spec: _failure(small.of(spec)) is None)
    if len(failed) == 1 and not fix and not cause.is_of_peft(error):
        return Answer("unknown", why=f"it fails, perhaps because it is small: {words(error)}")
    return Answer("refused", error=remedy.refusal(small.job, words(error), fix))


class _ShortageError(Exception):
    """The memory or the room for files does not suffice."""


@dataclass(frozen=True)
class _Small:
    """A job whose model is made small."""

    job: Assignment
    config: Any
    row: Pictured | None = None

    def batch(self, model: Any) -> dict[str, Any]:
        """Return a batch with labels."""
        return _batch(model) if self.row is None else self.row.of(model)

    def of(self, spec: JobSpec) -> _Small:
        """Return the same with another job file."""
        quantization = spec.quantization if spec.quantization == "none" else self.job.precision.quantization
        attention = "eager" if spec.attn_implementation == "eager" else self.job.precision.attn_implementation
        precision = replace(self.job.precision, quantization=quantization, attn_implementation=attention)
        if spec.dtype != self.job.spec.dtype:  # a remedy changes it to float32 alone
            precision = replace(precision, load_dtype="float32", compute_dtype=None, bf16=False, fp16=False)
        return replace(self, job=replace(self.job, spec=spec, precision=precision))

    def model_of(self) -> Any:
        """Return a new model, which is random, and the same every time."""
        return _build(self.config, self.job)


def _small_models(job: Assignment, row: Pictured | None, whys: list[str]) -> Iterator[_Small]:
    """Yield small models that compute something as they are; `whys` gets the reason of each other."""
    from honed.worker.model import shrink
    from honed.worker.model.config import load_config

    config = load_config(job)
    config = getattr(config, "thinker_config", config)
    ways = ((True, False), (False, False)) if row is None else ((True, True), (True, False), (False, False))
    for narrows, narrows_eyes in ways:
        try:
            small = _Small(job, shrink.shrunk(config, narrows=narrows, narrows_eyes=narrows_eyes), row)
            _compute(small)
        except Exception as error:  # noqa: BLE001 - a family that cannot be made small so
            _check_shortage(error)
            whys.append(words(error))
        else:
            yield small


def _failure(small: _Small) -> Exception | None:
    """Return the error of the job's step. Raises _ShortageError."""
    try:
        _step(small)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the answer
        _check_shortage(error)
        return error
    return None


def _check_shortage(error: Exception) -> None:
    from honed.worker.train import disk_reserve

    if cause.is_out_of_memory(error) or disk_reserve.is_no_room(error):
        raise _ShortageError(words(error)) from error


def is_of_the_device(error: Exception) -> bool:
    """Return whether an error may be that of the CPU alone: raised in bitsandbytes, for a lack of an operation, or for
    two dtypes that only a GPU's autocast makes one, as those of a LayerNorm's weight and bias."""
    lacks = "not implemented for" in str(error) or "expected scalar type" in str(error)
    return cause.raised_in(error) == "bitsandbytes" or lacks


def _build(config: Any, job: Assignment) -> Any:
    import torch

    from honed.worker.model.config import model_class

    kind = model_class(config)
    with torch.device("meta"):
        number = sum(parameter.numel() for parameter in kind.from_config(config).parameters())
    if number > MAX_PARAMETERS:
        raise ValueError(f"the small model still has {number} parameters")
    torch.manual_seed(0)
    dtype, attention = getattr(torch, job.precision.load_dtype), job.precision.attn_implementation
    return kind.from_config(config, dtype=dtype, attn_implementation=attention)


def _batch(model: Any) -> dict[str, Any]:
    """Return rows of ordinary words, the second one padded."""
    import torch

    num_words = model.config.get_text_config().vocab_size
    ids = torch.randint(num_words // 2, num_words, (NUM_ROWS, NUM_TOKENS))
    mask = torch.ones_like(ids)
    mask[1, NUM_TOKENS // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def _compute(small: _Small) -> None:
    import torch

    model = small.model_of().eval()
    inputs = {name: value for name, value in small.batch(model).items() if name != "labels"}
    with torch.no_grad():
        model(**inputs, use_cache=False)


def _step(small: _Small) -> None:
    """Load, attach the adapter, and run one forward and backward pass, as the worker does."""
    import torch

    from honed.worker.model import adapter, load
    from honed.worker.model.transformers_backend import attach_adapter

    job, spec = small.job, small.job.spec
    model = small.model_of() if job.precision.quantization == "none" else _quantized(small)
    load.freeze(model, job)
    model = attach_adapter(model, job)
    load.hold_statistics(model, job)
    if spec.lora is not None and (lost := adapter.lost(model)):
        raise remedy.LostNamesError(lost)
    _set_up(model, job)
    batch = small.batch(model)
    trains = kind.of(spec).trains
    with torch.set_grad_enabled(trains), _autocast(job):
        loss = model(**batch, use_cache=False).loss
    if trains:
        loss.backward()


def _quantized(small: _Small) -> Any:
    """Return the small model as the worker loads it from files."""
    from transformers import AutoConfig

    from honed.worker.model.transformers_backend import load_base

    model_dir = Path(tempfile.mkdtemp(dir=small.job.layout.dir))
    small.model_of().save_pretrained(model_dir)
    spec = small.job.spec.model_copy(update={"adapter": None})
    job = replace(small.job, base_model_path=model_dir, spec=spec)
    return load_base(job, AutoConfig.from_pretrained(model_dir))


def _set_up(model: Any, job: Assignment) -> None:
    """Do what SFTTrainer and transformers' Trainer do to a model before the first step."""
    training, text = job.spec.training.as_kwargs(), model.config.get_text_config()
    if hasattr(text, "output_router_logits"):
        coefficient = training.get("router_aux_loss_coef")
        text.output_router_logits = (
            getattr(text, "router_aux_loss_coef", 0.0) if coefficient is None else coefficient
        ) != 0
    model.train(kind.of(job.spec).trains)
    if kind.of(job.spec).trains and job.spec.training.gradient_checkpointing:
        if job.spec.lora is not None:
            model.enable_input_require_grads()
        chosen = dict(job.spec.training.gradient_checkpointing_kwargs or {})
        apart = {key: chosen.pop(key) for key in ("every_n_layers", "offload") if key in chosen}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=chosen or None, **apart)


def _autocast(job: Assignment) -> AbstractContextManager[None]:
    import torch

    is_mixed = job.precision.bf16 or job.precision.fp16
    return torch.autocast("cpu", dtype=torch.bfloat16) if is_mixed else nullcontext()


def words(error: Exception) -> str:
    """Return the library's own words, on one line."""
    return (
        error.message
        if isinstance(error, HonedError)
        else f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    )


if __name__ == "__main__":
    main()
