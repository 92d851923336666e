"""A merged model computes what base plus adapter computes: their logits are compared on a few rows.

Merged tensors were compared as they were written (oracle.py), but no model has computed with them. This opens the files
as other programs do, with their config and ties. Both models must fit the memory that was planned.

How far rounding alone moves logits depends on the family, its depth and its routers: over 11 models the largest
difference was 0.5 to 26 units in the last place of the largest logit. So it is measured: the merged model is computed
once more with every weight moved up or down by one unit in the last place, of the coarser of the two dtypes. In 120
families the logits of the merged model were 0.25 to 0.53 times as far from those of base and adapter in half precision,
and 0.45 to 0.94 in float32; 0.98 was the most in 198 merges of deeper and wilder models.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.job.progress import gib
from honed.plan.memory import COMPARED_ROWS, COMPARED_TOKENS, comparison_bytes
from honed.spec import kind
from honed.system.error import HonedError, InterruptedRunError, ModelError, TimeLimitError, said
from honed.worker.assignment import Assignment
from honed.worker.cause import is_out_of_memory
from honed.worker.model import adapter, beginning, streamed, verify
from honed.worker.model.config import load_config
from honed.worker.rows.data import Data

#: Of what rounding was measured to do, so much is accepted.
MAX_RATIO = 1.5
#: Logits beyond it are a mask.
_MAX_LOGIT = 1e4
#: Numbers in float32 that a merge takes for each of its largest tensor, and bytes that any machine has.
FLOATS_OF_MERGE, MIN_ROOM_BYTES = 3, 2**28
_HINT = "this is a bug: please report it; the adapter is kept where a training made it"

#: The arguments of a forward pass of one row.
Row = Mapping[str, Any]


class _NotComparedError(Exception):
    """The two models cannot be compared, for a reason that is no fault of the merge."""


class _NotWholeError(_NotComparedError):
    """They cannot be compared as a whole."""


@dataclass(frozen=True)
class Likeness:
    """How far a merged model's logits are from what is expected, relative to their size."""

    distance: float
    rounding: float  #: as far as by moving every weight by one unit in the last place
    num_rows: int

    @property
    def is_alike(self) -> bool:
        return self.distance <= MAX_RATIO * self.rounding

    def __str__(self) -> str:
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows"
        return f"by {self.distance:.2g} of their size on {rows}, and rounding moves them by {self.rounding:.2g}"


def compare(
    made: Path,
    job: Assignment,
    rows: Sequence[Row] = (),
    *,
    live: Any = None,
    beat: Callable[[], None] = lambda: None,
) -> str:
    """Compare a merged checkpoint with base plus adapter; return the result, or why there is none, in words.

    `live` is the trained model, in eval mode; if it is missing or quantized, base and adapter are loaded. What cannot
    be compared as a whole is compared layer by layer, from the files; `beat` is called before each, and may raise, to
    stop. Without rows, rows of random tokens are compared. Raises ModelError if the logits differ by more than
    rounding.
    """
    way = ""
    try:
        _check_kind(job)
        rows = rows or _random_rows(load_config(job))
        try:
            likeness = _compare_whole(made, job, rows, live)
        except _NotWholeError as reason:
            likeness, way = _compare_by_layers(made, job, rows, str(reason), beat), ", layer by layer"
    except _NotComparedError as reason:
        return f"not compared with base and adapter: {reason}"
    if not likeness.is_alike:
        raise ModelError(f"the merged model is not base plus adapter: its logits differ {likeness}", hint=_HINT)
    return f"compared with base and adapter{way}: the logits differ {likeness}"


def _compare_whole(made: Path, job: Assignment, rows: Sequence[Row], live: Any) -> Likeness:
    if job.plan.parallel.mode == "fsdp":
        raise _NotWholeError("the trained model is divided between devices")
    is_held = live is not None and job.precision.quantization == "none"
    if not is_held and job.plan.checkpoint.quantization_method:
        raise _NotWholeError("the base is stored quantized")
    _check_room(made, job, rows, is_held=is_held)
    device = "cpu" if live is None else live.device
    expected, dtype = _expected(live if is_held else _side_by_side(made, job, device), rows)
    return _likeness(_merged(made, job, device), rows, expected, dtype)


# --- Rows -------------------------------------------------------------------------------------------------------------


def rows_of(trainer: Any, data: Data) -> list[Row]:
    """Return the first rows that are trained on; one, uncut, where rows have media."""
    import torch

    dataset = data.train.dataset
    if data.media is not None:
        batch = dict(trainer.data_collator([dataset[0]]))
        batch.pop("labels")
        return [batch]
    return [
        _row(torch.tensor([dataset[index]["input_ids"][:COMPARED_TOKENS]]))
        for index in range(len(dataset))[:COMPARED_ROWS]
    ]


