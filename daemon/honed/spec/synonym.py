"""Other tools' names for our keys: former names in transformers and trl, and those of axolotl, LLaMA-Factory, Unsloth,
ms-swift, torchtune, AutoTrain, TRL's command line and OpenAI. One table serves every level of a spec; the advice for a
name depends on its value (advice.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from honed.spec.advice import (
    Advice,
    Asked,
    Synonym,
    Unsaid,
    by,
    drop,
    flag,
    hinted,
    is_data_file,
    is_off,
    is_on,
    negated,
    never,
    one_of,
    settings,
    switch,
    take,
    trains_adapter,
)
from honed.spec.problem import rewritten, shown
from honed.system import quote
from honed.system.error import Fix


def _all(synonym: Synonym, *names: str) -> dict[str, Synonym]:
    return dict.fromkeys(names, synonym)


#: Optimizers that other tools name differently.
OPTIMIZERS = {
    "adamw_hf": "adamw_torch",
    "adamw": "adamw_torch",
    "adam": "adamw_torch",
    "adamw_apex_fused": "adamw_torch_fused",
    "adamw_8bit_bnb": "adamw_bnb_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "paged_lion": "paged_lion_32bit",
    "lion": "lion_32bit",
    "ao_adamw_8bit": "adamw_torch_8bit",
    "ao_adamw_4bit": "adamw_torch_4bit",
    "torch.optim.adamw": "adamw_torch",
    "torch.optim.sgd": "sgd",
    "bitsandbytes.optim.adamw8bit": "adamw_bnb_8bit",
    "bitsandbytes.optim.pagedadamw8bit": "paged_adamw_8bit",
    "adamw_8bit": "adamw_8bit",
}


# --- Conversions ------------------------------------------------------------------------------------------------------

_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat", "torch.bfloat16", "bfloat16", "bf16_mixed"), "bfloat16"),
    **dict.fromkeys(("fp16", "half", "f16", "torch.float16", "float16"), "float16"),
    **dict.fromkeys(("fp32", "float", "f32", "torch.float32", "float32"), "float32"),
    **dict.fromkeys(("auto", "no"), "auto"),
}


def _dtype(value: Any) -> Any:
    if str(value).lower().startswith(("fp8", "float8", "mxfp", "nvfp")):
        raise Unsaid(f"training in {shown(value)} is not supported yet: remove it")
    return one_of(_DTYPES, "dtype")(value)


def _half(dtype: str) -> Synonym:
    """Advise for `bf16: true`: set dtype for adapters; full fine-tuning keeps float32 weights, as transformers does."""

    def advise(asked: Asked) -> Advice:
        if is_off(asked.value) or str(asked.value).lower() in ("auto", "full"):
            return Advice("remove it: honed plans the precision from device and checkpoint", {})
        if not is_on(asked.value):
            return Advice("remove it: honed plans the precision; or write dtype at the top level")
        if dtype == "bfloat16" and not trains_adapter(asked.data):
            return Advice(
                "remove it: dtype: auto computes in bfloat16 if device and checkpoint support it; dtype: bfloat16 at "
                "the top level requires it",
                {},
            )
        at = " at the top level" if asked.section else ""
        return Advice(f"write dtype: {dtype}{at}", {"dtype": dtype})

    return by(advise, "dtype")


def _quantized(value: Any) -> Any:
    word = str(value).lower().removesuffix("bit").strip("-_ ")
    if is_off(value):
        return None
    if word in ("4", "int4", "nf4", "fp4", "bnb4", "bnb_nf4", "bnb"):
        return "4bit" if word != "bnb" else None
    if word in ("8", "int8", "bnb8"):
        return "8bit"
    raise Unsaid(f"quantization to {shown(value)} is not supported yet: quantization may be 4bit or 8bit")


def _quantization_config(asked: Asked) -> Advice:
    value = asked.value
    if not isinstance(value, dict):
        return take("quantization", _quantized).advise(asked)
    bits = next((bits for bits in ("4bit", "8bit") if is_on(value.get(f"load_in_{bits}"))), None)
    if bits is None:
        return Advice("write quantization: 4bit or 8bit at the top level, with a lora: section")
    return Advice(f"write quantization: {bits} at the top level", {"quantization": bits})


def _attention(value: Any) -> Any:
    return one_of(
        {
            **dict.fromkeys(
                ("fa2", "flash", "flash_attention", "flash_attn", "flash_attention_2", True), "flash_attention_2"
            ),
            **dict.fromkeys(("sdpa", "sdp"), "sdpa"),
            "eager": "eager",
            **dict.fromkeys(("auto", "disabled", "none", "no", "false", False), "auto"),
        },
        "write attn_implementation: auto, sdpa, eager or flash_attention_2, instead of",
    )(value)


def _modules(value: Any) -> Any:
    """Convert LLaMA-Factory's `all`, and comma-separated lists."""
    if value in ("all", "all-linear", ["all"], ["all-linear"]):
        return "all-linear"
    if isinstance(value, str) and "," in value:
        return [part.strip() for part in value.split(",") if part.strip()]
    return value if value != [] else None


def _target_modules(asked: Asked) -> Advice:
    if is_on(asked.data.get("lora_target_linear")):
        return Advice("remove it: lora_target_linear means all", {})
    return take("lora.target_modules", _modules).advise(asked)


def _list(value: Any) -> Any:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()] or None
    return value if value != [] else None


def _scheduler_seconds(value: Any) -> Any:
    """Convert a batch scheduler's [days-][[hours:]minutes:]seconds to seconds; a single number means minutes."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(value))
    if match is None:
        raise Unsaid("write time_limit_sec, in seconds")
    days, *parts = match.groups()
    given = [int(part) for part in parts if part is not None]
    if days is not None:
        units: tuple[int, ...] = (3600, 60, 1)
    else:
        units = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}[len(given)]
    return int(days or 0) * 86400 + sum(unit * number for unit, number in zip(units, given, strict=False))


def _gres(value: Any) -> Any:
    match = re.fullmatch(r"gpu(?::[a-z]\w*)?(?::(\d+))?", str(value), re.IGNORECASE)
    if match is None:
        raise Unsaid("write resources.gpus: the number of GPUs")
    return int(match[1] or 1)


def _dependencies(value: Any) -> Any:
    """Convert a batch scheduler's `afterok:12:13` to a list; waiting for any other end is not supported."""
    if isinstance(value, str) and (match := re.fullmatch(r"(after\w*):([\w:]+)", value)):
        if match[1] != "afterok":
            raise Unsaid(f"{match[1]} is not supported yet: depends_on waits for jobs that succeed")
        return match[2].split(":")
    return _list(value)


def _automatic(value: Any) -> Any:
    return None if value == "auto" else value


_METHODS = {
    "dpo": "DPO",
    "ipo": "IPO",
    "kto": "KTO",
    "orpo": "ORPO",
    "grpo": "GRPO",
    "gdpo": "GDPO",
    "ppo": "PPO",
    "simpo": "SimPO",
    "cpo": "CPO",
    "rloo": "RLOO",
    "rm": "reward modelling",
    "reward": "reward modelling",
    "reinforcement": "reinforcement learning",
    "rlhf": "RLHF",
    "gkd": "GKD",
    "ebft": "EBFT",
    "bco": "BCO",
    "prm": "reward modelling",
    "sequence_classification": "classification",
    "seq_cls": "classification",
    "classification": "classification",
    "embedding": "training embedding models",
    "reranker": "training rerankers",
}
_SFT = (
    "sft",
    "supervised",
    "instruct",
    "instruction",
    "causal_lm",
    "text-generation",
    "lm",
    "llm",
    "train",
    "finetune",
    "fine-tune",
    "fine_tuning",
    "default",
    "generic",
    "chat",
)
_PRETRAINING = ("pt", "pretrain", "pretraining", "clm", "continued_pretraining", "cpt")
_SFT_ALONE = "honed does supervised fine-tuning (kind: sft)"


def not_supported(value: str) -> str | None:
    """Return why a training method is not supported; None if the word is not such a method."""
    word = value.lower().removeprefix("llm-").removesuffix("trainer").replace(" ", "_")
    return f"{_METHODS[word]} is not supported yet: {_SFT_ALONE}" if word in _METHODS else None


def _kind(asked: Asked) -> Advice:
    value = asked.value
    if asked.key == "method" and isinstance(value, dict):
        return _method(asked)
    word = str(value).lower().removeprefix("llm-")
    if word == "merge":
        return Advice("write kind: merge", {"kind": "merge"})
    if word in ("eval", "evaluation", "evaluate"):
        return Advice("write kind: evaluate", {"kind": "evaluate"})
    if word in _SFT or is_off(value):
        return Advice(f"remove it: {_SFT_ALONE}", {})
    if word in _PRETRAINING:
        return Advice("remove it: text rows (format: text) are trained on in full, which is continued pretraining", {})
    said = not_supported(word)
    return Advice(
        said
        or f"honed has no {shown(value)}: {_SFT_ALONE}, merges an adapter (kind: merge) or evaluates (kind: evaluate)"
    )


