"""A job's plan.json: the decisions made before its model is loaded, and what its worker needs beside them.

    preflight   PlanFile.checked    the decisions, the warnings, the inputs and who may read them
    daemon      accepted            the job's identity, its spec, its output directory, the date
    worker      adjusted            the spec of one attempt; `reduced` in trial.py: the spec of a trial

`honectl plan --json` prints the decisions in the same shape; `show --json` and an output's manifest contain the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from honed.job.job import Adjustment, Job
from honed.spec.media import Kind
from honed.system import durable, record, untrusted
from honed.system.device import Device
from honed.system.personpath import PersonPath

# -- decisions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backend:
    """The library that loads the model, and why."""

    name: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Precision:
    """All precision choices; dtypes by torch's names. plan/precision.py makes them and asserts their invariants."""

    load_dtype: str  #: handed to from_pretrained
    compute_dtype: str | None  #: bitsandbytes'; None without quantization
    bf16: bool  #: the trainer's flag: autocast to bfloat16
    fp16: bool  #: the trainer's flag: autocast to float16, with a GradScaler
    adapter_dtype: str | None  #: of every trainable parameter beside a frozen base; None for full fine-tuning
    quantization: str  #: none, 4bit, 8bit
    attn_implementation: str
    reasons: dict[str, str]  #: why, per field
    warnings: tuple[str, ...] = ()
    #: In full fine-tuning: float32, compensated or none; None for adapters.
    master_weights: str | None = None
    optim: str | None = None  #: the optimizer that the plan chose; None: the job's
    save_dtype: str | None = None  #: of a full fine-tuning's output; None: as trained

    def as_dict(self) -> dict[str, object]:
        choices = asdict(self)
        del choices["warnings"]  # they are listed with the plan's other warnings
        return choices


@dataclass(frozen=True)
class Memory:
    """Estimated memory of a job, in bytes."""

    weights_bytes: int  #: quantization state included
    adapter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    available_bytes: int  #: the device's whole memory, less the administrator's reserve
    batch_size: int
    length: int  #: tokens of the longest row expected in a batch
    num_media_tokens: int = 0  #: of a row: tokens of images, videos and sounds
    media: tuple[Kind, ...] = ()  #: kinds of media in the rows
    num_frames: int = 0  #: taken of the longest video in them
    num_pixels: int = 0  #: of the largest image or frame, up to where more no longer cost the model more; 0: unknown
    tower_bytes: int = 0  #: part of the activations that vision and audio encoders take
    paged_bytes: int = 0  #: part of the optimizer's states that the device may move to main memory
    exchange_bytes: int = 0  #: buffers of several GPUs: gradients under way (ddp), gathered layers (fsdp)
    num_ranks: int = 1  #: devices; all figures are for one of them

    @property
    def total_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        names = ("weights", "adapter", "gradient", "optimizer", "activation", "exchange")
        return tuple((name, getattr(self, f"{name}_bytes")) for name in names)

    @property
    def fits(self) -> bool:
        return self.total_bytes - self.paged_bytes <= self.available_bytes

    @property
    def can_fit(self) -> bool:
        """True if the job fits when gradients and activations are never whole at once, as without accumulation."""
        lasting = self.weights_bytes + self.adapter_bytes + self.optimizer_bytes + self.exchange_bytes
        lasting -= self.paged_bytes
        return lasting + max(self.gradient_bytes, self.activation_bytes) <= self.available_bytes

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "media": list(self.media), "total_bytes": self.total_bytes, "fits": self.fits}


@dataclass(frozen=True)
class RowNeeds:
    """Estimated needs of a job's encoded rows."""

    num_rows: int
    disk_bytes: int  #: of its rows/
    memory_bytes: int  #: host memory beside the imported libraries and the model

    def __add__(self, other: RowNeeds) -> RowNeeds:
        memory = max(self.memory_bytes, other.memory_bytes)  # one after the other
        return RowNeeds(self.num_rows + other.num_rows, self.disk_bytes + other.disk_bytes, memory)


