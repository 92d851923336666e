"""The check of the loss before the first step: the loss to be trained, compared with the model's own logits.

    one slice of a real row ──► the trainer's loss            (TRL's chunked one, Unsloth's kernels, Liger's, …)
                            └─► the model's logits ──► cross-entropy in float32

TRL's chunked loss multiplies by the head's weights and leaves out what else a model does on the way to its logits
(Granite divides them): it would train something that was not intended. Both losses are computed in eval mode and
without gradients, under the trainer's autocast. The load-balancing loss of a mixture of experts is left out; label
smoothing and `dft` are computed the same way. If the two differ, the plain loss is used where the job leaves the choice
and the memory suffices.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils.operations import convert_outputs_to_fp32

from honed.plan import loss as losses
from honed.system.error import LossError, said
from honed.text.chat import IGNORED
from honed.worker.assignment import Assignment
from honed.worker.cause import is_out_of_memory
from honed.worker.model import division
from honed.worker.rows.data import Data
from honed.worker.train.checkpoint import Progress
from honed.worker.train.prediction import undisturbed

#: Tokens of a slice, and the most tokens with which it may begin before the first trained one.
NUM_TOKENS, NUM_BEFORE = 256, 64
#: Most tokens of a row with media that is compared: it cannot be cut.
MAX_MEDIA_TOKENS = 4096
#: Nats by which the two losses may differ, beyond what the rounding of logits explains.
FLOORS = {"float32": 1e-3, "bfloat16": 2e-3, "float16": 2e-3}
#: Standard deviations of that rounding that are tolerated.
NUM_DEVIATIONS = 4
#: Repetitions of the logits where the two differ: some kernels sum in another order at every call.
NUM_REPEATS = 3

Log = Callable[[str, str], None]


@dataclass(frozen=True)
class Comparison:
    """A loss, its expected value, and the difference that is tolerated; in nats per token."""

    trained: float
    expected: float
    tolerance: float
    num_tokens: int

    @property
    def agrees(self) -> bool:
        if not (math.isfinite(self.trained) and math.isfinite(self.expected)):
            return math.isfinite(self.trained) == math.isfinite(self.expected)  # an overflow is found elsewhere
        return abs(self.trained - self.expected) <= self.tolerance

    @property
    def words(self) -> str:
        return (
            f"on {self.num_tokens} tokens of a row it is {self.trained:.4f}, but {self.expected:.4f} from the "
            "model's own logits"
        )


class PlainLoss:
    """A model's own forward, kept from before the trainer is built, which may replace it."""

    def __init__(self, model: Any) -> None:
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._forward = self._model.__dict__.get("forward")

    def take(self, trainer: Any) -> None:
        """Train with the model's own loss."""
        self._model.__dict__.pop("forward", None)
        if self._forward is not None:
            self._model.forward = self._forward
        trainer.args.loss_type = "nll"


def check(
    trainer: Any, data: Data, job: Assignment, plain: PlainLoss, *, progress: Progress, is_resumed: bool, log: Log
) -> None:
    """Raise LossError if another loss than the model's would be trained, and no other can be used.

    Afterwards the trained loss is in `progress`: a resumed run trains the same.
    """
    taken = str(trainer.args.loss_type)
    result = _compare(trainer, data, job, log)
    problem = ""
    if isinstance(result, Exception):
        error = f"{type(result).__name__}: {said(result)}"
        if taken == "chunked_nll" and _may_choose(job) and not is_resumed:
            problem = f"the training loss ({taken}) fails on this model: {error}"
        else:
            log("warning", f"the loss could not be compared with the model's logits: {error}")
    elif result is not None and result.agrees:
        log("debug", f"the loss ({taken}) matches the model's: {result.words}")
    elif result is not None:
        problem = f"the training loss ({taken}) is not the model's: {result.words}"
    if problem:
        _resolve(problem, trainer, data, job, plain, is_resumed=is_resumed, log=log)
    progress.loss_type = trainer.args.loss_type


def _may_choose(job: Assignment) -> bool:
    return job.spec.training.loss_type is None and not job.spec.training.use_liger_kernel


def _resolve(
    problem: str, trainer: Any, data: Data, job: Assignment, plain: PlainLoss, *, is_resumed: bool, log: Log
) -> None:
    """Handle a difference: use the plain loss, warn, or raise LossError."""
    named, taken = job.spec.training.loss_type, str(trainer.args.loss_type)
    if is_resumed:
        log("warning", f"{problem}; the run continues with the loss it started with")
        return
    if job.backend != "transformers":
        raise LossError(problem, hint="use backend: transformers, or backend: auto, which falls back to it")
    if named == "nll":
        log("warning", f"{problem}; but training.loss_type requests the model's own loss")
        return
    if taken != "chunked_nll" or not _may_choose(job):
        raise LossError(problem, hint=_hint(job, taken))
    short = _lacking(trainer, data, job)
    if short:
        raise LossError(
            f"{problem}; the plain loss (nll) needs all logits at once, {short}",
            hint="use a smaller per_device_train_batch_size or max_length; or training.loss_type: nll, which tries it",
        )
    plain.take(trainer)
    result = _compare(trainer, data, job, log)
    if isinstance(result, Comparison) and not result.agrees:
        raise LossError(f"neither loss matches the model's: {problem}; with nll {result.words}", hint=_hint(job, "nll"))
    log("warning", f"{problem}; using the plain loss (nll) instead")


