"""The packages that a job's worker imports, as its plan decides them: what a worker and a spare must have in common."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from honed.job.plan_file import PlanFile

#: In a worker's environment: import all that the libraries import, and when they do. For comparisons, and in case that
#: a library is not content with less.
IMPORT_ALL_VARIABLE = "HONED_IMPORT_ALL"
#: Optimizers of torch's own.
PLAIN_OPTIMIZERS = frozenset({None, "adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd"})


@dataclass(frozen=True)
class Needs:
    """What a job needs of its libraries."""

    #: Packages that it does not use although they may be installed, and that its libraries would import. wandb leaves
    #: directories in /tmp. datasets imports aiohttp for an exception of streaming over HTTP, transformers imports
    #: torchvision with any model, and peft bitsandbytes with any adapter.
    hidden: tuple[str, ...]
    #: All code of the run is known: not with Unsloth, code of the model's own, or a compiled model.
    is_plain: bool
    model_type: str = ""

    @classmethod
    def of(cls, plan: PlanFile, backend: str) -> Needs:
        """Return the needs of a job with that backend. Raises KeyError, TypeError, ValueError or AttributeError for a
        damaged plan."""
        spec, precision, checkpoint = plan.spec, plan.precision, plan.checkpoint
        training = spec.get("training") or {}
        has_compiler = training.get("torch_compile") or training.get("use_liger_kernel")
        has_compiler = has_compiler or precision.attn_implementation == "flex_attention"
        is_plain = backend == "transformers" and not spec.get("trust_remote_code") and not has_compiler
        hidden = [] if "wandb" in (spec.get("report_to") or ()) else ["wandb"]
        if is_plain and spec.get("kind", "sft") != "merge":
            hidden.append("aiohttp")
            if not checkpoint.has_vision:
                hidden.append("torchvision")
            # The plan may have chosen another optimizer than the job file's, whose default is plain.
            optim = precision.optim or training.get("optim")
            if precision.quantization == "none" and optim in PLAIN_OPTIMIZERS:
                hidden.append("bitsandbytes")
        return cls(tuple(hidden), is_plain, str(checkpoint.model_type or ""))

    @property
    def asks_device(self) -> bool:
        """True if the imports of TRL and peft ask the device for its properties: bitsandbytes does, in theirs."""
        return "bitsandbytes" not in self.hidden

    @property
    def can_be_ahead(self) -> bool:
        """True if all imports may be made before there is a job, and a device: they ask none, and run no other code."""
        return self.is_plain and not self.asks_device

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Needs:
        """Parse needs. Raises ValueError, KeyError or TypeError if they are none."""
        raw = json.loads(text)
        return cls(tuple(map(str, raw["hidden"])), bool(raw["is_plain"]), str(raw["model_type"]))
