"""Checks of a job's base model and adapter: they exist, are complete, and can be trained or merged by this version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from honed.inputs import basemodel
from honed.inputs.basemodel import AdapterInfo, BaseModelInfo, UncachedError
from honed.plan import packing
from honed.run import snapshot
from honed.run.snapshot import Missing
from honed.spec import spec
from honed.spec.config import Config
from honed.spec.spec import JobSpec
from honed.system import installed, quote
from honed.system.error import ModelError, SpecError
from honed.system.layout import Layout

#: Encoder families, which generate text only if config.json has `is_decoder: true`; transformers maps them to causal
#: language models, too.
ENCODERS = frozenset(
    {
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "reformer",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
#: Encoder-decoder families, whose models' config.json has `is_encoder_decoder`.
ENCODER_DECODERS = frozenset(
    {
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "marian",
        "mbart",
        "mvp",
        "pegasus",
        "plbart",
        "prophetnet",
        "whisper",
    }
)
#: Classes with another head than one for text generation, and their purpose.
_OTHER_HEADS = {
    "fills in masked words": re.compile(r"For(MaskedLM|PreTraining|NextSentencePrediction)$"),
    "classifies": re.compile(
        r"For\w*(Classification|QuestionAnswering|MultipleChoice|Detection|Segmentation)$|Classifier$"
    ),
    "scores answers": re.compile(r"(For)?\w*Reward(Model|Modeling)?$|ForScore$"),
    "makes embeddings": re.compile(r"ForTextEncoding$|EmbeddingModel$|ForEmbedding$|ForRetrieval$"),
    "writes down speech": re.compile(r"ForCTC$"),
    "writes by diffusion": re.compile(r"For\w*Diffusion$"),
}


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
    _check_trainable(job_spec, model, config)
    _check_model_type(job_spec, model)
    packing.check(job_spec, model)
    if job_spec.trust_remote_code and snapshot.lacks_code(layout.cache_dir, job_spec.base_model, path):
        _check_whole(job_spec, layout, config, path, None)
    return model


def _check_whole(job_spec: JobSpec, layout: Layout, config: Config, path: Path, fault: ModelError | None) -> None:
    """Raise UncachedError if a snapshot's fault may be that it is incomplete, so that a fetch may repair it."""
    if not config.policy.hub or not basemodel.is_hub_id(job_spec.base_model):
        return
    if fault is not None and snapshot.is_fetched(layout.cache_dir, job_spec.base_model, path):
        return
    missing = Missing(job_spec.base_model, job_spec.revision or "main")
    words = fault.said if fault else f"{path}: fetched without the code that comes with it"
    raise UncachedError(words, missing, hint="honed fetches what is missing")


def commit(job_spec: JobSpec, model: BaseModelInfo) -> str | None:
    """Return the commit of a hub id's snapshot, which is its directory's name; None for a local path."""
    return model.path.name if basemodel.is_hub_id(job_spec.base_model) else None


def inspect_adapter(job_spec: JobSpec, jobs: Mapping[str, Path]) -> AdapterInfo | None:
    if job_spec.adapter is None:
        return None
    name = spec.references(job_spec).get("adapter")
    return basemodel.inspect_adapter(Path(job_spec.adapter) if name is None else jobs[name])


def warnings(model: BaseModelInfo) -> list[str]:
    """Return warnings about a base model that can be trained, but may be a mistake."""
    if (model.path / "config_sentence_transformers.json").exists():
        return [
            f"base_model: {model.path} is a model for embeddings (config_sentence_transformers.json): sft trains it to "
            "write text"
        ]
    return []


def check_merge(job_spec: JobSpec, model: BaseModelInfo, adapter: AdapterInfo | None) -> None:
    """Check that the merge, or `save_merged`, can be done with these files. Raises ModelError or SpecError."""
    if job_spec.kind != "merge" and job_spec.save_merged == "none":
        return
    if model.is_pickled:
        raise ModelError(
            f"{model.path}: an adapter is not merged into pickled weights",
            hint="convert them first, or leave save_merged out",
            fix=_unmerged(job_spec),
        )
    if model.speaks:
        raise ModelError(
            f"{model.path}: an adapter is not merged into a model that also speaks ({model.model_type})",
            hint="load the adapter beside the model's thinker, or leave save_merged out",
            fix=_unmerged(job_spec),
        )
    if model.is_quantized and model.quantization is None:
        raise ModelError(
            f"{model.path}: an adapter cannot be merged into weights that are stored in {model.quantization_method}",
            hint="name the unquantized checkpoint as base_model, or leave save_merged out",
            fix=_unmerged(job_spec),
        )
    begins = adapter.config.get("init_lora_weights") if adapter else job_spec.lora and job_spec.lora.init_lora_weights
    if isinstance(begins, str) and begins.startswith(("pissa_niter", "corda", "loftq")):
        raise SpecError(
            f"init_lora_weights: {begins} changes the base model when training begins, which a merge cannot do again",
            hint="pissa, olora, gaussian or true can be merged; or leave save_merged out",
            fix=_unmerged(job_spec),
        )


