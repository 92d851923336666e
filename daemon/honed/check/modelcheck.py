"""Checks of a job's base model and adapter: they exist, are complete, and can be trained or merged by this version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from honed.inputs import basemodel
from honed.inputs.basemodel import AdapterInfo, BaseModelInfo, UncachedError
from honed.plan import packing
from honed.run import snapshot
from honed.run.snapshot import Missing
from honed.spec import export, kind, spec
from honed.spec.config import Config
from honed.spec.spec import JobSpec
from honed.system import installed, quote
from honed.system.error import Fix, ModelError, SpecError
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
#: Classes whose head is not for text generation, and their purpose.
_OTHER_HEADS = {
    "predicts masked words": re.compile(r"For(MaskedLM|PreTraining|NextSentencePrediction)$"),
    "classifies": re.compile(
        r"For\w*(Classification|QuestionAnswering|MultipleChoice|Detection|Segmentation)$|Classifier$"
    ),
    "scores text": re.compile(r"(For)?\w*Reward(Model|Modeling)?$|ForScore$"),
    "computes embeddings": re.compile(r"ForTextEncoding$|EmbeddingModel$|ForEmbedding$|ForRetrieval$"),
    "transcribes speech": re.compile(r"ForCTC$"),
    "generates text by diffusion": re.compile(r"For\w*Diffusion$"),
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
    if model.lacks_processor:
        _check_whole(job_spec, layout, config, path, ModelError(f"{path}: it has {basemodel.NO_PROCESSOR}"))
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
    words = fault.said if fault else f"{path}: the cached copy lacks the model's own code"
    raise UncachedError(words, missing, hint="honed fetches the missing files")


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
            f"base_model: {model.path} is an embedding model (config_sentence_transformers.json); sft will train it "
            "to generate text"
        ]
    return []


def check_merge(job_spec: JobSpec, model: BaseModelInfo, adapter: AdapterInfo | None) -> None:
    """Check that the merge, or that of an export, can be done with these files. Raises ModelError or SpecError."""
    if not kind.of(job_spec).merges and not any(item.adapter_reason for item in export.asked(job_spec)):
        return
    if model.is_pickled:
        raise ModelError(
            f"{model.path}: merging an adapter into pickled weights is not supported",
            hint="convert them to safetensors first, or remove save_merged",
            fix=_unmerged(job_spec),
        )
    if model.speaks:
        raise ModelError(
            f"{model.path}: merging an adapter into a model with speech output is not supported ({model.model_type})",
            hint="use the adapter with the model's thinker, or remove save_merged",
            fix=_unmerged(job_spec),
        )
    if model.is_quantized and model.quantization is None:
        raise ModelError(
            f"{model.path}: an adapter cannot be merged into weights stored in {model.quantization_method}",
            hint="use the unquantized checkpoint as base_model, or remove save_merged",
            fix=_unmerged(job_spec),
        )
    begins = adapter.config.get("init_lora_weights") if adapter else job_spec.lora and job_spec.lora.init_lora_weights
    if isinstance(begins, str) and begins.startswith(("pissa_niter", "corda", "loftq")):
        raise SpecError(
            f"init_lora_weights: {begins} changes the base model at the start of training, which a merge cannot "
            "reproduce",
            hint="use pissa, olora, gaussian or true, which can be merged; or remove save_merged",
            fix=_unmerged(job_spec),
        )


def _unmerged(job_spec: JobSpec) -> Fix:
    return {item.key: None for item in export.asked(job_spec) if item.adapter_reason}


def _check_model_type(job_spec: JobSpec, model: BaseModelInfo) -> None:
    """Raise SpecError for a model_type that differs from config.json's: it would be obeyed, and weights that only the
    right architecture has a place for would be left out."""
    asked, stored = job_spec.model_type, model.config.get("model_type")
    if asked is None or not isinstance(stored, str) or stored not in installed.known_model_types()[0]:
        return
    if installed.MODEL_TYPE_ALIASES.get(asked, asked) != stored:
        raise SpecError(
            f"model_type: {quote.name(asked)}, but {model.path / 'config.json'} says {stored}, which transformers "
            "supports",
            hint="remove model_type; if config.json is wrong, correct it there",
            fix={"model_type": None},
        )


def _check_trainable(job_spec: JobSpec, model: BaseModelInfo, config: Config) -> None:
    """Check that this version trains models of this kind; no other place decides that. Raises ModelError."""
    where = model.path / "config.json"
    if not model.is_quantized and any(dtype.startswith("float8") for dtype in model.stored_dtypes):
        raise ModelError(
            f"{where}: the weights are stored in float8, but there is no quantization_config with their scales",
            hint="use the bfloat16 checkpoint, with quantization: 4bit if memory is short",
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
            f"{where}: {model_type} is not a causal language model",
            hint="sft trains causal language models, such as llama, qwen3, mistral or gemma2",
        )
    else:
        raise ModelError(
            f"{where}: transformers {installed.version('transformers')} does not know the model_type "
            f"{quote.name(model_type)}",
            hint="if it is an alias of a supported type, set that type in the job file, such as `model_type: llama`",
        )


def _check_writes(model: BaseModelInfo) -> None:
    """Raise ModelError for a model that does not continue text, though transformers would load it as one that does: a
    bidirectional model learns to copy the next token."""
    where, hint = model.path / "config.json", "sft trains causal language models, such as llama, qwen3 or mistral"
    if "AutoModelForCausalLM" in (model.config.get("auto_map") or {}):
        return
    for what, classes in _OTHER_HEADS.items():
        if model.architectures and all(map(classes.search, model.architectures)):
            raise ModelError(
                f"{where}: {quote.name(model.architectures[0])} {what}; it is not a causal language model",
                hint=hint,
            )
    if model.model_type in ENCODERS and model.config.get("is_decoder") is not True:
        raise ModelError(
            f"{where}: {model.model_type} is a bidirectional encoder, not a causal language model",
            hint=hint,
        )
    is_both = model.config.get("is_encoder_decoder", model.model_type in ENCODER_DECODERS)
    if is_both is True and not any(name.endswith("ForCausalLM") for name in model.architectures):
        raise ModelError(
            f"{where}: {model.model_type} is an encoder-decoder model (is_encoder_decoder), which is not supported",
            hint=hint,
        )


def _check_own_code(job_spec: JobSpec, model: BaseModelInfo, config: Config) -> None:
    is_allowed = config.policy.trust_remote_code
    if not job_spec.trust_remote_code:
        raise ModelError(
            f"{model.path / 'config.json'}: {quote.name(model.model_type)} needs the model's own code (auto_map)",
            hint="set trust_remote_code: true to run it"
            if is_allowed
            else "running it must be allowed by the administrator: policy.trust_remote_code in honed.toml",
            fix={"trust_remote_code": True} if is_allowed else {},
        )