def _method(asked: Asked) -> Advice:
    kind = str(asked.value.get("type"))
    if kind != "supervised":
        return Advice(not_supported(kind) or f"honed has no {shown(kind)}: {_SFT_ALONE}")
    inner = asked.value.get("supervised")
    given = inner.get("hyperparameters") if isinstance(inner, dict) else {}
    return _hyperparameters(Asked("hyperparameters", given or {}, asked.section, asked.data, asked.path))


def _hyperparameters(asked: Asked) -> Advice:
    """Advise for OpenAI's hyperparameters; auto means the default."""
    if not isinstance(asked.value, dict):
        return Advice("its keys belong under training:")
    fix: Fix = {}
    hints: list[str] = []
    lost: list[str] = []  # settings that are given up
    for key, value in asked.value.items():
        synonym = NAMES.get(str(key))
        advice = synonym.advise(Asked(str(key), value, "training", asked.data, f"training.{key}")) if synonym else None
        if advice is None or advice.fix is None:
            return Advice(f"{quote.name(str(key))}: {advice.hint if advice else 'its keys stand under training:'}")
        fix |= advice.fix
        hints += [f"{name}: {rewritten(item)}" for name, item in advice.fix.items()]
        if not advice.fix and value not in (None, "auto"):
            lost.append(f"{key}: {advice.hint.removeprefix('remove it: ')}")
    what = f"write {', '.join(hints)}" if hints else "remove it"
    why = "" if hints or lost else ": auto already does this"
    return Advice("; ".join([f"{what}{why}", *lost]), fix)


def _adapter_kind(asked: Asked) -> Advice:
    value = asked.value
    if isinstance(value, dict):  # peft_config, lora_config
        return _lora_config(asked)
    word = str(value).lower().replace(" ", "_")
    if "qlora" in word:
        bits = ("load_in_4bit", "load_in_8bit", "quantization_bit", "quantization")
        has_bits = any(asked.data.get(key) for key in bits)
        fix = {"lora": {}} if has_bits else {"lora": {}, "quantization": "4bit"}
        return Advice(f"write a lora: section{'' if has_bits else ' and quantization: 4bit'}", fix)
    if word == "dora":
        return Advice("write lora: {use_dora: true}", {"lora": {"use_dora": True}})
    if ("lora" in word and "ada" not in word) or (asked.key in ("use_peft", "peft", "use_lora") and is_on(value)):
        return Advice("write a lora: section (lora: {} uses its defaults)", {"lora": {}})
    if word in ("full", "full_finetuning", "full_fine-tuning", "fft") or is_off(value):
        return Advice("remove it: without a lora: section it is full fine-tuning", {})
    if word in ("freeze", "oft", "lisa", "badam", "llama-adapter", "ia3", "adalora", "vera", "boft"):
        name = "freeze-tuning" if word == "freeze" else shown(value)
        return Advice(f"{name} is not supported yet: use a lora: section with layers_to_transform, or full fine-tuning")
    return Advice("a lora: section trains an adapter; without one the job is full fine-tuning")


def adapter_word(value: str) -> Advice | None:
    """Advise for axolotl's `adapter: qlora`; None for a value that is a path."""
    word = value.lower()
    if word not in ("lora", "qlora", "peft", "dora", "ia3", "llama-adapter", "oft", "none", "no", "full"):
        return None
    return _adapter_kind(Asked("adapter", "lora" if word == "peft" else word))


def lora_value(value: Any) -> Advice | None:
    """Advise for a `lora:` that is not a mapping; None if the intention is unknown."""
    if isinstance(value, str) and "/" in value:
        return Advice(f"write adapter: {rewritten(value)} to continue from it", {"lora": None, "adapter": value})
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"):
        value = is_on(value)
    if value is True:
        return Advice("write lora: {}, which uses its defaults", {"lora": {}})
    if value is False:
        return Advice("remove it: without a lora: section it is full fine-tuning", {"lora": None})
    if isinstance(value, str):
        advice = adapter_word(value)
        return advice and Advice(advice.hint, None if advice.fix is None else {"lora": None, **advice.fix})
    if isinstance(value, int) and value > 0:
        return Advice(f"write lora: {{r: {value}}}", {"lora": {"r": value}})
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return Advice(f"write lora: {{target_modules: {rewritten(value)}}}", {"lora": {"target_modules": value}})
    return None


def quantization_value(value: Any) -> Advice | None:
    """Advise for a `quantization:` that is true or another tool's section."""
    if value is True:
        return Advice("write quantization: 4bit, or 8bit")
    if not isinstance(value, dict):
        return None
    bits = next((value[key] for key in ("bits", "quant_bits", "quantization_bit", "num_bits") if key in value), None)
    if bits in (4, 8, "4", "8"):
        return Advice(f"write quantization: {bits}bit", {"quantization": f"{bits}bit"})
    return _quantization_config(Asked("quantization", value))


_LORA_KEYS = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "modules_to_save",
    "bias",
    "use_rslora",
    "use_dora",
    "init_lora_weights",
    "layers_to_transform",
    "rank_pattern",
    "alpha_pattern",
)


def _lora_config(asked: Asked) -> Advice:
    kept, other = {}, []
    for key, value in asked.value.items():
        if key in _LORA_KEYS and value is not None:
            kept[key] = _modules(value) if key == "target_modules" else value
        elif key not in ("task_type", "peft_type", "inference_mode", "name", "fan_in_fan_out"):
            other.append(key)
    return Advice("write it as lora:, without task_type and peft_type", None if other else {"lora": kept})


def _share(value: Any) -> Any:
    """Convert axolotl's and LLaMA-Factory's held-out part, a share or a number of rows."""
    number = float(value)
    if number == 0:
        return None
    if number >= 1:
        raise Unsaid(
            f"eval_split is a share of the rows: write eval_split: {rewritten(number)} divided by their number; or "
            "put the rows in their own file, for eval_datasets"
        )
    return number


_TRAIN, _HELD_OUT = ("train", "training"), ("eval", "validation", "valid", "val", "test", "dev", "evaluation")


def named_splits(value: Any) -> Advice | None:
    """Advise for data sets keyed by split names, as in `{train: a.jsonl, validation: b.jsonl}`."""
    if not isinstance(value, dict) or not value:
        return None
    fix: Fix = {}
    for name, item in value.items():
        key = "datasets" if name in _TRAIN else "eval_datasets" if name in _HELD_OUT else None
        sets = [{"path": one} if isinstance(one, str) else one for one in (item if isinstance(item, list) else [item])]
        if key is None or key in fix or not all(isinstance(one, dict) and "path" in one for one in sets):
            return None
        fix[key] = sets
    return Advice(f"write {' and '.join(f'{key}: {rewritten(sets)}' for key, sets in fix.items())}", fix)


def _holds_out(data: Any) -> bool:
    share = settings(data, "eval_split", "val_set_size", "val_size", "test_split_size", "validation_split_percentage")
    if isinstance(share, int | float) and share > 0:
        return True
    return any(
        data.get(key) for key in ("eval_datasets", "test_datasets", "eval_dataset", "validation_file", "eval_file")
    )


def _per_epoch(what: str) -> Synonym:
    """Advise for axolotl's `evals_per_epoch` and `saves_per_epoch`: converted to a share of the run by its epochs."""

    def advise(asked: Asked) -> Advice:
        number = asked.value
        if is_off(number):
            return Advice(
                "remove it" if what == "save" else "remove it: without held-out rows there are no evaluations", {}
            )
        if what == "eval" and not _holds_out(asked.data):
            return Advice("remove it: there are no held-out rows to evaluate on; eval_split: 0.05 holds rows out", {})
        strategy = f"training.{what}_strategy"
        if number == 1:
            return Advice(f"write {strategy}: epoch", {strategy: "epoch"})
        epochs, steps = (
            settings(asked.data, "num_train_epochs", "num_epochs", "epochs"),
            settings(asked.data, "max_steps"),
        )
        if type(number) is not int or not isinstance(epochs, int | float) or epochs <= 0 or (steps or 0) > 0:
            return Advice(
                f"write training.{what}_steps: the steps of an epoch divided by {shown(number)}; below 1 it is a share "
                "of the whole run"
            )
        share = round(1 / (number * epochs), 6)
        return Advice(
            f"write training.{what}_steps: {share:g}: a share of the run, {number} for each of {epochs:g} epochs",
            {strategy: "steps", f"training.{what}_steps": share},
        )

    return by(advise, f"training.{what}_steps")


