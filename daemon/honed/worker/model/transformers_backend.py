"""Loading with transformers, bitsandbytes and peft alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from honed.inputs import modality, unused_weights
from honed.inputs.basemodel import QUANTIZATION_STATE, read_names
from honed.job.plan_file import Precision
from honed.plan.precision import PART_KEYS, trained_parts
from honed.spec.media import Part
from honed.system.error import ModelError
from honed.worker.assignment import Assignment
from honed.worker.model import adapter as adapters
from honed.worker.model import placing, ties, token_rows
from honed.worker.model.config import load_config, model_class


class TransformersBackend:
    """The backend that works everywhere."""

    name = "transformers"

    def __init__(self) -> None:
        self.messages: list[str] = []

    def import_libraries(self) -> None:
        import transformers  # noqa: F401

    def load_base(self, assignment: Assignment) -> Any:
        return load_base(assignment, load_config(assignment), report=self.messages.append)

    def attach_adapter(self, model: Any, assignment: Assignment) -> Any:
        model = attach_adapter(model, assignment)
        self.messages += placing.remarks(model, assignment)
        return model

    def make_room(self, model: Any, num_tokens: int) -> None:
        """Do nothing: this backend truncates no rows."""

    def building(self) -> AbstractContextManager[None]:
        return nullcontext()


def load_base(assignment: Assignment, config: Any, *, report: Callable[[str], None] = lambda _text: None) -> Any:
    """Load the base model as planned. `report` gets a message about stored weights that the model has no place for."""
    import torch

    precision = assignment.precision
    config = getattr(config, "thinker_config", config)  # of one that also speaks, the part that it trains
    options: dict[str, Any] = {}
    is_divided = assignment.plan.parallel.mode == "fsdp"
    empty = check_complete(assignment, config)
    own = getattr(config, "quantization_config", None)
    if not own:
        options["quantization_config"] = quantization_config(precision, empty, is_divided=is_divided)
    elif isinstance(own, dict) and precision.compute_dtype is not None:
        own["bnb_4bit_compute_dtype"] = precision.compute_dtype  # the stored dtype is that of another machine
    if assignment.spec.adapter:
        adapters.check_fits(empty, Path(assignment.spec.adapter))
    # A divided model reaches the device layer by layer. A 4-bit one is quantized there, and fits whole.
    if torch.cuda.is_available() and (not is_divided or precision.quantization != "none"):
        options["device_map"] = {"": int(os.environ.get("LOCAL_RANK", "0"))}
    if not assignment.plan.checkpoint.is_pickled:
        options["use_safetensors"] = True  # no pickle that appeared after the check
    try:
        model, info = model_class(config).from_pretrained(
            assignment.base_model_path,
            config=config,
            dtype=getattr(torch, precision.load_dtype),
            attn_implementation=precision.attn_implementation,
            trust_remote_code=assignment.spec.trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except RuntimeError as error:
        if "conversion" in str(error):  # of experts that cannot be fused, say: transformers names only what they make
            _check_published(assignment, check_complete(assignment, config))
        raise
    if missing := sorted(info["missing_keys"]):
        raise incomplete(assignment, missing)
    if words := unused_weights.check(assignment.base_model_path, info["unexpected_keys"], model.state_dict()):
        report(words)
    keep_trainable_layout(model)
    return model


def check_complete(assignment: Assignment, config: Any) -> Any:
    """Build the model without weights, and compare its names with the stored ones before any weight is read.

    Raises ModelError for weights that no file names, and for stored ones that the model should have a place for.
    Compares only where every stored name, or every one of the model's, is also the other's: weights under other names
    are checked when they are loaded.
    """
    import torch

    with torch.device("meta"):
        model = model_class(config).from_config(config, trust_remote_code=assignment.spec.trust_remote_code)
    wanted = set(model.state_dict())
    stored = {name for name in read_names(assignment.base_model_path) if not QUANTIZATION_STATE.search(name)}
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    missing = sorted(
        name
        for name in wanted - stored - set(getattr(model, "all_tied_weights_keys", None) or ())
        if not any(re.search(pattern, name) for pattern in ignored)
    )
    if missing and stored and stored <= wanted:
        raise incomplete(assignment, missing)
    if not missing:
        unused_weights.check(assignment.base_model_path, unplaced(model, stored), wanted)
    return model


def _check_published(assignment: Assignment, empty: Any) -> None:
    """Compare the names under which a model without weights is published with the stored ones. Raises ModelError."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    path, prefix = assignment.base_model_path, f"{empty.base_model_prefix}."
    stored = {name for name in read_names(path) if not QUANTIZATION_STATE.search(name)}
    with torch.no_grad():
        wanted = revert_weight_conversion(empty, dict(empty.named_parameters()))
    if missing := sorted(name for name in wanted if not {name, prefix + name, name.removeprefix(prefix)} & stored):
        raise incomplete(assignment, missing)
    unused_weights.check(path, stored - set(wanted), wanted)