def _hint(job: Assignment, taken: str) -> str:
    training = job.spec.training
    if training.use_liger_kernel:
        return "remove training.use_liger_kernel"
    if training.label_smoothing_factor:
        return "remove training.label_smoothing_factor"
    if training.loss_type is not None:
        return "write training.loss_type: nll, or remove it"
    if taken == "nll":
        return (
            "the model's code does not compute its loss from its logits: use training.loss_type: chunked_nll to "
            "compute it from them, or nll to use the model's own"
        )
    return "training.loss_type: nll"


def _lacking(trainer: Any, data: Data, job: Assignment) -> str:
    """Return the memory that the plain loss lacks by the plan's estimate, in words; empty where it fits."""
    memory, training = job.plan.memory, job.spec.training
    if memory is None or not memory.available_bytes:
        return ""
    length = max(data.longest, training.max_length or 0 if training.packing else 0)
    num_tokens = training.per_device_train_batch_size * length
    vocabulary = int(trainer.model.get_output_embeddings().weight.shape[0])
    size = 4 if computing_dtype(trainer, job) == "float32" else 2
    more = sum(
        sign * losses.logits_bytes(num_tokens, vocabulary, size, is_chunked=is_chunked)
        for sign, is_chunked in ((1, False), (-1, True))
    )
    needed = memory.total_bytes - memory.paged_bytes + more
    if needed <= memory.available_bytes:
        return ""
    gib = "{:.1f} GiB".format
    return f"{gib(needed / 2**30)} in total by the estimate, of {gib(memory.available_bytes / 2**30)}"


# --- The two ways -----------------------------------------------------------------------------------------------------


def _compare(trainer: Any, data: Data, job: Assignment, log: Log) -> Comparison | Exception | None:
    """Return the two losses, or the error of the trainer's; None where there is nothing to compare."""
    model = trainer.model
    try:
        if (taken := _slice(trainer, data)) is None:
            log(
                "info",
                f"the loss is not compared with the model's logits: no row has at most {MAX_MEDIA_TOKENS} tokens",
            )
            return None
        inputs = trainer._prepare_inputs(taken)
        labels = inputs["labels"]
        num_tokens = int((labels[0, 1:] != IGNORED).sum())
        if not num_tokens:
            return None
        with (
            undisturbed(model),
            torch.no_grad(),
            _without_balancing(trainer),
            _figures_kept(trainer),
            trained_autocast(model, job),
        ):
            seen = {name: value for name, value in inputs.items() if name != "labels"}
            logits: Any = getattr(model(**seen, use_cache=False), "logits", None)
            if not torch.is_tensor(logits) or logits.shape[:2] != labels.shape:
                log("info", "the loss is not compared with the model's logits: the model does not return any")
                return None
            is_trained = labels[0, 1:] != IGNORED
            targets, kept = labels[0, 1:][is_trained], logits[0, :-1][is_trained].float()
            del logits
            expected, tolerance = _expected(kept, targets, trainer, computing_dtype(trainer, job))
            del kept

            def spread() -> float:
                """Return by how much the model's own loss differs from call to call."""
                measured = [expected]
                for _ in range(NUM_REPEATS):
                    again = model(**seen, use_cache=False).logits[0, :-1][is_trained].float()
                    measured.append(_expected(again, targets, trainer, computing_dtype(trainer, job))[0])
                return max(measured) - min(measured)

            try:
                # The trainer multiplies the loss by the number of processes, and divides by the tokens of all of them.
                is_averaged = trainer.args.average_tokens_across_devices
                num_processes = trainer.accelerator.num_processes if is_averaged else 1
                # As if the step had as many tokens again in another batch: a mean over the batch's own ignores them.
                count = torch.tensor(2 * num_tokens * num_processes, device=labels.device)
                measured = float(trainer.compute_loss(model, dict(inputs), num_items_in_batch=count))
                is_own_mean = abs(measured - expected) <= tolerance
                trained = measured if is_own_mean else 2 * measured
            except Exception as error:
                if is_out_of_memory(error) or trainer.accelerator.num_processes > 1:
                    raise
                traceback.print_exc()
                return error
            compared = Comparison(trained, expected, tolerance, num_tokens)
            if not compared.agrees:
                return replace(compared, tolerance=tolerance + 2 * spread())
            if trainer.compute_loss_func is None:
                # A class that says otherwise would be accumulated wrongly: see share.py.
                trainer.model_accepts_loss_kwargs = not is_own_mean
            return compared
    except Exception as error:
        traceback.print_exc()
        if trainer.accelerator.num_processes > 1:
            raise  # the other ranks wait in a collective operation of this one
        if is_out_of_memory(error) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        log("warning", f"the loss could not be compared with the model's logits: {type(error).__name__}: {said(error)}")
        return None