def _rows_per_data_set(asked: Asked) -> Advice:
    sets = asked.data.get("datasets")
    if type(asked.value) is not int:
        return Advice("write max_rows in the data set")
    if not isinstance(sets, list) or not all(isinstance(item, dict) for item in sets) or not sets:
        return Advice(f"write max_rows: {asked.value} in the data set")
    fix = {f"datasets.{number}.max_rows": asked.value for number in range(len(sets))}
    return Advice(f"write max_rows: {asked.value} in the data set{'s' if len(sets) > 1 else ''}", fix)


def _data_sets(key: str) -> Synonym:
    """Advise for data sets that are named outside the list."""

    def advise(asked: Asked) -> Advice:
        value = asked.value
        example = "{path: /srv/data/rows.jsonl}"
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            return Advice(f"write {key}", {key: value})
        if isinstance(value, dict) and "path" in value:
            return Advice(f"write {key}: [{{path: …}}]", {key: [value]})
        if (splits := named_splits(value)) is not None:
            return splits
        names = value if isinstance(value, list) else str(value).split(",")
        if all(is_data_file(name) for name in names) and names:
            made = [{"path": str(name).strip()} for name in names]
            return Advice(f"write {key}: {rewritten(made)}" if len(made) < 3 else f"write {key}", {key: made})
        if str(value).startswith("file-"):
            return Advice(f"that is a file at OpenAI: write {key}: [{example}] with the path of the .jsonl file")
        if len(names) == 1 and re.fullmatch(r"[\w.-]+/[\w.-]+", str(names[0])):
            return Advice(f"write {key}: [{{path: {rewritten(names[0])}}}]", {key: [{"path": names[0]}]})
        return Advice(f"that is a data set name of another tool: write {key}: [{example}] with the path of the file")

    return by(advise, key)


def _template(asked: Asked) -> Advice:
    value = asked.value
    if not isinstance(value, str):
        return Advice("write chat_template at the top level: a file with a Jinja template")
    if "{%" in value or "{{" in value:
        return Advice("save the template to a file, and write chat_template: its path")
    if is_template_file(value):
        return take("chat_template").advise(asked)
    return Advice(
        f"remove it: {shown(value)} is another tool's name for a template, and honed uses the base model's own; if "
        "the model has none, set chat_template: to a file",
        {},
    )


def template_word(value: str) -> Advice | None:
    """Advise for a template's name or text in place of a file; None for a file."""
    if is_template_file(value) and "{%" not in value and "{{" not in value:
        return None
    return _template(Asked("chat_template", value))


_CLASS = re.compile(r"(Auto|TF|Flax)?[A-Z]\w*(Model|For[A-Z]\w+|LMHeadModel)")


def model_class(value: str) -> Advice | None:
    """Advise for axolotl's `model_type: LlamaForCausalLM`; None for a model type."""
    if not _CLASS.fullmatch(value):
        return None
    if "Classification" in value or "Reward" in value or "Embedding" in value:
        return Advice(f"classification and reward modelling are not supported yet: {_SFT_ALONE}")
    return Advice("remove it: config.json determines the class", {})


def is_template_file(value: str) -> bool:
    """Tell whether a text names a template's file rather than a template by name."""
    return "/" in value or value.endswith((".jinja", ".jinja2", ".j2", ".json", ".txt"))


def _dataset_type(asked: Asked) -> Advice:
    value, place = asked.value, asked.path.rpartition(".")[0]
    if isinstance(value, dict):
        ours = {"field_instruction": "instruction", "field_input": "input", "field_output": "output"}
        columns = {ours[key]: item for key, item in value.items() if key in ours and item and item != ours[key]}
        if set(value) - set(ours) - {"field_system"} - {key for key, item in value.items() if not item}:
            return Advice(
                "custom formats are not supported yet: write format: prompt_completion with columns: {prompt: …, "
                "completion: …}, with the rows rendered as they are to be trained on"
            )
        fix: Fix = {f"{place}.format": "alpaca"} | ({f"{place}.columns": columns} if columns else {})
        return Advice(f"write format: alpaca{f' and columns: {rewritten(columns)}' if columns else ''}", fix)
    word = str(value).lower()
    if any(
        name in word for name in ("dpo", "orpo", "kto", "chosen", "rejected", "bradley", "ultra", "argilla", ".intel")
    ):
        return Advice(
            "preference training (DPO, ORPO, KTO) is not supported yet: rows with one answer can be trained on"
        )
    if word.startswith("input_output"):
        return Advice(
            "input_output (segments with a label each) is not supported yet: write the rows as messages, or as "
            "prompt and completion"
        )
    if "stepwise" in word:
        return Advice("reward modelling is not supported yet")
    match re.split(r"[.:]", word)[0]:
        case "alpaca":
            made = "alpaca"
        case "completion" | "pretrain" | "text" | "raw":
            made = "text"
        case "sharegpt" | "sharegpt_simple" | "vicuna":
            made = "sharegpt"
        case "chat_template" | "chatml" | "openai" | "messages" | "conversational" | "chat":
            made = "sharegpt" if _mapping_of(asked) == {"role": "from", "content": "value"} else "auto"
        case "prompt-completion" | "prompt_completion" | "instruction" | "input-output":
            made = "prompt_completion"
        case "json" | "jsonl" | "csv" | "parquet" | "auto":
            made = "auto"
        case _:
            return Advice(f"remove it: format: auto uses the columns, and honed has no {shown(value)}", {})
    if made == "auto":
        return Advice("remove it: format: auto uses the columns", {})
    return Advice(f"write format: {made}", {f"{place}.format": made})


def _mapping_of(asked: Asked) -> Any:
    number = asked.path.split(".")[1:2]
    sets = asked.data.get(asked.path.split(".")[0])
    if isinstance(sets, list) and number and number[0].isdecimal() and int(number[0]) < len(sets):
        section = sets[int(number[0])]
        if isinstance(section, dict):
            given = section.get("message_property_mappings")
            if isinstance(given, dict):
                return {key: given.get(key) for key in ("role", "content")}
            return {"role": section.get("message_field_role"), "content": section.get("message_field_content")}
    return None


def _message_fields(asked: Asked) -> Advice:
    mapping = asked.value if isinstance(asked.value, dict) else {asked.key.rpartition("_")[2]: asked.value}
    known = {"role": ("role", "from"), "content": ("content", "value")}
    if all(value in known.get(str(key), (key,)) for key, value in mapping.items()):
        return Advice("remove it: honed reads messages with role and content, and with from and value", {})
    return Advice("other key names within messages are not supported yet: rewrite the rows with role and content")


def _column(ours: str, *usual: str) -> Synonym:
    def advise(asked: Asked) -> Advice:
        place = asked.path.rpartition(".")[0]
        if not isinstance(asked.value, str):
            return Advice(f"write columns: {{{ours}: their column}} in the data set")
        if asked.value in (ours, *usual):
            return Advice("remove it: honed already reads a column of that name", {})
        hint = f"write columns: {{{ours}: {rewritten(asked.value)}}} in the data set"
        if not asked.section.startswith("datasets"):
            sets = asked.data.get("datasets")
            if not isinstance(sets, list) or len(sets) != 1:
                return Advice(hint)
            place = "datasets.0"
        return Advice(hint, {f"{place}.columns": {ours: asked.value}})

    return by(advise, "datasets.columns")


def _sibling(data: Any, place: str, key: str) -> Any:
    for part in [*filter(None, place.split(".")), key]:
        if isinstance(data, list):
            data = data[int(part)] if part.isdecimal() and int(part) < len(data) else None
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


def _data_files(asked: Asked) -> Advice:
    files = asked.value if isinstance(asked.value, list) else [asked.value]
    place = asked.path.rpartition(".")[0]
    if isinstance(hub_id := _sibling(asked.data, place, "path"), str) and re.fullmatch(r"[\w.-]+/[\w.-]+", hub_id):
        return Advice(
            "for a hub data set, name and split select the files; or download it with `hf download --repo-type "
            f"dataset {hub_id} --local-dir DIR`, and use the file as path"
        )
    if len(files) == 1 and isinstance(files[0], str):
        return Advice(f"write path: {rewritten(files[0])}", {f"{place}.path": files[0]})
    return Advice("write a data set with its path for each file, or put them into one directory")


#: Where a tracker's project or experiment is named instead.
_TRACKED_AS = {
    "wandb": "; WANDB_PROJECT in honed's environment names the project",
    "mlflow": "; MLFLOW_EXPERIMENT_NAME in honed's environment names the experiment",
    "trackio": "; training.project names the project",
}


def _tracker(name: str) -> Synonym:
    def advise(asked: Asked) -> Advice:
        if is_off(asked.value):
            return Advice("remove it", {})
        there = asked.data.get("report_to")
        there = [there] if isinstance(there, str) else there if isinstance(there, list) else []
        wanted = [item for item in there if item in ("tensorboard", "wandb", "mlflow", "trackio") and item != name]
        given_up = "" if is_on(asked.value) else _TRACKED_AS.get(name, "")
        return Advice(
            f"write report_to: {rewritten([*wanted, name])} at the top level{given_up}"
            if asked.section
            else f"write report_to: {rewritten([*wanted, name])}{given_up}",
            {"report_to": [*wanted, name]},
        )

    return by(advise, "report_to")