def unplaced(model: Any, stored: Iterable[str]) -> set[str]:
    """Return the stored names that are not among the model's, except those that its class declares to ignore."""
    names = {name for name in stored if not QUANTIZATION_STATE.search(name)} - set(model.state_dict())
    return {name for name in names if not adapters.is_passed_over(model, name)}


def incomplete(assignment: Assignment, missing: list[str]) -> ModelError:
    """Return the error for missing weights; transformers would only log a warning and train on random numbers."""
    return ModelError(
        f"{assignment.base_model_path}: no weights for {', '.join(missing[:5])}{' …' if missing[5:] else ''}",
        hint="the checkpoint is incomplete, or has another architecture than its config.json",
    )


def quantization_config(precision: Precision, model: Any = None, *, is_divided: bool = False) -> Any:
    """Return bitsandbytes' config as planned, or None.

    A weight that is to be divided is packed into numbers of the other weights' dtype: FSDP2 cannot divide bytes.

    Vision and audio encoders and projectors are not quantized: they are a small part of the weights, and no adapter of
    the language model makes up for their loss. `model` shows which modules they are; it may be on meta.
    """
    import torch
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.base import get_keys_to_not_convert

    left_out = [] if model is None else [re.escape(name) for name, kind in roots(model).items() if kind != "language"]
    # Naming any module replaces transformers' own choice, the head.
    skipped = [*left_out, *get_keys_to_not_convert(model)] if left_out else None
    match precision.quantization:
        case "4bit":
            return BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=getattr(torch, precision.compute_dtype or precision.load_dtype),
                llm_int8_skip_modules=skipped,
                **({"bnb_4bit_quant_storage": getattr(torch, precision.load_dtype)} if is_divided else {}),
            )
        case "8bit":
            return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
        case _:
            return None


def roots(model: Any) -> dict[str, Part]:
    """Return the topmost module of every part, `""` for the whole; a projector may lie within its encoder."""
    parts = {name: modality.part(name) for name, _ in model.named_modules() if name}
    tops = {name: part for name, part in parts.items() if part != modality.part(name.rpartition(".")[0])}
    return {"": "language", **tops}


def quantized_senses(model: Any) -> list[str]:
    """Return the names of encoder and projector parameters that bitsandbytes has quantized."""
    return [
        name
        for name, parameter in model.named_parameters()
        if type(parameter).__name__ in ("Params4bit", "Int8Params") and modality.part(name) != "language"
    ]


def keep_trainable_layout(model: Any) -> None:
    """Keep 4-bit weights in the layout that backward needs.

    On a CPU with AVX512-BF16, bitsandbytes 0.50 repacks a Linear4bit in place at its first forward in eval mode, and
    never back; backward through the packed weight is wrong. The predictions at step 0 are such a forward.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def attach_adapter(model: Any, assignment: Assignment) -> Any:
    """Wrap the model in a new LoRA adapter, or in the one to continue from; full fine-tuning gets its model back.

    peft's prepare_model_for_kbit_training is not used: it would cast every norm, embedding and head of a quantized
    model to float32, against the plan. get_peft_model and SFTTrainer do its other work, freezing and input gradients.
    """
    spec = assignment.spec
    if not spec.adapter and spec.lora is None:
        return model
    import peft

    if spec.adapter:
        model = peft.PeftModel.from_pretrained(model, spec.adapter, is_trainable=True)
        adapters.load(model, Path(spec.adapter))  # again: peft's own load reports nothing
    elif spec.lora is not None:
        check_parts(model, assignment)
        options = _in_layers(model, placing.resolved(model, spec.lora, lora_options(model, assignment)))
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
        check_adapted(model, assignment)
        placing.check(model, assignment)
    ties.check(model, assignment)
    token_rows.check(model, is_new=not spec.adapter)
    cast_trainable(model, assignment.precision)
    spare_frozen(model)
    return model


def spare_frozen(model: Any) -> None:
    """Avoid gradients for vision and audio encoders in which nothing is trained.

    For gradient checkpointing, transformers makes the first embedding of every part require gradients
    (enable_input_require_grads). A frozen encoder would keep its activations, run twice, and take part in the backward
    pass for nothing. transformers skips parts that have no embedding.
    """
    for name, module in model.named_modules():
        is_frozen = not any(parameter.requires_grad for parameter in module.parameters())
        if is_frozen and modality.part(name) != "language" and hasattr(module, "get_input_embeddings"):
            module.get_input_embeddings = lambda: None


def lora_options(model: Any, assignment: Assignment) -> dict[str, Any]:
    """Return the arguments of peft's LoraConfig from the spec, with the parts excluded that the job does not train."""
    lora = assignment.spec.lora
    assert lora is not None
    options = lora.model_dump(exclude_unset=False, exclude_none=True, exclude=set(PART_KEYS.values()))
    ours = _untrained(model, trained_parts(assignment.spec))
    if ours:
        excluded = options.get("exclude_modules") or []
        if not isinstance(excluded, str):
            excluded = rf"(.*\.)?({'|'.join(map(re.escape, excluded))})" if excluded else ""
        options["exclude_modules"] = f"({excluded})|({ours})" if excluded else ours
    return options