def _expected(logits: torch.Tensor, targets: torch.Tensor, trainer: Any, dtype: str) -> tuple[float, float]:
    """Compute the job's loss in float32 from the logits at trained positions, and the tolerance for their rounding."""
    scores = torch.log_softmax(logits, dim=-1)
    chosen = scores.gather(-1, targets[:, None])[:, 0]
    per_token = -chosen
    if trainer.args.loss_type == "dft":
        per_token = per_token * chosen.exp()
    smoothing = trainer.args.label_smoothing_factor or 0.0
    if smoothing:
        per_token = (1 - smoothing) * per_token - smoothing * scores.mean(dim=-1)
    # Logits are rounded on the way, each to half a unit of its last place, more than once where they are scaled.
    rounding = torch.finfo(getattr(torch, dtype)).eps * logits.abs().amax(dim=-1)
    count = len(targets)
    tolerance = (
        FLOORS[dtype] + NUM_DEVIATIONS * float(rounding.square().sum().sqrt()) / count + float(rounding.square().mean())
    )
    return float(per_token.mean()), tolerance


def _slice(trainer: Any, data: Data) -> dict[str, Any] | None:
    """Return a slice of a row of text, or the shortest row with media, as trainer input; None if that is too long."""
    rows = data.train.dataset
    is_text = [source == -1 for source in rows["source"]] if data.media is not None else None
    lengths = data.train.lengths
    if is_text is not None and not any(is_text):
        shortest = int(lengths.argmin())
        if lengths[shortest] > MAX_MEDIA_TOKENS:
            return None
        return dict(trainer.data_collator([rows[shortest]]))
    first = 0 if is_text is None else is_text.index(True)
    row = rows[first]
    labels = list(row["labels"])
    begin = max(0, next(n for n, label in enumerate(labels) if n and label != IGNORED) - NUM_BEFORE)
    ids, labels = list(row["input_ids"])[begin : begin + NUM_TOKENS], labels[begin : begin + NUM_TOKENS]
    return {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "labels": torch.tensor([labels]),
    }


def _is_autocast(job: Assignment) -> bool:
    return job.precision.bf16 or job.precision.fp16


def computing_dtype(trainer: Any, job: Assignment) -> str:
    """Return the coarsest dtype in which logits are computed."""
    precision = job.precision
    if _is_autocast(job):
        return "bfloat16" if precision.bf16 else "float16"
    return precision.load_dtype if precision.load_dtype in FLOORS else str(trainer.model.dtype).removeprefix("torch.")


@contextlib.contextmanager
def trained_autocast(model: Any, job: Assignment) -> Iterator[None]:
    """Put the model under the trainer's autocast, as accelerate does: around forward, which returns float32."""
    if not _is_autocast(job):
        yield
        return
    own = model.__dict__.get("forward")
    dtype = torch.bfloat16 if job.precision.bf16 else torch.float16
    cast = torch.autocast(model.device.type, dtype, cache_enabled=not division.is_divided(model))
    try:
        model.forward = convert_outputs_to_fp32(cast(model.forward))
        yield
    finally:
        model.__dict__.pop("forward", None)
        if own is not None:
            model.forward = own


@contextlib.contextmanager
def _without_balancing(trainer: Any) -> Iterator[None]:
    """Leave out the load-balancing loss, which is added to the loss of a mixture of experts by its own rule."""
    config = trainer.model.config.get_text_config()
    is_enabled, is_asked = getattr(trainer, "aux_loss_enabled", False), getattr(config, "output_router_logits", None)
    try:
        trainer.aux_loss_enabled = False
        if is_asked:
            config.output_router_logits = False
        yield
    finally:
        trainer.aux_loss_enabled = is_enabled
        if is_asked:
            config.output_router_logits = is_asked


@contextlib.contextmanager
def _figures_kept(trainer: Any) -> Iterator[None]:
    """Restore the metrics that TRL accumulates for its next log, so that the check leaves no trace in them."""
    figures = {mode: {name: list(values) for name, values in kept.items()} for mode, kept in trainer._metrics.items()}
    num_tokens = trainer._total_train_tokens
    try:
        yield
    finally:
        for mode, kept in figures.items():
            trainer._metrics[mode].clear()
            trainer._metrics[mode].update(kept)
        trainer._total_train_tokens = num_tokens