def _integrations(asked: Asked) -> Advice:
    kinds = (
        [item.get("type") for item in asked.value if isinstance(item, dict)] if isinstance(asked.value, list) else []
    )
    if kinds and set(kinds) <= {"wandb", "tensorboard", "mlflow", "trackio"}:
        return Advice(f"write report_to: {rewritten(kinds)}", {"report_to": kinds})
    return Advice("write report_to: [tensorboard, wandb, mlflow, trackio], with the ones you need")


def _gpus(asked: Asked) -> Advice:
    value = len(asked.value) if isinstance(asked.value, list) else asked.value
    if str(value).isdecimal() and int(value) > 1:
        return Advice(f"write resources.gpus: {value}", {"resources.gpus": int(value)})
    return Advice(
        "remove it: a job uses one GPU by default; resources: {gpus: 0} trains on the CPU, {gpus: 2} on two GPUs", {}
    )


def _nodes(asked: Asked) -> Advice:
    if str(asked.value).isdecimal() and int(asked.value) > 1:
        return Advice(f"write resources.nodes: {asked.value}", {"resources.nodes": int(asked.value)})
    return Advice("remove it: a job uses one machine by default", {})


def _schedule(asked: Asked) -> Advice:
    ratio = settings(asked.data, "cosine_min_lr_ratio")
    if asked.value == "cosine" and isinstance(ratio, int | float) and ratio > 0:
        return Advice(
            "write training.lr_scheduler_type: cosine_with_min_lr",
            {
                "training.lr_scheduler_type": "cosine_with_min_lr",
                "training.lr_scheduler_kwargs": {"min_lr_rate": ratio},
            },
        )
    return take("training.lr_scheduler_type").advise(asked)


def _least_rate(asked: Asked) -> Advice:
    if is_off(asked.value):
        return Advice("remove it", {})
    fix = {
        "training.lr_scheduler_type": "cosine_with_min_lr",
        "training.lr_scheduler_kwargs": {"min_lr_rate": asked.value},
    }
    return Advice(
        "write training.lr_scheduler_type: cosine_with_min_lr with lr_scheduler_kwargs: {min_lr_rate: "
        f"{rewritten(asked.value)}}}",
        fix,
    )


def _low_rank_optimizer(name: str) -> Synonym:
    return hinted(
        "training.optim",
        f"write training.optim: {name}_adamw, optim_target_modules: all-linear and optim_args: rank=128,…",
    )


def _resume(asked: Asked) -> Advice:
    if is_on(asked.value) or is_off(asked.value):
        return Advice("remove it: honed resumes automatically", {})
    return Advice(
        "honed resumes its own jobs automatically; to continue what another tool has trained, write adapter: its "
        "directory, or base_model, instead"
    )


def _special_tokens(asked: Asked) -> Advice:
    keys = set(asked.value) if isinstance(asked.value, dict) else set()
    if keys and keys <= {"pad_token"}:
        return Advice("remove it: the tokenizer has a padding token, or honed chooses one that no row trains", {})
    return Advice("remove it: the tokenizer has its own special tokens; add others to its files", {})


def _multiplier(_: Asked) -> Advice:
    return Advice(
        "remove it: it multiplies a rate that OpenAI chooses; write training.learning_rate: the rate itself, 1e-4 "
        "for LoRA, 1e-5 for full fine-tuning",
        {},
    )


def _decoding(asked: Asked) -> Advice:
    if asked.key in ("do_sample", "generation_do_sample"):
        if is_off(asked.value):
            return Advice("remove it: predictions are greedy, so that they are comparable", {})
        return Advice("write predictions.sample: {} to sample instead of greedy decoding", {"predictions.sample": {}})
    name = asked.key.removeprefix("generation_")
    if asked.value == 0:
        return Advice("remove it: predictions are greedy, so that they are comparable", {})
    if name in ("temperature", "top_p"):
        words = f"write predictions.sample: {{{name}: {rewritten(asked.value)}}}; by default predictions are greedy"
        return Advice(words, {"predictions.sample": {name: asked.value}})
    return Advice("remove it: predictions are greedy, or sampled with predictions.sample: {temperature, top_p}", {})


_SPEED = drop("it does not affect the result, and honed chooses the kernels")
_LIGER = switch({"training.use_liger_kernel": True}, note="enables all of Liger's kernels, if the package is installed")
_ON_ANSWERS = "honed trains only on the assistant's turns; text rows are trained on in full"
_QUANTIZER = drop("honed quantizes to nf4 with double quantization")
#: For DeepSpeed, FSDP and other ways to spread a job over devices.
_STAGES = drop(
    "resources: {gpus: 2} trains on several GPUs, and parallel decides how; DeepSpeed, tensor and sequence parallelism "
    "are not supported yet"
)
_OWN_TOKENIZER = drop("the tokenizer is the base model's")
_HUB = drop("honed uploads nothing to the hub")
_TRACKED = drop("report_to selects the trackers that receive metrics, and honed where they write")
_KIND = by(_kind, "kind")