@dataclass(frozen=True)
class Loss:
    """The type of loss, and why."""

    type: str | None  #: SFTConfig's `loss_type`; None leaves it to the backend
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parallel:
    """The division of a job between devices, and the batch that results; see plan/parallel.py."""

    mode: Literal["none", "ddp", "fsdp"] = "none"
    num_ranks: int = 1  #: processes that train, one for every device
    ranks_per_node: int = 1
    num_nodes: int = 1
    per_device_train_batch_size: int | None = None  #: of every rank; None: the job's
    gradient_accumulation_steps: int | None = None  #: likewise
    effective_batch: int | None = None  #: rows of one optimizer step on all devices together; likewise
    reasons: Mapping[str, str] = field(default_factory=dict)  #: why, for mode and effective_batch


@dataclass(frozen=True)
class Checkpoint:
    """The base model's facts."""

    num_parameters: int
    num_trained: int
    trained_unsure: str  #: why it is an estimate; empty where it is exact
    stored_dtypes: Mapping[str, int]  #: dtype → parameters
    num_weight_bytes: int
    model_type: str | None
    architectures: tuple[str, ...]
    quantization_method: str | None  #: of a checkpoint that is stored quantized
    has_chat_template: bool
    has_vision: bool  #: True for any encoder beside the language model: images, videos or sounds
    is_pickled: bool


# -- inputs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DatasetPlace:
    """The place of the rows of a data set from the hub, fixed to a commit."""

    commit: str
    path: Path  #: the snapshot
    files: tuple[str, ...]  #: within the snapshot, in their order