def _unmerged(job_spec: JobSpec) -> dict[str, Any]:
    """Return the fix that trains without the merged checkpoint; none for a job of kind merge."""
    return {} if job_spec.kind == "merge" else {"save_merged": None}


def _check_model_type(job_spec: JobSpec, model: BaseModelInfo) -> None:
    """Raise SpecError for a model_type that differs from config.json's: it would be obeyed, and weights that only the
    right architecture has a place for would be left out."""
    asked, stored = job_spec.model_type, model.config.get("model_type")
    if asked is None or not isinstance(stored, str) or stored not in installed.known_model_types()[0]:
        return
    if installed.MODEL_TYPE_ALIASES.get(asked, asked) != stored:
        raise SpecError(
            f"model_type: {quote.name(asked)}, but {model.path / 'config.json'} says {stored}, which transformers "
            "knows",
            hint="leave model_type out; where it is config.json that is wrong, correct it there",
            fix={"model_type": None},
        )


def _check_trainable(job_spec: JobSpec, model: BaseModelInfo, config: Config) -> None:
    """Check that this version trains models of this kind; no other place decides that. Raises ModelError."""
    where = model.path / "config.json"
    if not model.is_quantized and any(dtype.startswith("float8") for dtype in model.stored_dtypes):
        raise ModelError(
            f"{where}: the weights are stored in float8, and no quantization_config says how they are scaled",
            hint="take the checkpoint in bfloat16, with quantization: 4bit if memory is short",
        )
    _check_writes(model)
    known, writing = installed.known_model_types()
    model_type = model.model_type
    if model_type not in known:
        model_type = installed.MODEL_TYPE_ALIASES.get(model_type, model_type)
    if model_type in writing or not known:
        return
    if "auto_map" in model.config:
        _check_own_code(job_spec, model, config)
    elif model_type in known:
        raise ModelError(
            f"{where}: {model_type} is not a model that continues text (a causal language model)",
            hint="sft trains those: llama, qwen3, mistral, gemma2 and the like",
        )
    else:
        raise ModelError(
            f"{where}: transformers {installed.version('transformers')} does not know the model_type "
            f"{quote.name(model_type)}",
            hint="if it is another name for one that it knows, say so in the job file, as in `model_type: llama`",
        )


def _check_writes(model: BaseModelInfo) -> None:
    """Raise ModelError for a model that does not continue text, though transformers would load it as one that does: a
    bidirectional model learns to copy the next token."""
    where, hint = model.path / "config.json", "sft trains causal language models: llama, qwen3, mistral and the like"
    if "AutoModelForCausalLM" in (model.config.get("auto_map") or {}):
        return
    for what, classes in _OTHER_HEADS.items():
        if model.architectures and all(map(classes.search, model.architectures)):
            raise ModelError(
                f"{where}: {quote.name(model.architectures[0])} is a model that {what}, not one that continues text",
                hint=hint,
            )
    if model.model_type in ENCODERS and model.config.get("is_decoder") is not True:
        raise ModelError(
            f"{where}: {model.model_type} is an encoder: it reads in both directions, and does not continue text",
            hint=hint,
        )
    is_both = model.config.get("is_encoder_decoder", model.model_type in ENCODER_DECODERS)
    if is_both is True and not any(name.endswith("ForCausalLM") for name in model.architectures):
        raise ModelError(
            f"{where}: {model.model_type} is an encoder with a decoder, from text to text (is_encoder_decoder): "
            "that is not supported",
            hint=hint,
        )


def _check_own_code(job_spec: JobSpec, model: BaseModelInfo, config: Config) -> None:
    is_allowed = config.policy.trust_remote_code
    if not job_spec.trust_remote_code:
        raise ModelError(
            f"{model.path / 'config.json'}: {quote.name(model.model_type)} comes with code of its own (auto_map)",
            hint="trust_remote_code: true runs it"
            if is_allowed
            else "it may not run here unless the administrator sets policy.trust_remote_code in honed.toml",
            fix={"trust_remote_code": True} if is_allowed else {},
        )