#: Another tool's name -> advice by its value. `section.name` is a name in one section only.
NAMES: dict[str, Synonym] = {
    # Removed from transformers and trl
    **_all(take("training.warmup_steps", note="below 1 it is a share of the run"), "warmup_ratio", "lr_warmup_ratio"),
    **_all(take("training.warmup_steps"), "warmup", "num_warmup_steps", "lr_warmup_steps"),
    **_all(take("training.max_length"), "max_seq_length", "max_seq_len", "sequence_len", "cutoff_len",
           "model_max_length", "block_size", "seq_length", "context_length", "seq_len", "max_context_length",
           "max_packed_sequence_len", "max_tokens_per_sample"),
    **_all(take("training.eval_strategy", one_of({"steps": "steps", "epoch": "epoch", "no": "no", "never": "no"})),
           "evaluation_strategy"),
    "do_eval": drop("training.eval_strategy sets when held-out rows are evaluated"),
    "do_train": drop("a job always trains"),
    "do_predict": drop("honed makes predictions itself: see predictions"),
    **_all(switch({"resources.gpus": 0}), "no_cuda", "use_cpu"),
    "overwrite_output_dir": drop("an output_dir must be new"),
    **_all(switch({"training.train_sampling_strategy": "group_by_length"}), "group_by_length"),
    **_all(drop("checkpoints are always safetensors"), "save_safetensors", "safe_serialization"),
    **_all(take("dtype", _dtype), "torch_dtype", "half_precision_backend", "infer_dtype", "mixed_precision",
           "fp16_opt_level", "precision", "compute_dtype", "model_dtype", "bnb_4bit_compute_dtype", "kv_cache_dtype"),
    **_all(_half("bfloat16"), "bf16", "bfloat16", "use_bf16"),
    **_all(_half("float16"), "fp16", "float16", "use_fp16"),
    "pure_bf16": switch({"dtype": "bfloat16"}),
    **_all(drop("evaluations use the precision of training"), "bf16_full_eval", "fp16_full_eval"),
    "tf32": drop("float32 is computed as by torch's default"),
    "accelerator_config": drop("honed configures accelerate from its plan"),
    **_all(never("float8 training", "remove it to use bfloat16 if the device supports it"), "fp8", "use_fp8",
           "fp8_backend", "fp8_enable_fsdp_float8_all_gather"),
    "training.output_dir": take("output_dir"),
    "training.report_to": take("report_to"),
    "training.trust_remote_code": take("trust_remote_code"),
    "include_tokens_per_second": drop("honed reports the speed itself"),
    **_all(switch({"training.optim": "adafactor"}), "adafactor"),
    **_all(take("training.optim", lambda value: OPTIMIZERS.get(str(value).lower(), value)), "optimizer", "optimiser",
           "optimizer_type", "optimizer_name"),
    **_all(take("training.per_device_train_batch_size", _automatic), "per_gpu_train_batch_size",
           "per_device_batch_size", "micro_batch_size", "batch_size", "train_batch_size"),
    **_all(take("training.per_device_eval_batch_size"), "per_gpu_eval_batch_size", "eval_batch_size"),
    **_all(take("training.dataloader_num_workers"), "num_workers"),
    **_all(drop("honed renders and tokenizes the rows itself"), "preprocessing_num_workers", "dataset_num_proc",
           "dataset_processes", "dataset_kwargs", "remove_unused_columns", "label_names", "length_column_name"),
    # The model
    **_all(take("base_model"), "model_name_or_path", "model_name", "model", "model_id", "model_path",
           "pretrained_model", "pretrained_model_name_or_path", "base_model_name_or_path", "model_local_path",
           "base_model_id"),
    **_all(drop("base_model has its own config.json"), "base_model_config", "tokenizer_config", "cls_model_config",
           "base_model_ignore_patterns"),
    "checkpoint": hinted("base_model", "write base_model, or adapter: the model or adapter to start from"),
    **_all(take("revision"), "model_revision", "revision_of_model"),
    **_all(_OWN_TOKENIZER, "type_of_model", "architecture", "tokenizer_type", "tokenizer_use_fast", "tokenizer_legacy",
           "use_fast_tokenizer", "tokenizer", "tokenizer_name", "tokenizer_name_or_path", "is_llama_derived_model",
           "is_mistral_derived_model", "is_falcon_derived_model", "is_qwen_derived_model", "split_special_tokens",
           "tokenizer_use_mistral_common", "use_fast", "padding_side", "eos_token", "pad_token"),
    **_all(by(_special_tokens), "special_tokens"),
    **_all(never("adding tokens", "save the tokenizer and the embeddings with them first"), "tokens", "new_tokens",
           "add_tokens", "add_special_tokens", "resize_vocab", "resize_token_embeddings_to_32x", "new_special_tokens",
           "new_special_tokens_config", "additional_special_tokens", "added_tokens_overrides"),
    "eot_tokens": drop("honed finds the end of a turn in the chat template"),
    **_all(never("changing the model's positions", "correct its config.json"), "rope_scaling", "rope_theta",
           "overrides_of_model_config", "shift_attn", "yarn"),
    **_all(drop("the model is configured by its config.json"), "model_config", "model_kwargs", "model_init_kwargs",
           "overrides_of_model_kwargs"),
    **_all(drop("honed places the model"), "device_map", "low_cpu_mem_usage", "max_memory", "gpu_memory_limit",
           "offload_folder", "low_cpu_mem", "device", "experimental_skip_move_to_device"),
    "use_cache": drop("the cache is off in training and on in predictions"),
    **_all(by(_template, "chat_template"), "template", "prompt_template", "chat_template_jinja", "chat_template_path",
           "default_system_message"),
    **_all(take("adapter"), "adapter_name_or_path", "lora_model_dir", "adapter_path", "peft_model_path",
           "adapter_model", "resume_from_adapter"),
    **_all(take("attn_implementation", _attention), "flash_attn", "flash_attention", "attn_impl", "attention",
           "use_flash_attention_2", "use_flash_attn", "attention_implementation", "use_flash_attention"),
    "sdp_attention": switch({"attn_implementation": "sdpa"}),
    "eager_attention": switch({"attn_implementation": "eager"}),
    **_all(drop("attn_implementation: auto uses what the device supports"), "xformers_attention", "flex_attention",
           "flash_optimum", "s2_attention", "flex_attn_compile_kwargs", "gemma4_hybrid_attn_impl", "sage_attention"),
    **_all(switch({"backend": "unsloth"}), "use_unsloth"),
    **_all(take("backend", one_of({"unsloth": "unsloth", "transformers": "transformers", "hf": "transformers",
                                   "huggingface": "transformers", "trl": "transformers", "auto": "auto"}, "backend")),
           "engine", "train_backend"),
    **_all(never("training of mixture-of-depths or expanded models"), "mixture_of_depths", "use_llama_pro"),
    **_all(never("classification and reward modelling", _SFT_ALONE), "reward_model", "process_reward_model",
           "num_labels"),
    **_all(never("quantization-aware training"), "qat", "qat_config"),
    # Quantization
    **_all(switch({"quantization": "4bit"}, off_note="only quantization: sets quantization"),
           "load_in_4bit", "use_4bit", "qlora", "use_int4", "use_qlora"),
    **_all(switch({"quantization": "8bit"}, off_note="only quantization: sets quantization"),
           "load_in_8bit", "use_8bit", "use_int8"),
    **_all(take("quantization", _quantized), "quantization_bit", "quantize", "quant_bits"),
    **_all(take("quantization", lambda value: None if str(value).lower() in ("bnb", "bitsandbytes") else
                _quantized(value), note="honed quantizes with bitsandbytes"), "quantization_method", "quant_method"),
    **_all(by(_quantization_config, "quantization"), "quantization_config", "bnb_config", "quant_config",
           "model_quantization_config"),
    **_all(_QUANTIZER, "bnb_4bit_quant_type", "double_quantization", "use_bnb_nested_quant",
           "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "bnb_config_kwargs", "quantization_type",
           "model_quantization_config_kwargs", "quantize_moe_experts"),
    **_all(never("training on GPTQ weights quantized on the fly",
                 "use the quantized checkpoint as base_model"), "gptq"),
    # LoRA
    **_all(take("lora.r"), "lora_r", "lora_rank", "rank", "lora.rank", "lora.lora_r", "lora.lora_rank", "peft_r"),
    **_all(take("lora.lora_alpha"), "lora.alpha", "alpha"),
    **_all(take("lora.lora_dropout"), "lora.dropout"),
    **_all(by(_target_modules, "lora.target_modules"), "lora_target", "lora_target_modules", "lora_attn_modules",
           "lora.target", "lora.lora_target", "lora.lora_target_modules"),
    **_all(switch({"lora.target_modules": "all-linear"}), "lora_target_linear", "lora.lora_target_linear"),
    **_all(take("lora.modules_to_save", _list), "lora_modules_to_save", "additional_target"),
    **_all(take("lora.bias"), "lora_bias"),
    **_all(take("lora.use_dora", flag), "peft_use_dora", "dora"),
    **_all(take("lora.use_rslora", flag), "peft_use_rslora", "rslora"),
    **_all(take("lora.init_lora_weights"), "peft_init_lora_weights", "lora_init"),
    "pissa_init": switch({"lora.init_lora_weights": "pissa"}),
    **_all(drop("the saved adapter is a plain one"), "pissa_convert", "pissa_iter"),
    **_all(take("lora.layers_to_transform"), "peft_layers_to_transform"),
    **_all(drop("honed trains a single adapter with peft, configured by lora:"),
           "lora_fan_in_fan_out", "lora.task_type",
           "lora.inference_mode", "lora.peft_type", "lora.fan_in_fan_out", "lora_on_cpu", "create_new_adapter",
           "lora_task_type", "use_gradient_checkpointing_lora", "peft_layer_replication"),
    **_all(never("a separate loss or learning rate for LoRA's matrices"), "loraplus_lr_ratio",
           "loraplus_lr_embedding"),
    **_all(never("LoftQ"), "loftq", "loftq_config", "lora.loftq_config"),
    "lora_target_parameters": take("lora.target_parameters", _list),
    "peft_trainable_token_indices": take("lora.trainable_token_indices", lambda value: value or None),
    **_all(switch({}, {"lora.finetune_vision_layers": True}, note="the vision encoder stays frozen unless enabled"),
           "freeze_vision_tower", "freeze_vit", "freeze_vision"),
    **_all(switch({"lora.finetune_vision_layers": True}), "train_vision", "tune_mm_vision"),
    **_all(switch({}, {"lora.finetune_audio_layers": True}, note="the audio encoder stays frozen unless enabled"),
           "freeze_audio_tower", "freeze_audio"),
    "train_audio": switch({"lora.finetune_audio_layers": True}),
    **_all(switch({}, {"lora.finetune_projector": True}, note="the projector stays frozen unless enabled"),
           "freeze_multi_modal_projector", "freeze_aligner"),
    **_all(take("lora.finetune_projector", flag), "tune_mm_mlp_adapter", "finetune_projector_layers",
           "lora.finetune_projector_layers", "train_projector"),
    **_all(switch({"lora": {"finetune_language_layers": False, "finetune_projector": True}},
                  note="trains an adapter there"), "train_mm_proj_only"),
    **_all(hinted("lora", "lora.finetune_vision_layers, finetune_audio_layers and finetune_projector select what gets "
                        "an adapter; without a lora: section the language model is trained in full"),
           "freeze_mm_modules", "unfrozen_parameters", "freeze_modules", "freeze_trainable_modules",
           "freeze_trainable_layers", "freeze_extra_modules"),
    **_all(hinted("training.learning_rate", "a learning rate for one part is not supported yet: all trained parameters "
                                          "use training.learning_rate"),
           "mm_projector_lr", "vision_tower_lr", "vit_lr", "aligner_lr", "audio_lr", "embedding_lr",
           "embedding_lr_scale", "embedding_learning_rate", "lr_groups"),
    **_all(drop("the base model determines whether images or audio are supported, and the processor"),
           "is_multimodal", "processor_type", "processor_config", "processor", "vision_tower", "vision", "multimodal",
           "is_vision_model"),
    **_all(drop("honed renders and tokenizes the rows itself"), "skip_prepare_dataset"),
    **_all(switch({"lora.finetune_language_layers": False}), "freeze_language_model", "freeze_llm"),
    **_all(drop("lora.target_modules selects the layers that get an adapter"),
           "finetune_attention_modules", "finetune_mlp_modules"),
    **_all(by(_adapter_kind, "lora"), "finetuning_type", "use_peft", "peft", "use_lora", "training_type", "peft_config",
           "lora_config", "finetune_type", "tuner_type", "train_type"),
    "full_finetuning": by(lambda asked: Advice(
        "remove it: without a lora: section it is full fine-tuning", {}) if is_on(asked.value) else Advice(
        "write a lora: section (lora: {} uses its defaults)", {"lora": {}}), "lora"),
    # Length of the run, learning rate, optimizer
    **_all(take("training.num_train_epochs", _automatic), "num_epochs", "epochs", "n_epochs", "num_epoch", "epoch"),
    **_all(take("training.max_steps"), "num_steps", "total_steps", "max_train_steps", "num_train_steps", "iters"),
    "max_steps_per_epoch": hinted("training.max_steps", "write training.max_steps: the number of steps of the run"),
    **_all(take("training.learning_rate"), "lr", "peak_lr"),
    "learning_rate_multiplier": by(_multiplier, "training.learning_rate"),
    **_all(by(_schedule, "training.lr_scheduler_type"), "lr_scheduler", "scheduler", "lr_scheduler_name", "schedule"),
    **_all(by(_least_rate, "training.lr_scheduler_kwargs"), "cosine_min_lr_ratio"),
    **_all(never("a schedule with a constant end"), "cosine_constant_lr_ratio", "lr_quadratic_warmup", "eta_min"),
    **_all(take("training.gradient_accumulation_steps"), "gradient_accumulation", "grad_accum", "accumulation_steps",
           "grad_accumulation_steps"),
    **_all(take("training.max_grad_norm"), "gradient_clip_val", "clip_grad", "grad_clip", "max_norm",
           "gradient_clipping"),
    **_all(take("training.gradient_checkpointing", lambda value: True if value == "unsloth" else flag(value)),
           "enable_gradient_checkpointing", "use_gradient_checkpointing", "activation_checkpointing",
           "enable_activation_checkpointing", "gradient_checkpoint", "use_grad_checkpoint"),
    "disable_gradient_checkpointing": take("training.gradient_checkpointing", negated),
    **_all(switch({"training.activation_offloading": True}), "enable_activation_offloading"),
    "use_reentrant_gc": drop("training.gradient_checkpointing_kwargs has use_reentrant"),
    **_all(take("training.weight_decay"), "wd"),
    **_all(take("training.adam_epsilon"), "adam_eps", "adam_epsilon2", "eps"),
    **_all(take("training.packing", flag), "sample_packing", "neat_packing", "packed", "multipack",
           "use_packed_sequences", "pack"),
    **_all(take("training.eval_packing", flag), "eval_sample_packing"),
    "batch_flattening": take("training.padding_free", flag),
    **_all(_SPEED, "pad_to_sequence_len", "sample_packing_eff_est", "sample_packing_seq_len_multiplier",
           "sample_packing_group_size", "sample_packing_bin_size", "total_num_tokens", "use_kernels", "tiled_mlp",
           "multipack_real_batches", "cut_cross_entropy", "plugins", "use_v1_kernels", "kernel_config",
           "fused_attn_kernel", "unsloth_cross_entropy_loss", "experts_implementation", "use_scattermoe",
           "use_sonicmoe", "chunked_cross_entropy", "gc_steps", "use_rope_fusion", "torch_empty_cache"),
    **_all(take("training.seed"), "random_seed", "random_state"),
    **_all(take("training.use_liger_kernel", flag), "enable_liger_kernel", "liger", "use_liger"),
    **_all(take("training.torch_compile", flag), "compile"),
    **_all(take("training.neftune_noise_alpha"), "neftune_alpha", "noisy_embedding_alpha"),
    **_all(switch({"training.loss_type": "dft"}), "use_dft_loss"),
    **_all(never("this loss", "training.loss_type lists TRL's losses"), "use_eaft", "use_eaft_loss", "eaft_alpha",
           "eaft_k", "use_asft_loss", "asft_alpha", "focal_loss"),
    **_all(_low_rank_optimizer("galore"), "use_galore"),
    **_all(_low_rank_optimizer("apollo"), "use_apollo"),
    **_all(never("this optimizer", "training.optim lists transformers' optimizers"), "use_badam", "use_adam_mini",
           "use_muon", "use_lomo", "relora", "relora_steps", "lisa_n_layers", "lisa_step_interval", "dion_lr"),
    **_all(drop("honed stops a diverged run itself: see divergence"), "loss_watchdog_threshold",
           "loss_watchdog_patience"),
    # Data
    **_all(_data_sets("datasets"), "dataset", "dataset_name", "data", "train_file", "training_file", "train_dataset",
           "dataset_path", "data_path", "train_data_path", "train_data", "dataset_mixture", "data_files",
           "train_files", "local_dataset", "train_datasets", "dataset_names", "pretraining_dataset"),
    **_all(drop("datasets lists the files themselves"), "dataset_dir", "dataset_info", "media_dataset_dir"),
    **_all(hinted("datasets", "write datasets: [{path: …, split: …}], with the file or directory"), "dataset_config",
           "dataset_train_split"),
    **_all(_data_sets("eval_datasets"), "test_datasets", "eval_dataset", "eval_data_path", "validation_file",
           "eval_file", "valid_data", "eval_data", "validation_dataset", "test_dataset", "val_dataset",
           "validation_data", "val_data", "test_file", "valid_file"),
    "dataset_test_split": hinted("eval_datasets", "write eval_datasets: [{path: …, split: …}], with the file or "
                               "directory"),
    **_all(take("eval_split", _share), "val_set_size", "val_size", "test_split_size", "validation_split", "test_size",
           "eval_size", "split_dataset_ratio", "validation_ratio", "val_split"),
    "validation_split_percentage": take("eval_split", lambda value: _share(float(value) / 100)),
    **_all(by(_rows_per_data_set, "datasets.max_rows"), "max_samples", "num_rows", "max_train_samples"),
    **_all(take("datasets.max_rows"), "datasets.limit", "datasets.num_samples", "datasets.max_samples"),
    **_all(hinted("datasets.media_dir", "write media_dir in the data set: one directory, or {image: …, audio: …}"),
           "image_dir", "image_folder", "images_dir", "media_folder", "video_dir", "audio_dir", "frames_dir",
           "videos_dir", "audios_dir", "media_root", "image_root", "images_folder", "video_folder", "eval_audio_dir"),
    **_all(drop("`<image>`, `<video>` and `<audio>` in a text are placeholders for the columns' content"),
           "image_token", "video_token", "audio_token", "image_placeholder"),
    **_all(take("media.max_pixels"), "image_max_pixels", "video_max_pixels", "max_image_pixels"),
    **_all(take("media.min_pixels"), "image_min_pixels", "video_min_pixels"),
    **_all(take("media.max_image_size", note="pixels of the longer side"), "image_size", "image_resolution",
           "max_image_side", "max_resolution", "image_longest_edge"),
    **_all(take("media.num_frames"), "video_maxlen", "nframes", "max_frames", "fps_max_frames", "num_video_frames",
           "max_num_frames", "media.frames"),
    **_all(hinted("media.num_frames", "write media: {num_frames: …}, the number of frames to use"),
           "video_fps", "fps"),
    **_all(hinted("datasets.media_dir", "write media_dir: {video: …}, where a video may be a directory of frames"),
           "datasets.media_dir.frames", "datasets.media_dir.frame", "datasets.media_dir.frames_dir"),
    **_all(drop("a row contains its own media, with the sound of a video also as `audio`"),
           "use_audio_in_video"),
    **_all(drop("the model's processor decides how images are split; `media:` limits their size"),
           "crop_to_patches", "image_do_pan_and_scan", "do_image_splitting"),
    **_all(_column("image", "images"), "image_column", "images_column", "datasets.images", "datasets.image",
           "field_images"),
    **_all(_column("video", "videos"), "video_column", "datasets.videos"),
    **_all(_column("audio", "audios"), "audio_column", "datasets.audios"),
    **_all(drop("audio is resampled to the rate of the model's processor"), "audio_sampling_rate", "sampling_rate",
           "sample_rate"),
    **_all(drop("images are resized to media.max_image_size, bicubic"), "image_resize_algorithm"),
    **_all(hinted("datasets.columns", "write columns: {our name: their column} in the data set"), "column_mapping",
           "column_names"),
    **_all(_column("text"), "text_column", "dataset_text_field", "datasets.field", "datasets.text_field"),
    **_all(_column("prompt"), "prompt_column", "datasets.prompt", "datasets.field_prompt"),
    **_all(_column("completion"), "completion_column", "response_column", "datasets.response", "datasets.completion"),
    **_all(_column("messages", "conversations", "conversation"), "conversation_column", "field_messages",
           "messages_column", "datasets.messages"),
    **_all(_column("instruction"), "field_instruction", "datasets.field_instruction"),
    **_all(_column("input"), "field_input", "datasets.field_input"),
    **_all(_column("output"), "field_output", "datasets.field_output"),
    **_all(_column("system"), "field_system", "datasets.field_system"),
    **_all(by(_message_fields, "datasets.columns"), "message_property_mappings", "message_field_role",
           "message_field_content"),
    **_all(never("preference training (DPO, ORPO, KTO)", "rows with one answer can be trained on"),
           "datasets.field_chosen", "datasets.field_rejected", "field_chosen", "field_rejected"),
    **_all(by(_data_files, "datasets.path"), "datasets.data_files"),
    **_all(take("datasets.path"), "datasets.file", "datasets.data_dir", "datasets.file_name", "datasets.source",
           "datasets.dataset", "datasets.dataset_path"),
    **_all(take("datasets.name"), "datasets.config_name", "datasets.subset", "datasets.dataset_config",
           "datasets.config"),
    **_all(take("datasets.revision"), "datasets.dataset_revision"),
    **_all(by(_dataset_type, "datasets.format"), "datasets.type", "datasets.formatting", "datasets.kind",
           "data.format_type", "datasets.format_type", "datasets.prompt_style"),
    **_all(drop("the file's suffix determines the format"), "datasets.ds_type"),
    **_all(drop("honed renders messages with the model's chat template, whatever their roles are called"),
           "datasets.conversation", "datasets.roles", "datasets.chat_template", "datasets.drop_system_message",
           "datasets.strict", "datasets.field_human", "datasets.field_model", "datasets.shards",
           "datasets.preprocess_shards", "datasets.trust_remote_code", "datasets.field_tools"),
    **_all(take("datasets.fraction"), "datasets.weight", "datasets.ratio", "datasets.share", "datasets.proportion",
           "datasets.probability"),
    **_all(hinted("datasets.fraction", "write fraction in each data set"), "interleave_probs", "mix_strategy"),
    "streaming": drop("rows are read from the files on demand"),
    **_all(switch({"training.shuffle_dataset": True}), "shuffle_merged_datasets", "shuffle_train_set"),
    **_all(never("skipping duplicate rows"), "dataset_exact_deduplication", "deduplicate"),
    **_all(never("training on prompts as well", _ON_ANSWERS), "train_on_inputs", "train_on_input", "train_on_prompt"),
    **_all(never("training only on the last answer", _ON_ANSWERS), "mask_history"),
    **_all(never("training on other turns", _ON_ANSWERS, unless=lambda value: value in (
        "assistant", ["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"], ["model"])), "roles_to_train"),
    **_all(never("an end other than that of each assistant turn", unless=lambda value: value in ("turn", "all")),
           "train_on_eos", "train_on_eot"),
    **_all(by(lambda asked: Advice(f"remove it: {_ON_ANSWERS}", {}) if is_on(asked.value) else Advice(
        f"training on prompts as well is not supported yet: {_ON_ANSWERS}")), "train_on_completions",
        "train_on_responses_only", "completion_only_loss", "assistant_only_loss", "response_only"),
    **_all(drop("honed keeps encoded rows itself, while nothing that decides them changes"), "overwrite_cache",
           "dataset_prepared_path", "tokenized_path", "preprocessing_batch_size", "cache_dir", "prepared_dataset_path",
           "dataset_keep_in_memory",
           "dataset_shard_num", "dataset_shard_idx", "data_shared_file_system", "streaming_multipack_buffer_size"),
    **_all(drop("a row longer than max_length is truncated, counted and reported"),
           "excess_length_strategy", "min_sample_len",
           "truncation_strategy"),
    # Evaluation and predictions
    **_all(take("training.eval_steps"), "run_val_every_n_steps", "eval_every", "val_check_interval"),
    "evals_per_epoch": _per_epoch("eval"),
    **_all(take("predictions.num_samples"), "num_generation_samples", "max_predict_samples", "eval_table_size"),
    "sample_prompts": take("predictions.prompts"),
    **_all(switch({"predictions.sample_frequency": "eval"}, {"predictions.sample_frequency": "off"}),
           "generate_samples", "predict_with_generate"),
    **_all(take("predictions.sample_frequency"), "sample_every"),
    **_all(take("predictions.max_new_tokens"), "generation_max_new_tokens", "max_generated_tokens",
           "eval_max_new_tokens", "generation_max_length", "eval_table_max_new_tokens"),
    **_all(by(_decoding, "predictions.sample"), "temperature", "top_p", "top_k", "generation_temperature",
           "generation_do_sample", "do_sample", "repetition_penalty", "num_beams", "generation_num_beams"),
    **_all(hinted("early_stopping_patience", "write early_stopping_patience: the evaluations without improvement"),
           "early_stopping"),
    **_all(take("early_stopping_patience"), "patience", "early_stopping_steps"),
    **_all(hinted("predictions.metrics", "write predictions.metrics: [exact_match, …]; `man honed-job` lists them"),
           "compute_metrics", "do_bench_eval", "do_causal_lm_eval", "compute_accuracy", "eval_causal_lm_metrics"),
    # Saving and the rest
    **_all(take("training.save_steps"), "save_every", "checkpoint_every", "checkpointing_steps"),
    "saves_per_epoch": _per_epoch("save"),
    **_all(take("training.save_total_limit"), "max_checkpoints", "keep_checkpoints"),
    "save_only_model": drop("resuming from a checkpoint needs the optimizer's state"),
    **_all(take("output_dir"), "output_path", "save_dir", "out_dir", "output", "save_path", "lora_out_dir"),
    **_all(switch({"save_merged": "bfloat16"}), "merge_lora", "merge_adapter", "save_merged_model", "merge"),
    **_all(hinted("output_dir", "a merge is a separate job: kind: merge with base_model, adapter and output_dir; or "
                              "save_merged: bfloat16 with training"), "export_dir"),
    **_all(drop("honed writes safetensors files of a size that loads everywhere"), "export_size", "export_device",
           "export_legacy_format", "max_shard_size"),
    **_all(never("quantization of the result"), "export_quantization_bit", "export_quantization_dataset",
           "quantize_model", "gguf", "save_gguf"),
    **_all(by(_resume), "auto_resume_from_checkpoints", "auto_resume", "resume", "resume_from_checkpoint",
           "ignore_data_skip"),
    **_all(_tracker("wandb"), "use_wandb", "enable_wandb", "wandb_project", "wandb"),
    **_all(_tracker("mlflow"), "use_mlflow", "mlflow_experiment_name"),
    **_all(_tracker("trackio"), "use_trackio", "trackio_project_name"),
    **_all(_tracker("tensorboard"), "use_tensorboard", "enable_tensorboard"),
    "logging_dir": drop("report_to selects the trackers, and honed where they write"),
    **_all(by(_integrations, "report_to"), "integrations", "metric_logger", "log", "trackers"),
    **_all(never("this tracker", "report_to accepts tensorboard, wandb, mlflow and trackio"),
           "use_swanlab", "use_comet",
           "swanlab_project", "comet_project_name", "use_neptune"),
    **_all(take("name"), "job_name", "project_name", "suffix", "experiment_name", "title", "run_name", "wandb_name",
           "wandb_run_name"),
    **_all(_KIND, "stage", "task", "method", "trainer", "rl", "rlhf_type", "job_type", "task_type", "trainer_type",
           "training_stage", "train_method"),
    **_all(by(_hyperparameters, "training"), "hyperparameters", "training_args", "training_arguments", "sft_config",
           "trainer_args"),
    **_all(by(lambda asked: Advice("remove it: a lora: section trains an adapter", {}) if is_on(asked.value) else
              Advice("remove the lora: section, too: full fine-tuning has no adapter", {"lora": None})),
           "lora.enabled", "lora.enable", "lora.use_lora", "lora.use"),
    **_all(hinted("datasets", "a system prompt for all rows is not supported yet: write it in each row, as its first "
                            "message (role: system) or its `system` column"),
           "system_prompt", "default_system", "system",
           "system_message", "datasets.system_prompt"),
    "metadata": drop("use name as a description"),
    **_all(by(_gpus, "resources"), "gpus", "num_gpus", "n_gpu", "devices", "resources.gpu", "resources.num_gpus",
           "nproc_per_node", "gpu", "gpu_count", "num_processes", "gpu_ids", "ray_num_workers",
           "gpus_per_node", "resources.gpus_per_node", "gpus_per_task", "resources.gpus_per_task"),
    **_all(take("resources.gpus", _gres), "gres", "resources.gres"),
    **_all(drop("memory and CPU limits are set by the administrator in units"), "mem", "cpus_per_task",
           "mem_per_cpu", "mem_per_gpu", "resources.mem", "resources.memory", "resources.cpus",
           "resources.cpus_per_task", "ntasks", "ntasks_per_node", "cpus"),
    **_all(drop("on a cluster, resources.profile selects the administrator's settings; else class and priority set "
                "the order of jobs"), "partition", "account", "qos", "constraint", "nodelist", "exclusive"),
    **_all(take("notify.mail"), "mail_user", "email", "notify.email", "notify.mail_user"),
    **_all(by(_nodes, "resources"), "nnodes", "num_nodes", "num_machines", "node_count", "nodes",
           "resources.num_nodes"),
    **_all(never("this way to train on several machines"), "master_addr", "use_ray"),
    **_all(take("batch.effective"), "effective_batch_size", "global_batch_size", "total_batch_size",
           "batch.effective_batch_size", "batch.size"),
    **_all(take("retry.max_attempts"), "max_attempts", "max_retries", "retries", "retry.max_retries"),
    **_all(take("time_limit_sec"), "time_limit", "timeout", "timeout_sec", "max_time", "walltime"),
    "time": take("time_limit_sec", _scheduler_seconds),
    **_all(take("depends_on", _dependencies), "dependency", "dependencies", "after"),
    **_all(drop("honectl submit --hold submits a job on hold"), "hold", "held"),
    **_all(_STAGES, "fsdp", "fsdp_config", "deepspeed", "tensor_parallel_size", "context_parallel_size", "ddp",
           "local_rank", "world_size", "parallelism_config", "dist_config", "pipeline_model_parallel_size",
           "tensor_model_parallel_size", "expert_model_parallel_size", "expert_parallel_size", "sequence_parallel",
           "sequence_parallel_degree", "dp_shard_size", "dp_replicate_size", "cp_size", "cp_mode", "special_fsdp_type",
           "fsdp_version", "fsdp_transformer_layer_cls_to_wrap", "use_distributed_optimizer", "torchdistx_path"),
    **_all(drop("honed writes the log: honectl logs shows it"), "disable_tqdm", "log_level", "verbose",
           "profiler_steps", "log_on_each_node", "debug", "strict", "logging_nan_inf_filter", "is_preprocess",
           "include_effective_tokens_per_second", "print_param_status", "wandb_mode", "report_model_size"),
    "plot_loss": drop("every report has the plots: honectl report shows its path"),
    **_all(_HUB, "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "push_dataset_to_hub",
           "hub_always_push", "hub_revision", "hf_use_auth_token", "push_to_hub_model_id", "hub_push_checkpoint"),
    "auto_find_batch_size": drop("another batch size would change the result; honed reduces it and keeps the product "
                                 "with accumulation"),
    "enable_jit_checkpoint": drop("honed writes a checkpoint at every stop"),
    **_all(drop("config.json determines the class"), "model_class", "auto_model_class", "llama4_linearized_experts"),
    **_all(drop("`honectl check` reports what a template does with reasoning"), "datasets.field_thinking",
           "datasets.template_thinking_key"),
    **_all(drop("predictions use the trained model"), "sample_backend"),
    "infer_backend": drop("predictions use the trained model"),
}  # fmt: skip