def _in_layers(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a list of target modules where layers are chosen by pattern, as peft requires."""
    layers, wanted = options.get("layers_to_transform"), options.get("target_modules")
    if not layers or not isinstance(wanted, str):
        return options
    head = model.get_output_embeddings()
    names = [name for name in _linear_names(model) if model.get_submodule(name) is not head or wanted != "all-linear"]
    chosen = [
        name
        for name in names
        if (layer := re.search(r"\.(\d+)\.", name))
        and int(layer[1]) in layers
        and (wanted == "all-linear" or re.fullmatch(wanted, name))
    ]
    return {**options, "target_modules": chosen, "layers_to_transform": None}


def _untrained(model: Any, wanted: frozenset[Part]) -> str:
    """Return a regular expression for the names of all modules in parts without an adapter; empty if there are none.

    Parts lie within each other, so each is taken without those below it.
    """
    kinds = roots(model)
    patterns = []
    for root, kind in kinds.items():
        if kind in wanted:
            continue
        prefix = f"{root}." if root else ""
        inner = [re.escape(name.removeprefix(prefix)) for name in kinds if name != root and name.startswith(prefix)]
        below = rf"(?!({'|'.join(inner)})(\.|$))" if inner else ""
        patterns.append(rf"{re.escape(root)}(\.{below}.*)?" if root else rf"{below}.+")
    return "|".join(patterns)


def target_pattern(model: Any, options: dict[str, Any]) -> str:
    """Return the layers that peft would choose for these options, as one regular expression for their whole names."""
    wanted, excluded = options["target_modules"], options.get("exclude_modules", "")
    head = model.get_output_embeddings()
    heads = {name for name, module in model.named_modules() if module is head}
    names = [name for name in _linear_names(model) if not (excluded and re.fullmatch(excluded, name))]
    if wanted == "all-linear":
        names = [name for name in names if name not in heads]
    else:
        names = [name for name in names if any(name == item or name.endswith(f".{item}") for item in wanted)]
    return "|".join(sorted({re.sub(r"(?<=\.)\d+(?=\\\.)", r"\\d+", re.escape(name)) for name in names}))


def check_parts(model: Any, assignment: Assignment) -> None:
    """Raise ModelError if the job trains a part that the model lacks, or one that has no layers for an adapter.

    The error is also raised where modules_to_save names a module that does not exist: peft does not report that.
    """
    lora = assignment.spec.lora
    every = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for name in (lora and lora.modules_to_save) or ():
        if not any(module.endswith(name) for module in every):
            outer = sorted(
                {module.rpartition(".")[2] for module in every if not re.search(r"\.\d+(\.|$)", module)} - {""}
            )
            raise ModelError(
                f"lora.modules_to_save: {assignment.base_model_path} has no module {name!r} after loading",
                hint=f"outside its layers it has {', '.join(outer)}",
            )
    there = {modality.part(name) for name in _linear_names(model)}
    for kind in sorted(trained_parts(assignment.spec) - there):
        names = [name for name, part in roots(model).items() if part == kind]
        hint = f"lora.{PART_KEYS[kind]}: false"
        if not names:
            raise ModelError(f"lora.{PART_KEYS[kind]}: {assignment.base_model_path} has no such part", hint=hint)
        raise ModelError(
            f"lora.{PART_KEYS[kind]}: {names[0]} of this model has no linear layer for an adapter",
            hint=f"{hint}, with lora.modules_to_save: [{names[0].rpartition('.')[2]}], which trains it in full",
        )


def check_adapted(model: Any, assignment: Assignment) -> None:
    """Raise ModelError if no module got an adapter in a part that the job trains.

    Families choose their own names for an encoder's layers: a list that fits the language model may miss them all.
    """
    reached = {modality.part(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    for kind in sorted(trained_parts(assignment.spec) - reached):
        names = sorted({name.rpartition(".")[2] for name in _linear_names(model) if modality.part(name) == kind})
        raise ModelError(
            f"lora.{PART_KEYS[kind]}: target_modules contains no layer of that part of the model: {', '.join(names)}",
            hint=f"set target_modules to all-linear, or add some of them, or {PART_KEYS[kind]}: false",
        )


def _linear_names(model: Any) -> list[str]:
    """Return the names of layers that an adapter can stand beside, including GPT-2's Conv1D."""
    import torch
    from transformers.pytorch_utils import Conv1D

    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    return [name.removesuffix(".base_layer") for name in linear if ".lora_" not in name]


def cast_trainable(model: Any, precision: Precision) -> list[str]:
    """Cast every trainable parameter to the planned dtype, in place; return the names of those that had another."""
    import torch

    if precision.adapter_dtype is None:
        return []
    dtype = getattr(torch, precision.adapter_dtype)
    wrong = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.dtype != dtype
    ]
    parameters = dict(model.named_parameters())
    for name in wrong:
        parameters[name].data = parameters[name].data.to(dtype)
    return wrong
