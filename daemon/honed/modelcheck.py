"""The base model and the adapter that a job names: found, looked at, and whether this version trains or merges them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from honed import basemodel, installed, packing, snapshot, spec
from honed.basemodel import AdapterInfo, BaseModelInfo, UncachedError
from honed.config import Config
from honed.error import ModelError, SpecError
from honed.layout import Layout
from honed.snapshot import Missing
from honed.spec import JobSpec


def resolve(job_spec: JobSpec, layout: Layout, config: Config, jobs: Mapping[str, Path]) -> Path:
    return basemodel.resolve(
        job_spec.base_model,
        cache_dir=layout.cache_dir,
        allow_hub=config.policy.hub,
        revision=job_spec.revision,
        jobs=jobs,
    )


def inspect(job_spec: JobSpec, layout: Layout, config: Config, jobs: Mapping[str, Path]) -> BaseModelInfo:
    path = resolve(job_spec, layout, config, jobs)
    try:
        model = basemodel.inspect(path, model_type=job_spec.model_type, allow_pickle=config.policy.pickle)
    except ModelError as error:
        _check_whole(job_spec, layout, config, path, error)
        raise
    _check_trainable(job_spec, model)
    _check_model_type(job_spec, model)
    packing.check(job_spec, model)
    if job_spec.trust_remote_code and snapshot.lacks_code(layout.cache_dir, job_spec.base_model, path):
        _check_whole(job_spec, layout, config, path, None)
    return model


def _check_whole(job_spec: JobSpec, layout: Layout, config: Config, path: Path, fault: ModelError | None) -> None:
    """Raises UncachedError where what is wrong with a snapshot may be that it is torn, and a fetch may mend it."""
    if not config.policy.hub or not basemodel.is_hub_id(job_spec.base_model):
        return
    if fault is not None and snapshot.is_fetched(layout.cache_dir, job_spec.base_model, path):
        return
    missing = Missing(job_spec.base_model, job_spec.revision or "main")
    words = fault.message if fault else f"{path}: fetched without the code that comes with it"
    raise UncachedError(words, missing, hint="honed fetches what is missing")


def commit(job_spec: JobSpec, model: BaseModelInfo) -> str | None:
    """The snapshot of a hub id, whose directory has the commit's name."""
    return model.path.name if basemodel.is_hub_id(job_spec.base_model) else None


def inspect_adapter(job_spec: JobSpec, jobs: Mapping[str, Path]) -> AdapterInfo | None:
    if job_spec.adapter is None:
        return None
    name = spec.references(job_spec).get("adapter")
    return basemodel.inspect_adapter(Path(job_spec.adapter) if name is None else jobs[name])


def check_merge(job_spec: JobSpec, model: BaseModelInfo, adapter: AdapterInfo | None) -> None:
    """Whether what a merge or `save_merged` asks for can be written from these files."""
    if job_spec.kind != "merge" and job_spec.save_merged == "none":
        return
    if model.is_pickled:
        raise ModelError(f"{model.path}: an adapter is not merged into pickled weights", hint="convert them first")
    if model.speaks:
        raise ModelError(
            f"{model.path}: an adapter is not merged into a model that also speaks ({model.model_type})",
            hint="load the adapter beside the model's thinker, or leave save_merged out",
        )
    if model.is_quantized and model.quantization is None:
        raise ModelError(
            f"{model.path}: an adapter cannot be merged into weights that are stored in {model.quantization_method}",
            hint="name the unquantized checkpoint as base_model, or leave save_merged out",
        )
    kind = adapter.config.get("peft_type", "LORA") if adapter else "LORA"
    if adapter is not None and kind != "LORA":
        raise ModelError(f"{adapter.path}: a {kind} adapter; LoRA is what can be merged")
    begins = adapter.config.get("init_lora_weights") if adapter else job_spec.lora and job_spec.lora.init_lora_weights
    if isinstance(begins, str) and begins.startswith(("pissa_niter", "corda", "loftq")):
        raise SpecError(
            f"init_lora_weights: {begins} changes the base model when training begins, which a merge cannot do again",
            hint="pissa, olora, gaussian or true can be merged",
        )


def _check_model_type(job_spec: JobSpec, model: BaseModelInfo) -> None:
    """Raises SpecError for a model_type that is not config.json's: it would be obeyed, and weights that only the right
    architecture has a place for left out."""
    asked, stored = job_spec.model_type, model.config.get("model_type")
    if asked is None or not isinstance(stored, str) or stored not in installed.known_model_types()[0]:
        return
    if installed.MODEL_TYPE_ALIASES.get(asked, asked) != stored:
        raise SpecError(
            f"model_type: {asked}, but {model.path / 'config.json'} says {stored}, which transformers knows",
            hint="leave model_type out; where it is config.json that is wrong, correct it there",
        )


def _check_trainable(job_spec: JobSpec, model: BaseModelInfo) -> None:
    """Whether this version trains models of this kind: the one place for that."""
    where = model.path / "config.json"
    if not model.is_quantized and any(dtype.startswith("float8") for dtype in model.stored_dtypes):
        raise ModelError(
            f"{where}: the weights are stored in float8, and no quantization_config says how they are scaled",
            hint="take the checkpoint in bfloat16, with quantization: 4bit if memory is short",
        )
    known, writing = installed.known_model_types()
    model_type = model.model_type
    if model_type not in known:
        model_type = installed.MODEL_TYPE_ALIASES.get(model_type, model_type)
    if model_type in writing or not known:
        return
    if "auto_map" in model.config:
        _check_own_code(job_spec, model)
    elif model_type in known:
        raise ModelError(
            f"{where}: {model_type} is not a model that continues text (a causal language model)",
            hint="sft trains those: llama, qwen3, mistral, gemma2 and the like",
        )
    else:
        raise ModelError(
            f"{where}: transformers {installed.version('transformers')} does not know the model_type {model_type!r}",
            hint="if it is another name for one that it knows, say so in the job file, as in `model_type: llama`",
        )


def _check_own_code(job_spec: JobSpec, model: BaseModelInfo) -> None:
    if not job_spec.trust_remote_code:
        raise ModelError(
            f"{model.path / 'config.json'}: {model.model_type} comes with code of its own (auto_map)",
            hint="trust_remote_code: true runs it, where the administrator allows that",
        )