_MODEL_NAMES = dict.fromkeys(("name", "path", "id", "base", "name_or_path", "model"), "base_model")
#: Sections of other tools: the section of our keys (dotted; empty for the top level), and keys that mean something else
#: there.
SECTIONS: dict[str, tuple[str, Mapping[str, str]]] = {
    **dict.fromkeys(
        (
            "args",
            "training_args",
            "training_arguments",
            "sft_config",
            "trainer_args",
            "hyperparameters",
            "hparams",
            "hyper_parameters",
            "trainer_config",
            "train_config",
            "train",
            "trainer",
            "sft",
            "train_args",
            "training_config",
            "training_parameters",
            "sft_args",
            "params",
            "optimizer_params",
            "optimizer_args",
        ),
        ("training", {}),
    ),
    **dict.fromkeys(("model", "model_args", "model_config", "base"), ("", _MODEL_NAMES)),
    **dict.fromkeys(("config", "job", "spec", "data_args"), ("", {})),
    **dict.fromkeys(
        ("optimizer", "optim", "optimizer_config"),
        ("training", {"name": "optim", "type": "optim", "betas": "adam_betas"}),
    ),
    **dict.fromkeys(
        ("scheduler", "lr_scheduler"), ("training", {"name": "lr_scheduler_type", "type": "lr_scheduler_type"})
    ),
    **dict.fromkeys(("peft", "peft_config", "lora_config", "lora_args", "adapter_config", "peft_args"), ("lora", {})),
}