def _random_rows(config: Any) -> list[Row]:
    """Return rows of random tokens, without those that the config names: some stand for images."""
    import torch

    text = config.get_text_config()
    keys = {**config.to_dict(), **text.to_dict()}
    named = {value for key, value in keys.items() if key.endswith(("_id", "_index")) and isinstance(value, int)}
    ordinary = torch.tensor([number for number in range(text.vocab_size) if number not in named])
    chosen = torch.randint(len(ordinary), (COMPARED_ROWS, COMPARED_TOKENS), generator=torch.Generator().manual_seed(0))
    return [_row(ordinary[item][None]) for item in chosen]


def _row(ids: Any) -> Row:
    import torch

    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# --- What can be compared ---------------------------------------------------------------------------------------------


def _check_kind(job: Assignment) -> None:
    if job.backend == "unsloth":
        raise _NotComparedError("Unsloth changes what transformers computes in this process")


def _check_room(made: Path, job: Assignment, rows: Sequence[Row], *, is_held: bool) -> None:
    """Raise _NotWholeError unless what is loaded fits where the plan has activations, or the whole merge."""
    memory = job.plan.memory
    assert memory is not None
    num_tokens = sum(row["input_ids"].numel() for row in rows)
    model_bytes = sum(path.stat().st_size for path in made.glob("*.safetensors"))
    needed = comparison_bytes(model_bytes, load_config(job).to_dict(), num_tokens) + memory.tower_bytes
    if not is_held:
        needed += model_bytes + (_adapter_dir(made, job) / adapter.FILE).stat().st_size
    planned = memory.total_bytes if kind.of(job.spec).merges else memory.activation_bytes
    if needed > planned:
        raise _NotWholeError(f"that takes {gib(needed)} of memory, and {gib(planned)} is planned")


def _adapter_dir(made: Path, job: Assignment) -> Path:
    """Return the directory of the adapter: a training has its merged checkpoint within it."""
    return Path(job.spec.adapter) if kind.of(job.spec).merges and job.spec.adapter else made.parent


# --- The models and their logits --------------------------------------------------------------------------------------


def _side_by_side(made: Path, job: Assignment, device: Any) -> Any:
    """Load base and adapter, unquantized. Raises _NotComparedError."""
    import peft

    adapter_dir = _adapter_dir(made, job)
    dtype = _output_dtype(job)
    if str(peft.PeftConfig.from_pretrained(adapter_dir).init_lora_weights).lower() in beginning.REPEATED:
        trained = beginning.of_adapter(adapter_dir) if kind.of(job.spec).merges else job.precision
        if trained is not None and trained.quantization != "none":
            raise _NotComparedError("the adapter's first weights were taken out of a quantized base")
        dtype = trained.load_dtype if trained is not None else beginning.Loaded().dtype
    with _excused():
        model = peft.PeftModel.from_pretrained(_loaded(job.base_model_path, job, dtype, device), adapter_dir)
        adapter.load(model, adapter_dir)
    return model.eval()


def _merged(made: Path, job: Assignment, device: Any) -> Any:
    with _blamed():
        return _loaded(made, job, _output_dtype(job), device).eval()


def _output_dtype(job: Assignment) -> str:
    return job.precision.load_dtype if kind.of(job.spec).merges else job.spec.save_merged


def _loaded(directory: Path, job: Assignment, dtype: str, device: Any) -> Any:
    """Load a whole model from its files, and compare it with them."""
    import torch

    from honed.worker.model.config import model_class

    attention, with_code = job.precision.attn_implementation, job.spec.trust_remote_code
    is_base = directory == job.base_model_path
    config = load_config(job) if is_base else _written_config(directory, job)
    model = model_class(config).from_pretrained(
        directory,
        config=config,
        dtype=getattr(torch, dtype),
        trust_remote_code=with_code,
        device_map={"": device},
        **({} if attention == "auto" else {"attn_implementation": attention}),
    )
    verify.check(model, directory)
    return model


def _written_config(directory: Path, job: Assignment) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(directory, trust_remote_code=job.spec.trust_remote_code)


def _expected(model: Any, rows: Sequence[Row]) -> tuple[list[Any], Any]:
    """Return the logits of base plus adapter, and the model's dtype. Raises _NotComparedError."""
    import torch

    with _excused():
        logits = _logits(model, rows)
    if not all(bool(torch.isfinite(item).all()) for item in logits):
        raise _NotComparedError("its logits are no numbers")
    return logits, model.dtype


def _likeness(merged: Any, rows: Sequence[Row], expected: list[Any], dtype: Any) -> Likeness:
    """Compare a merged model's logits with the expected ones. The model is changed."""
    import torch

    with _blamed():
        logits = _logits(merged, rows)
        _jog(merged, max(torch.finfo(item).eps for item in (dtype, merged.dtype)))
        jogged = _logits(merged, rows)
    return _apart(logits, expected, jogged)


def _apart(actual: list[Any], expected: list[Any], jogged: list[Any]) -> Likeness:
    import torch

    size = _typical(torch.cat(expected))
    distance, rounding = (
        _typical(torch.cat([one - other for one, other in zip(actual, item, strict=True)])) / size
        for item in (expected, jogged)
    )
    return Likeness(distance, rounding, len(actual))