@dataclass(frozen=True)
class Grant:
    """The files that a job's worker may read, as settled when the job was planned; check/policy.py applies it."""

    closed: tuple[Path, ...]  #: honed's own places
    allowed: tuple[Path, ...] | None  #: None: everything else
    inputs: tuple[Path, ...]  #: the real places of the paths that the job names

    def as_dict(self) -> dict[str, object]:
        allowed = None if self.allowed is None else list(map(str, self.allowed))
        return {"closed": list(map(str, self.closed)), "allowed": allowed, "inputs": list(map(str, self.inputs))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Grant:
        allowed = None if data["allowed"] is None else tuple(map(Path, data["allowed"]))
        return cls(tuple(map(Path, data["closed"])), allowed, tuple(map(Path, data["inputs"])))


@dataclass(frozen=True)
class Earlier:
    """What a job's next plan takes over: the jobs that it waited for, and what its earlier plan settled."""

    jobs: Mapping[str, Path] = field(default_factory=dict)  #: name → output directory, for `job:NAME`
    commit: str | None = None  #: what the base model's hub id meant
    dataset_commits: Mapping[str, str] = field(default_factory=dict)  #: the same of data sets, by key
    pinned: Precision | None = None


# -- the file ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """A job as its outputs name it."""

    id: int
    name: str
    instance: str  #: the spool that numbered the job

    @property
    def owner(self) -> tuple[int, str]:
        """The job's number, and the instance that numbered it."""
        return self.id, self.instance


@dataclass(frozen=True)
class PlanFile:
    """The content of one plan.json.

    Each property reads one key. A damaged value raises KeyError, TypeError or ValueError where it is read, so a reader
    of one key does not depend on the others. The preflight has its submitter's permissions, so a plan may have any
    value but for its spec, output directory and identity.
    """

    document: dict[str, Any]  #: the whole file: its keys in their order, unknown ones included

    @classmethod
    def read(cls, path: PersonPath) -> PlanFile:
        """Read a job's plan.json. Raises OSError, and ValueError if it is not a plan."""
        return cls.from_json(untrusted.read_plain(path))

    @classmethod
    def from_json(cls, data: bytes) -> PlanFile:
        """Parse the content of a plan.json. Raises ValueError if it is not a plan."""
        try:
            document = json.loads(data)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(document, dict):
            raise ValueError("not a plan")
        return cls(document)

    def to_json(self) -> bytes:
        return durable.as_json(self.document)

    def write(self, path: PersonPath) -> None:
        """Replace a plan.json, atomically and durably."""
        untrusted.write_plain(path, self.to_json())

    # -- what is decided

    @property
    def row_needs(self) -> RowNeeds:
        """Estimated needs of the encoded rows; 0 where they are not known."""
        given = self.document.get("rows")
        return record.read(RowNeeds, given) if given else RowNeeds(0, 0, 0)

    @property
    def is_decided(self) -> bool:
        """False while the job waits for another job's output, or for a fetch: there are no decisions yet."""
        return "backend" in self.document

    @property
    def backend(self) -> Backend:
        return record.read(Backend, self.document["backend"])

    @property
    def precision(self) -> Precision:
        return record.read(Precision, self.document["precision"])

    @property
    def memory(self) -> Memory | None:
        given = self.document.get("memory")
        return record.read(Memory, given) if given else None

    @property
    def loss(self) -> Loss:
        return record.read(Loss, self.document["loss"])

    @property
    def parallel(self) -> Parallel:
        """The division between devices."""
        return record.read(Parallel, self.document["parallel"])

    @property
    def checkpoint(self) -> Checkpoint:
        return record.read(Checkpoint, self.document["checkpoint"])

    @property
    def device(self) -> Device | None:
        given = self.document.get("device")
        return record.read(Device, given) if given else None

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self.document.get("warnings") or ())

    # -- what is read and written

    @property
    def base_model_path(self) -> Path:
        return Path(self.document["base_model_path"])

    @property
    def base_model_commit(self) -> str | None:
        """The commit that the base model's hub id meant when the job was planned."""
        given: str | None = self.document.get("base_model_commit")
        return given

    @property
    def adapter_path(self) -> Path | None:
        """The adapter that the job continues from, where its spec may say job:NAME."""
        given = self.document.get("adapter_path")
        return Path(given) if given else None

    @property
    def hub_datasets(self) -> dict[str, DatasetPlace]:
        """The places of data sets from the hub, by key: datasets.0."""
        given = dict(self.document.get("hub_datasets") or {})
        return {key: record.read(DatasetPlace, item) for key, item in given.items()}

    @property
    def may_read(self) -> Grant | None:
        """The files that the worker may read; None if it was not settled."""
        given = self.document.get("may_read")
        return Grant.from_dict(given) if given else None

    @property
    def output_dir(self) -> Path:
        return Path(self.document["output_dir"])

    # -- the job

    @property
    def job(self) -> Identity:
        return record.read(Identity, self.document["job"])

    @property
    def uid(self) -> int:
        """The user whose job it is."""
        return int(self.document["job"]["user_id"])

    @property
    def spec(self) -> dict[str, Any]:
        """The job file's content, as validated."""
        return dict(self.document["spec"])

    @property
    def date(self) -> datetime:
        """The date that chat templates are given."""
        return datetime.fromisoformat(self.document["date"])

    @property
    def is_trial(self) -> bool:
        """True for the plan of a trial; see trial.py."""
        return bool(self.document.get("is_trial"))

    # -- its making

    @classmethod
    def checked(
        cls,
        decisions: Mapping[str, Any],
        *,
        warnings: Sequence[str],
        adapter_path: Path | None,
        base_model_commit: str | None,
        hub_datasets: Mapping[str, Any],
        may_read: Grant | None,
    ) -> PlanFile:
        """Return the plan as the preflight knows it; `decisions` are those of `Plan.as_dict`, or empty."""
        return cls(
            {
                **decisions,
                "warnings": list(warnings),
                "adapter_path": str(adapter_path) if adapter_path else None,
                "base_model_commit": base_model_commit,
                "hub_datasets": dict(hub_datasets),
                "may_read": may_read.as_dict() if may_read else None,
            }
        )

    def accepted(self, job: Job, spec: Mapping[str, Any], instance: Path) -> PlanFile:
        """Return the plan of an accepted job; `instance` is the spool that numbered it."""
        identity = {"id": job.id, "name": job.name, "user_id": str(job.uid), "instance": str(instance)}
        # Chat templates may ask for today's date in local time; every attempt gets the date of the acceptance.
        date = datetime.fromtimestamp(job.submitted_at, UTC).astimezone().isoformat(timespec="seconds")
        return self._with(job=identity, spec=spec, output_dir=job.output_dir, date=date)

    def adjusted(self, spec: Mapping[str, Any], adjustments: Sequence[Adjustment]) -> PlanFile:
        """Return the plan of an attempt whose spec was changed for lack of memory."""
        return self._with(spec=spec, adjustments=[asdict(adjustment) for adjustment in adjustments])

    def for_trial(self, spec: Mapping[str, Any], output_dir: Path) -> PlanFile:
        return self._with(spec=spec, output_dir=str(output_dir), is_trial=True, parallel=asdict(Parallel()))

    def _with(self, **keys: Any) -> PlanFile:
        return PlanFile({**self.document, **keys})