#: Families of names: other tools' plugins, trackers and kernels.
FAMILIES: tuple[tuple[re.Pattern[str], Synonym], ...] = (
    (re.compile(r"(wandb|mlflow|comet|swanlab|trackio|neptune|lark|otel)_\w+|use_otel_metrics"), _TRACKED),
    (re.compile(r"(ddp|deepspeed|fsdp|nccl)_\w+"), _STAGES),
    (re.compile(r"(mcore|megatron|overlap|bias_activation|apply_rope|moe_token|recompute)_\w+"), _STAGES),
    (re.compile(r"liger_\w+"), _LIGER),
    (re.compile(r"(lora_(qkv|o|mlp|embedding)_kernel|flash_attn_\w+|use_\w+_kernels?|kt_\w+|use_kt)"), _SPEED),
    (
        re.compile(
            r"(trl|vllm|ebft|grpo|dpo|kto|orpo|simpo|cpo|ppo|pref|rl|rm|reward|reference_model|ref_model|beta)(_\w+)?"
        ),
        never("training on preferences or rewards (DPO, KTO, ORPO, GRPO)", _SFT_ALONE),
    ),
    (re.compile(r"(badam|lisa|relora|jagged_restart|muon|diffusion)(_\w+)?"), never("this training method")),
    (re.compile(r"(galore|apollo)_\w+"), hinted("training.optim_args", "write training.optim_args: rank=…,scale=…")),
    (re.compile(r"(gptq|awq|hqq)_\w+"), drop("a quantized base model contains its own quantization settings")),
    (re.compile(r"hub_\w+"), _HUB),
    (
        re.compile(r"(oft|loftq|ia3|vera|boft)_\w+"),
        never("this kind of adapter", "lora: supports LoRA, DoRA and rsLoRA"),
    ),
)

