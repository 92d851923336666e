"""The remedy of an error that a step on a small model has shown: edits of the job file with which that step passes.

Nothing is suggested that was not tried: single edits first, then several.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from honed.spec import export, kind
from honed.spec.spec import JobSpec, LoraSpec
from honed.system.error import Fix, HonedError, ModelError, SpecError
from honed.worker.assignment import Assignment

#: Edits, or pairs of them, that are tried.
MAX_TRIES = 20
#: What every edit gives up; and the order in which they are tried.
_MEANS = {
    "lora.lora_dropout": "an adapter on fused experts takes no dropout",
    "lora.init_lora_weights": "the adapter begins as usual",
    "lora.use_dora": "the adapter is plain LoRA",
    "lora.bias": "biases are not trained",
    "lora.trainable_token_indices": "no single tokens are trained",
    "lora.exclude_modules": "these layers get no adapter",
    "training.router_aux_loss_coef": "there is no load-balancing loss",
    "training.gradient_checkpointing_kwargs": "checkpointing as transformers does it",
    "training.gradient_checkpointing": "a step takes more memory",
    "attn_implementation": "transformers' own attention",
    "lora.modules_to_save": "these modules are not trained in full",
    **{item.key: f"no {item.title} is written" for item in export.EXPORTS},
    "quantization": "the model takes more memory",
    "dtype": "a step takes more time and memory",
}
#: Modules that peft lists as unfit for the family.
_UNFIT = re.compile(r"Incompatible modules: \{([^}]*)\}")


class LostNamesError(Exception):
    """peft saves an adapter under names by which it does not find it again."""

    def __init__(self, names: list[str]) -> None:
        #: The layers by their last two names, as exclude_modules takes them.
        self.modules = sorted({".".join(name.partition(".lora_")[0].split(".")[-2:]) for name in names})
        super().__init__(f"peft does not find the saved adapter of {', '.join(self.modules)} again")


def find(job: Assignment, error: Exception, model_of: Callable[[], Any], passes: Callable[[JobSpec], bool]) -> Fix:
    """Return the edits with which the job's step passes; empty if none are known."""
    edits = list(_edits(job.spec, error, model_of))
    tries = (*((edit,) for edit in edits), *itertools.combinations(edits, 2))
    for several in (*tries[:MAX_TRIES], tuple(edits)):
        fix: Fix = {}
        for item in several:
            fix |= item
        if fix and passes(edited(job.spec, fix)):
            return fix
    return {}


def refusal(job: Assignment, words: str, fix: Fix) -> HonedError:
    """Return the error of a job that fails with these words, and passes with this fix."""
    where = job.base_model_path / "config.json"
    if not fix:
        return ModelError(
            f"{where}: a step of this job on a small model of the same family fails: {words}",
            hint="no edit of the job file is known that helps: use other target_modules, or another base model",
        )
    edits = "; ".join(f"{_edit_words(key, value)} ({_MEANS[key]})" for key, value in fix.items())
    return SpecError(
        f"{next(iter(fix))}: a step of this job on a small model of the same family fails: {words}",
        hint=f"{edits}: a step on the small model passes with it",
        fix=fix,
    )


def _edit_words(key: str, value: Any) -> str:
    match value:
        case None:
            return f"remove {key}"
        case bool():
            return f"{key}: {str(value).lower()}"
        case list():
            return f"{key}: [{', '.join(value)}]"
        case _:
            return f"{key}: {value}"


def edited(spec: JobSpec, fix: Fix) -> JobSpec:
    """Return the spec with the edits made."""
    document = spec.model_dump(mode="json", exclude_unset=True)
    for key, value in fix.items():
        *sections, name = key.split(".")
        section_values = document
        for section in sections:
            section_values = section_values.setdefault(section, {})
        if value is None:
            section_values.pop(name, None)
        else:
            section_values[name] = value
    return JobSpec.model_validate(document)


def _edits(spec: JobSpec, error: Exception, model_of: Callable[[], Any]) -> Iterator[Fix]:
    """Yield the edits that this job has left to try, the least costly first."""
    lora, training = spec.lora, spec.training
    if lora is not None:
        yield from _adapter_edits(lora, error, model_of)
    if hasattr(model_of().config.get_text_config(), "output_router_logits") and kind.of(spec).trains:
        yield {"training.router_aux_loss_coef": 0}
    if training.gradient_checkpointing and kind.of(spec).trains:
        if training.gradient_checkpointing_kwargs:
            yield {"training.gradient_checkpointing_kwargs": None}
        yield {"training.gradient_checkpointing": False}
    if spec.attn_implementation != "eager":
        yield {"attn_implementation": "eager"}
    if lora is not None and lora.modules_to_save:
        yield {"lora.modules_to_save": None}
    yield from ({item.key: None} for item in export.asked(spec))
    if spec.quantization != "none":
        yield {"quantization": "none"}
    if spec.dtype != "float32" and spec.quantization == "none":
        yield {"dtype": "float32"}


def _adapter_edits(lora: LoraSpec, error: Exception, model_of: Callable[[], Any]) -> Iterator[Fix]:
    if lora.lora_dropout:
        yield {"lora.lora_dropout": 0}
    if lora.init_lora_weights is not True:
        yield {"lora.init_lora_weights": None}
    if lora.use_dora:
        yield {"lora.use_dora": None}
    if lora.bias != "none":
        yield {"lora.bias": None}
    if lora.trainable_token_indices:
        yield {"lora.trainable_token_indices": None}
    for names in (_unfit(error), _routers(model_of())):
        if names:
            yield {"lora.exclude_modules": _excluded(lora, names)}


def _unfit(error: Exception) -> list[str]:
    if isinstance(error, LostNamesError):
        return error.modules
    match = _UNFIT.search(str(error))
    return sorted(re.findall(r"[\w.]+", match[1])) if match else []


def _routers(model: Any) -> list[str]:
    """Return the last names of layers of a class of their own, whose output peft may not understand."""
    import torch

    own = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and type(module) is not torch.nn.Linear
    }
    return sorted(own)


def _excluded(lora: LoraSpec, names: list[str]) -> str | list[str]:
    before = lora.exclude_modules
    if isinstance(before, str):
        return rf"({before})|(.*\.)?({'|'.join(map(re.escape, names))})"
    return list(dict.fromkeys([*(before or ()), *names]))