def _logits(model: Any, rows: Sequence[Row]) -> list[Any]:
    """Return every row's logits, by its positions; those that a model masks are limited."""
    import torch

    with torch.no_grad():
        given = [{key: item.to(model.device) for key, item in row.items()} for row in rows]
        return [model(**item, use_cache=False).logits[0].float().clamp(-_MAX_LOGIT, _MAX_LOGIT) for item in given]


def _typical(logits: Any) -> float:
    """Return a norm of logits by which a few positions, for which a router chooses other experts, count no more."""
    return float(logits.square().mean(-1).sqrt().median())


def _jog(model: Any, step: float) -> None:
    """Move every weight up or down by a step, relative to its size, at random."""
    import torch

    source = torch.Generator(model.device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                factors = torch.empty_like(parameter).bernoulli_(0.5, generator=source)
                parameter.mul_(factors.mul_(2 * step).add_(1 - step))


# --- Layer by layer ---------------------------------------------------------------------------------------------------


def _compare_by_layers(
    made: Path, job: Assignment, rows: Sequence[Row], reason: str, beat: Callable[[], None]
) -> Likeness:
    """Compare two models that compute from their files, one after the other. Raises _NotComparedError.

    What fails is no fault of the merge: other programs do not open it so.
    """
    import torch

    adapter_dir, config = _adapter_dir(made, job), load_config(job)
    with _excused():
        with _streamed(job.base_model_path, config, job, beat) as base:
            _check_layers(base, config, rows, reason)
            expected = _streamed_logits(base, _adapted(base.model, adapter_dir), rows)
        with _streamed(made, _written_config(made, job), job, beat) as merged:
            actual = _streamed_logits(merged, merged.model, rows)
            merged.step = float(torch.finfo(getattr(torch, _output_dtype(job))).eps)
            jogged = _streamed_logits(merged, merged.model, rows)
    if not all(bool(torch.isfinite(item).all()) for item in (*expected, *actual)):
        raise _NotComparedError("its logits are no numbers")
    return _apart(actual, expected, jogged)


def _streamed(
    directory: Path, config: Any, job: Assignment, beat: Callable[[], None]
) -> AbstractContextManager[streamed.Streamed]:
    attention = job.precision.attn_implementation
    return streamed.opened(
        directory,
        config,
        _output_dtype(job),
        attn_implementation=attention if attention in ("eager", "sdpa") else None,
        trust_remote_code=job.spec.trust_remote_code,
        beat=beat,
    )


def _adapted(model: Any, adapter_dir: Path) -> Any:
    """Wrap a streamed model in the adapter, as a load does: low-rank matrices are in float32, copies of modules in the
    model's dtype. Raises _NotComparedError where the training began with another base.
    """
    import peft

    config = peft.PeftConfig.from_pretrained(adapter_dir)
    if (init := str(config.init_lora_weights).lower()) in beginning.REPEATED:
        raise _NotComparedError(f"init_lora_weights: {init} changed the base, and it is too large to repeat that")
    config.init_lora_weights, config.inference_mode = False, True
    state = {
        name: item.to(model.dtype) if item.is_floating_point() and ".lora_" not in name else item
        for name, item in adapter.read(adapter_dir).items()
    }
    return adapter.wrap(model, config, state, adapter_dir).eval()


def _streamed_logits(base: streamed.Streamed, model: Any, rows: Sequence[Row]) -> list[Any]:
    import torch

    # The process may have autocast on, which would compute otherwise in the two models.
    with torch.no_grad(), torch.autocast("cpu", enabled=False), base.streaming(model):
        return [
            model(**row, use_cache=False).logits[0].float().clamp(-_MAX_LOGIT, _MAX_LOGIT)
            for row in ({key: item.cpu() for key, item in row.items()} for row in rows)
        ]


def _check_layers(base: streamed.Streamed, config: Any, rows: Sequence[Row], reason: str) -> None:
    """Raise _NotComparedError if a layer takes more memory than the merge has just taken for its largest tensor."""
    largest = max((math.prod(tensor.shape) for tensor in base.base.tensors.values()), default=0)
    room = max(MIN_ROOM_BYTES, FLOATS_OF_MERGE * 4 * largest)
    num_tokens = sum(row["input_ids"].numel() for row in rows)
    needed = comparison_bytes(2 * base.largest_bytes, config.to_dict(), num_tokens)
    if needed > room:
        raise _NotComparedError(f"{reason}; layer by layer it takes {gib(needed)}, and a merge has {gib(room)}")


@contextlib.contextmanager
def _excused() -> Iterator[None]:
    """Turn a failure of base and adapter, which are not what is written, into _NotComparedError."""
    try:
        yield
    except (_NotComparedError, InterruptedRunError, TimeLimitError):
        raise
    except Exception as error:
        raise _NotComparedError(f"{type(error).__name__}: {said(error, is_brief=True)}") from error


@contextlib.contextmanager
def _blamed() -> Iterator[None]:
    """Turn a failure of the merged model into ModelError; a lack of memory is not its fault."""
    try:
        yield
    except HonedError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {said(error, is_brief=True)}"
        if is_out_of_memory(error):
            raise _NotComparedError(text) from error
        raise ModelError(f"the merged model cannot be used: {text}", hint=_HINT) from error