#: Values of other tools -> ours: the first one that the key accepts is suggested.
VALUES: dict[str, tuple[str, ...]] = {
    **{word: (ours,) for word, ours in _DTYPES.items() if word not in ("auto", "no")},
    "full": ("float32",),
    **{word: (ours,) for word, ours in OPTIMIZERS.items()},
    **dict.fromkeys(("int4", "nf4", "fp4", "4", "4-bit", "bnb-4bit", "4bits"), ("4bit",)),
    **dict.fromkeys(("int8", "8", "8-bit", "bnb-8bit", "8bits"), ("8bit",)),
    **dict.fromkeys(("fa2", "flash", "flash_attention", "flash_attn", "flash-attention-2"), ("flash_attention_2",)),
    **dict.fromkeys(("xformers", "flex_attention", "disabled"), ("auto",)),
    **dict.fromkeys(("chat", "chatml", "chat_template", "openai", "conversational", "messages"), ("messages",)),
    **dict.fromkeys(("prompt-completion", "instruction"), ("prompt_completion",)),
    **dict.fromkeys(("completion", "pretrain", "raw", "plain"), ("text",)),
    **dict.fromkeys(("json", "jsonl", "csv", "parquet"), ("auto",)),
    **dict.fromkeys(("never", "off", "false", "none"), ("no", "off", "none")),
    **dict.fromkeys(("epochs", "every_epoch"), ("epoch",)),
    **dict.fromkeys(("step",), ("steps",)),
    **dict.fromkeys(("hf", "huggingface", "trl", "peft"), ("transformers",)),
    "qlora": ("4bit", "sft"),
    **dict.fromkeys(("train", "lora", "finetune", "fine-tune", "pt", "pretrain", "supervised"), ("sft",)),
}

#: Keys that would hold a secret. Their values are never shown.
SECRETS = re.compile(
    r"(.*_)?(api_key|apikey|secret|secret_key|password|passwd|access_key|credentials?|(hf|hub|auth|access|api|job|bearer|wandb)_token|token)"
)
#: Patterns of tokens: Hugging Face, GitHub, OpenAI and similar, Slack, AWS, and signed ones (JWT).
SECRET_VALUES = re.compile(
    r"(?<![A-Za-z0-9])(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|AKIA[A-Z0-9]{16}|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.)"
)


def find(name: str, section: str) -> Synonym | None:
    """Return the advice for a name, in a section or anywhere."""
    if meant := NAMES.get(f"{section}.{name}") or NAMES.get(name):
        return meant
    return next((synonym for pattern, synonym in FAMILIES if pattern.fullmatch(name)), None)
