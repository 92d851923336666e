"""Models that leak one row into the next where rows are packed into one sequence, or a batch is flattened into one.

Packed rows are kept apart by their positions alone, from which attention makes its mask. This fails where a layer hands
a state on from token to token, and where a model makes its mask without the positions. TRL warns, whatever the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from honed.inputs.basemodel import BaseModelInfo
from honed.spec.spec import JobSpec
from honed.system import installed
from honed.system.error import SpecError

#: Families with layers that hand a state on: those transformers calls stateful, short convolutions, and MiniMax's
#: linear attention.
RECURRENT = frozenset(
    {
        "bamba",
        "deepseek_v4",
        "falcon_h1",
        "falcon_mamba",
        "glm5_next",
        "granitemoehybrid",
        "inkling_text",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm2_vl",
        "mamba",
        "mamba2",
        "minicpmv4_6",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
        "zaya",
    }
)
#: Families whose attention mask ignores positions: in transformers 5.17 a change to the first of two packed rows
#: changes the output for the second. Among them are those that count positions in three axes for images.
UNMASKED = frozenset(
    {
        "afmoe",
        "bart",
        "bert",
        "bert-generation",
        "big_bird",
        "bigbird_pegasus",
        "biogpt",
        "blenderbot",
        "blenderbot-small",
        "bloom",
        "camembert",
        "cpmant",
        "data2vec-text",
        "electra",
        "ernie",
        "ernie4_5_vl_moe",
        "falcon",
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "glmga",
        "gpt_oss",
        "hunyuan_vl",
        "marian",
        "mbart",
        "megatron-bert",
        "moshi",
        "mpt",
        "mvp",
        "openai-gpt",
        "opt",
        "paddleocr_vl",
        "pegasus",
        "qwen2_5_omni",
        "qwen2_5_omni_thinker",
        "qwen2_5_vl",
        "qwen2_vl",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "trocr",
        "xglm",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
    }
)

#: Config keys that list the kinds of layers, and a pattern of the kinds that hand a state on.
_LAYER_KEYS = ("layer_types", "layers_block_type", "block_types")
_STATE = re.compile(r"mamba|linear|conv|recurr|ssm|rwkv|delta|hybrid")


def check(job_spec: JobSpec, model: BaseModelInfo) -> None:
    """Raise SpecError if the job packs rows and the model would let them see each other."""
    training = job_spec.training
    # Wrapped rows are concatenated, and cut where a sequence is full: they see each other in every model, as requested.
    asked = () if training.packing_strategy == "wrapped" else ("packing", "eval_packing")
    key = next((key for key in (*asked, "padding_free") if getattr(training, key)), None)
    if key is None or (why := leak(model.model_type, model.config)) is None:
        return
    raise SpecError(
        f"training.{key}: {model.path}: {why}: each row would be trained as if the rows before it were part of it",
        hint=f"remove {key}; train_sampling_strategy: group_by_length also saves most of the padding",
        fix={f"training.{key}": None},
    )


def leak(model_type: str, config: Mapping[str, Any]) -> str | None:
    """Return how packed rows reach each other in such a model; None where they do not, or the config does not say."""
    types = [installed.MODEL_TYPE_ALIASES.get(kind, kind) for kind in (model_type, *_nested_types(config))]
    if culprit := next((kind for kind in types if kind in RECURRENT), None):
        return f"{culprit} has layers that carry state from token to token"
    if culprit := next((kind for kind in types if kind in UNMASKED), None):
        return f"{culprit}'s attention does not use positions to separate packed rows"
    if culprit := next((kind for kind in _layer_kinds(config) if _STATE.search(kind)), None):
        return f"config.json lists layers that carry state from token to token ({culprit})"
    return None


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for key in ("thinker_config", "text_config", "llm_config"):
        if isinstance(inner := config.get(key), dict):
            yield from _sections(inner)


def _nested_types(config: Mapping[str, Any]) -> list[str]:
    return [model_type for section in _sections(config) if isinstance(model_type := section.get("model_type"), str)]


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    values = [section.get(key) for section in _sections(config) for key in _LAYER_KEYS]
    return sorted({str(kind) for kinds in values if isinstance(kinds, list) for kind in kinds})
