"""The tools whose settings `honectl convert` reads, and the keys that distinguish them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from honed.spec.problem import Problem
from honed.system import manual

#: The tools with settings in YAML or JSON, with keys that only their files have.
TOOLS: Mapping[str, tuple[str, ...]] = {
    "axolotl": (
        *("base_model", "sequence_len", "micro_batch_size", "num_epochs", "val_set_size", "sample_packing", "adapter"),
        *("lora_target_linear", "dataset_prepared_path", "tokenizer_type", "evals_per_epoch", "strict"),
    ),
    "llamafactory": (
        *("stage", "finetuning_type", "cutoff_len", "template", "dataset", "dataset_dir", "lora_rank", "lora_target"),
        *("plot_loss", "overwrite_cache", "preprocessing_num_workers", "val_size", "quantization_bit"),
    ),
    "trl": (
        *("dataset_name", "use_peft", "dataset_train_split", "dataset_test_split", "dataset_config", "max_length"),
        *("lora_target_modules", "assistant_only_loss", "completion_only_loss", "attn_implementation", "dtype"),
    ),
    "openai": ("training_file", "validation_file", "method", "hyperparameters", "suffix", "integrations", "metadata"),
}
#: Unknown keys from which on a job file is probably another tool's.
MANY_UNKNOWN = 5


def of(data: Mapping[str, Any]) -> str | None:
    """Tell whose settings these are by their keys; None if that is not clear."""
    scores = {name: sum(key in data for key in keys) for name, keys in TOOLS.items()}
    if "training_file" in data:
        return "openai"
    if "model_name_or_path" in data:
        scores["axolotl"] = 0
    else:
        scores["trl"] = 0
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] >= (1 if "model_name_or_path" in data else 2) else None


def hint(data: Mapping[str, Any], problems: Sequence[Problem]) -> str:
    """Return the hint for a job file with these problems, which may be another tool's."""
    num_unknown = sum(problem.message.startswith("unknown key") for problem in problems)
    if num_unknown >= MANY_UNKNOWN and (tool := of(data)) is not None:
        return f"these look like settings of {tool}: `honectl convert FILE` makes a job file of them"
    return manual.all_keys("honed-job.5")
