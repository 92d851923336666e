"""The parameters of a job, counted from a checkpoint's headers: as they will be loaded, and those that are trained.

The counts are sums over tensors of known shapes, within 5 % of the measured memory (tests/worker/test_memory_used.py).
No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from honed.inputs import modality
from honed.inputs.basemodel import BITS, QUANTIZATION_STATE, AdapterInfo, BaseModelInfo, Tensor
from honed.job.plan_file import Precision
from honed.plan import loadedname, placement, precision
from honed.spec.spec import JobSpec, LoraSpec
from honed.system import installed

Shape = tuple[int, ...]
#: peft's `trainable_token_indices`: rows of the input embedding, or by module.
TokenRows = list[int] | dict[str, list[int]]
#: `linear` and `head` are nn.Linear or GPT-2's Conv1D; bitsandbytes quantizes `linear` alone. `experts` are the stacked
#: weights that transformers 5 makes of a mixture's experts, and `router` chooses among them: both are bare parameters,
#: which bitsandbytes does not quantize.
Role = Literal["linear", "head", "embedding", "experts", "router", "other"]

#: Bytes of a bitsandbytes 4-bit weight beside its packed values, with the double quantization that the worker sets: one
#: byte of scale per block of 64, a float32 for each 256 of those, two tables of float32 and an offset.
BLOCK_4BIT, NESTED_BLOCK_4BIT, TABLES_4BIT = 64, 256, 4 * (16 + 256 + 1)
#: Families whose linear layers are Conv1D, stored as (in, out).
CONV1D_TYPES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
#: Families whose experts peft adapts although they are no linear layers, with the experts' names in older checkpoints.
#: A list, a regular expression or all-linear that matches these names applies to the stacked weights.
EXPERT_NAMES: dict[str, dict[str, str]] = {
    **{
        family: {"gate": "router", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
        for family in ("mixtral", "minimax", "minimax_m2")
    },
    **{
        family: {"gate": "router", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
        for family in (
            "afmoe",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "dots1",
            "ernie4_5_moe",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "longcat_flash",
            "solar_open",
            "mellum",
            "qwen3_moe",
            "qwen3_next",
            "hunyuan_v1_moe",
            "flex_olmo",
            "olmoe",
            "exaone_moe",
            "cohere2_moe",
            "glm4v_moe",
        )
    },
}

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_projection)$|^head$")
#: Embeddings; not those of an image's patches, nor what projects an encoder's (Gemma 3n, Gemma 4): linear layers.
_EMBEDDING = re.compile(r"(^|\.)(?![^.]*(patch|_proj))([^.]*embed[^.]*|wte|wpe|position_embeddings|[^.]*_token)$")
_EXPERT = re.compile(r"(?P<prefix>.*\.experts)\.(?P<number>\d+)\.(?P<leaf>w[123]|(gate|up|down)_proj)\.weight")
_STACKED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")
#: Routers that transformers keeps as bare parameters, by their stored names; elsewhere they are linear layers.
_ROUTER = re.compile(r".*\.(block_sparse_moe|mlp|moe|feed_forward|mixer)\.(router\.)?gate\.weight")
_ROUTERS = {
    "phimoe": re.compile("(?!)"),
    "gpt_oss": re.compile(r".*\.mlp\.router\.weight"),
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared", "granitemoehybrid"),
        re.compile(r".*\.block_sparse_moe\.router\.layer\.weight"),
    ),
}
#: Embeddings that are not of words alone, with which no head shares its weights.
_NOT_TIED = re.compile(r"(^|\.)(wpe|[^.]*position[^.]*|[^.]*per_layer[^.]*)$")
#: Layers that predict several tokens, which transformers ignores: apart, or after the last layer.
_AHEAD = re.compile(r"(^|\.)(mtp|nextn)\w*\.")
_NUMBERED = re.compile(r"(^|\.)layers\.(?P<number>\d+)\.")
#: The block that the hybrid layers of Zamba share. It is stored once, and each layer has an adapter of its own for it.
_HYBRID = re.compile(r"\.layers\.(?P<number>\d+)\.mamba_decoder\.")
_SHARED = re.compile(r"(?P<before>.*\.layers\.)(?P<layer>\d+)(?P<after>\.shared_transf(ormer)?\..*)")
#: Names of an adapter's own tensors.
_ADAPTED = re.compile(r"\.(lora_\w+|trainable_tokens_delta)(\.|$)")
#: Masks and frequencies that older checkpoints contain and transformers ignores.
_BUFFER = re.compile(r"(^|\.)((attn|attention)\.(bias|masked_bias)|rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class Parameter:
    """One parameter as it will be loaded."""

    name: str  #: once loaded as far as it is known (loadedname.py), else as in the checkpoint
    shape: Shape
    role: Role
    stored_bytes: int | None = None  #: in a quantized checkpoint, whose weights stay as they are stored
    is_transposed: bool = False  #: Conv1D: (in, out)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight").removesuffix(".bias")

    @property
    def num_outputs(self) -> int:
        return self.shape[1] if self.is_transposed else self.shape[0]


@dataclass(frozen=True)
class Trained:
    """Shapes of all trained tensors."""

    added: tuple[Shape, ...]  #: by peft: low-rank matrices, magnitudes, full copies of modules_to_save
    own: tuple[Shape, ...]  #: the model's own: all in full fine-tuning, else the biases that lora.bias trains
    embeddings: frozenset[int] = frozenset()  #: indices into `shapes` whose states 8-bit optimizers keep in 32 bits

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.added + self.own

    @property
    def num_added(self) -> int:
        return sum(map(math.prod, self.added))

    @property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self.shapes))


# --- As loaded --------------------------------------------------------------------------------------------------------


def parameters(model: BaseModelInfo) -> tuple[Parameter, ...]:
    """Return the parameters that the checkpoint's tensors become once loaded; one nameless one for pickled weights."""
    if not model.tensors:
        return (Parameter("", (model.num_parameters,), "other"),)
    tensors = {
        tensor.name: tensor
        for tensor in model.tensors
        if not QUANTIZATION_STATE.search(tensor.name)
        and (not model.speaks or tensor.name.startswith("thinker."))
        and not _looks_ahead(tensor.name, model.config)
    }
    state: dict[str, int] = {}
    for tensor in model.tensors:
        if QUANTIZATION_STATE.search(tensor.name):
            owner = QUANTIZATION_STATE.sub("", tensor.name).removesuffix(".weight")
            state[owner] = state.get(owner, 0) + tensor.num_bytes
    experts: dict[str, list[tuple[str, Tensor]]] = {}
    made = []
    is_tied = model.config.get("tie_word_embeddings") is True and any(map(_is_embedding, tensors.values()))
    for tensor in tensors.values():
        if match := _EXPERT.fullmatch(tensor.name):
            stacked = "down_proj" if match["leaf"] in ("w2", "down_proj") else "gate_up_proj"
            experts.setdefault(f"{match['prefix']}.{stacked}", []).append((match["number"], tensor))
        elif not (_is_buffer(tensor) or (is_tied and _HEAD.search(_module(tensor)))):
            made.append(_parameter(tensor, model, state))
    made += [_stacked(name, expert, model, state) for name, expert in experts.items()]
    translated = loadedname.translation(model)
    return tuple(replace(item, name=translated(item.name)) for item in made)


def _looks_ahead(name: str, config: Mapping[str, Any]) -> bool:
    if _AHEAD.search(name):
        return True
    match, widths = _NUMBERED.search(name), sizes(config)
    has_more = any(part.get("num_nextn_predict_layers") for part in (config, config.get("text_config") or {}))
    return bool(has_more and match and widths and int(match["number"]) >= widths.layers)


def _module(tensor: Tensor) -> str:
    return tensor.name.removesuffix(".weight")


def _is_buffer(tensor: Tensor) -> bool:
    is_bias = tensor.name.endswith(".bias") and len(tensor.shape) == 1
    return _BUFFER.search(tensor.name) is not None and not is_bias


def _is_embedding(tensor: Tensor) -> bool:
    return len(tensor.shape) == 2 and _EMBEDDING.search(_module(tensor)) is not None


def _parameter(tensor: Tensor, model: BaseModelInfo, state: dict[str, int]) -> Parameter:
    shape, role = tensor.shape, _role(tensor, model)
    stored = None
    if model.is_quantized and tensor.dtype in ("uint8", "int8", "int32"):
        stored = tensor.num_bytes + state.get(_module(tensor), 0)
        shape = _unpacked(tensor, model)
    return Parameter(tensor.name, shape, role, stored, role == "linear" and model.model_type in CONV1D_TYPES)


def _role(tensor: Tensor, model: BaseModelInfo) -> Role:
    module = _module(tensor)
    if _STACKED.fullmatch(tensor.name):
        return "experts"
    if module == tensor.name or len(tensor.shape) != 2:
        return "other"  # norms, biases, convolutions
    if _HEAD.search(module):
        return "head"
    if _EMBEDDING.search(module):
        return "embedding"
    if _ROUTERS.get(model.model_type, _ROUTER).fullmatch(tensor.name):
        return "router"
    return "linear"


def _unpacked(tensor: Tensor, model: BaseModelInfo) -> Shape:
    """Return the shape of a weight that bitsandbytes stores as a column of bytes, two weights each.

    One side is known, the hidden size; a weight that it does not divide stays flat.
    """
    widths = sizes(model.config)
    if tensor.dtype != "uint8" or model.quantization != "4bit" or widths is None:
        return tensor.shape
    number = 2 * tensor.num_elements
    return (number // widths.hidden, widths.hidden) if number % widths.hidden == 0 else (number,)


def _stacked(name: str, members: list[tuple[str, Tensor]], model: BaseModelInfo, state: dict[str, int]) -> Parameter:
    """Return one weight for all experts of a layer: (experts, out, in), with gate above up."""
    num_experts = len({number for number, _ in members})
    number = sum(tensor.num_elements for _, tensor in members)
    num_inputs = members[0][1].shape[-1]
    stored = None
    if model.is_quantized:
        stored = sum(tensor.num_bytes + state.get(_module(tensor), 0) for _, tensor in members)
    return Parameter(name, (num_experts, number // num_experts // max(1, num_inputs), num_inputs), "experts", stored)


def weights_bytes(model: BaseModelInfo, loaded: Iterable[Parameter], choices: Precision) -> int:
    size = BITS[choices.load_dtype] // 8
    quantization = "none" if model.is_quantized else choices.quantization
    return sum(_parameter_bytes(parameter, quantization, size) for parameter in loaded)


def scale_bytes(model: BaseModelInfo, loaded: Iterable[Parameter], choices: Precision) -> int:
    """Return the bytes of 4-bit weights' scales, which are whole on every device of a divided model."""
    if choices.quantization != "4bit" or model.is_quantized:
        return 0
    quantized = [item for item in loaded if item.stored_bytes is None and is_quantizable(item)]
    return sum(_parameter_bytes(item, "4bit", 0) - math.ceil(item.num_elements / 2) for item in quantized)


def is_quantizable(parameter: Parameter) -> bool:
    """Tell whether a parameter is one that bitsandbytes quantizes, here or before it was stored; the worker leaves out
    vision and audio encoders."""
    return parameter.role == "linear" and modality.part(parameter.module) == "language"


def _parameter_bytes(parameter: Parameter, quantization: str, size: int) -> int:
    number = parameter.num_elements
    if parameter.stored_bytes is not None:
        return parameter.stored_bytes
    if quantization == "none" or not is_quantizable(parameter):
        return number * size
    if quantization == "8bit":
        return number + 4 * parameter.num_outputs
    blocks = math.ceil(number / BLOCK_4BIT)
    return math.ceil(number / 2) + blocks + 4 * math.ceil(blocks / NESTED_BLOCK_4BIT) + TABLES_4BIT


# --- Widths -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """A model's widths, as its config gives them."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    mlp: int  #: width, summed over the experts that see one token


def sizes(config: Mapping[str, Any]) -> Sizes | None:
    """Return the widths that a config gives, under any family's names; None where some are missing."""
    for inner in ("thinker_config", "text_config"):
        config = nested if isinstance(nested := config.get(inner), dict) else config

    def first(*names: str) -> int | None:
        return next((config[name] for name in names if isinstance(config.get(name), int)), None)

    hidden, layers = first("hidden_size", "n_embd", "d_model"), first("num_hidden_layers", "n_layer", "num_layers")
    heads, vocabulary = first("num_attention_heads", "n_head", "num_heads"), first("vocab_size")
    if not (hidden and layers and heads and vocabulary):
        return None
    wide = first("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * hidden
    active = first("num_experts_per_tok", "num_experts_per_token", "moe_topk") or 1
    return Sizes(hidden, layers, heads, vocabulary, wide * active)


# --- What is trained --------------------------------------------------------------------------------------------------


def trained(spec: JobSpec, model: BaseModelInfo, adapter: AdapterInfo | None = None) -> Trained:
    """Return the shapes of all tensors that have a gradient."""
    if adapter is not None:
        return Trained(_continued(adapter, model) or ((adapter.num_parameters,),), ())
    is_trainable, parts = loadedname.is_trainable(model), precision.trained_parts(spec)
    every, is_held = parameters(model), loadedname.is_held(model)
    loaded = tuple(item for item in every if is_trainable(item.name))
    inside = tuple(item for item in loaded if modality.part(item.module) in parts)
    if spec.lora is None:
        embeddings = frozenset(place for place, parameter in enumerate(inside) if parameter.role == "embedding")
        return Trained((), tuple(parameter.shape for parameter in inside), embeddings)
    held = tuple(item for item in every if not is_trainable(item.name) and is_held(item.name))
    return _lora(spec.lora, loaded, inside, held, model.model_type)


def _continued(adapter: AdapterInfo, model: BaseModelInfo) -> tuple[Shape, ...]:
    """Return the shapes of a stored adapter's tensors that are trained again: peft may save embeddings beside them."""
    is_trainable = loadedname.is_trainable(model)
    saved, has_biases = adapter.config.get("modules_to_save"), adapter.config.get("bias", "none") != "none"
    whole = [name for name in saved if isinstance(name, str)] if isinstance(saved, list) else []

    def is_trained(name: str) -> bool:
        if _ADAPTED.search(name) or (has_biases and name.endswith(".bias")):
            return True
        parts = name.split(".")
        is_saved = any(".".join(parts[:n]).endswith(item) for n in range(1, len(parts)) for item in whole)
        return is_saved and is_trainable(name)

    return tuple(tensor.shape for tensor in adapter.tensors if is_trained(tensor.name))


def unsure(spec: JobSpec, model: BaseModelInfo, adapter: AdapterInfo | None = None) -> str:
    """Return why the number of trained parameters is an estimate; empty where it is exact."""
    lora = spec.lora
    if adapter is not None:
        return "" if adapter.tensors else "the tensors of a pickled adapter are not known"
    if not model.tensors:
        return "the names of pickled weights are not known"
    if model.is_quantized:
        return "the shapes of stored quantized weights are not known"
    known = installed.known_model_types()[0]
    if "auto_map" in model.config or (model.model_type not in known and known):
        return "the model's code is not that of transformers"
    if model.has_audio or model.speaks:
        return "the names of modules are not known for models that hear"
    if lora is None:
        return ""
    patterns = [item for item in (lora.target_modules, lora.exclude_modules) if isinstance(item, str)]
    patterns += [item for item in lora.rank_pattern or {} if "." in item]
    if model.has_vision and set(patterns) - {"all-linear"}:
        return "modules have other names once the model is loaded"
    loaded = parameters(model)
    for name in lora.target_parameters or ():
        if not any(_is_named(lora.model_copy(update={"target_parameters": [name]}), item) for item in loaded):
            return f"lora.target_parameters: {name} is not stored under this name"
    if any(item.role not in ("head", "embedding") and len(item.shape) > 1 for item in _saved(lora, loaded).values()):
        return "lora.modules_to_save: a module may have other parameters once the model is loaded"
    named = [
        name
        for names in (lora.target_modules, lora.exclude_modules, lora.modules_to_save)
        if isinstance(names, list)
        for name in names
    ]
    chosen = [item.module for item in loaded if item.role in ("linear", "other") and _is_target(lora, item, set())]
    if name := loadedname.unknown(model, named, chosen if named else ()):
        return f"{name} may have another name once the model is loaded"
    return ""


def passed_over(spec: JobSpec, model: BaseModelInfo) -> list[str]:
    """Return the linear layers that get no adapter though their last names are chosen: peft takes these names for the
    experts of the same family alone."""
    lora, names = spec.lora, EXPERT_NAMES.get(model.model_type, {})
    if lora is None or not names or (isinstance(lora.target_modules, str) and lora.target_modules != "all-linear"):
        return []
    parts = precision.trained_parts(spec)

    def is_passed_over(param: Parameter) -> bool:
        leaf = param.module.rpartition(".")[2]
        return (
            param.role == "linear"
            and leaf in names
            and (lora.target_modules == "all-linear" or leaf in lora.target_modules)
            and modality.part(param.module) in parts
            and not _is_named(lora, param)
            and placement.is_in_layers(lora, param.module)
            and not placement.is_excluded(param.module, lora.exclude_modules)
        )

    return [parameter.name for parameter in parameters(model) if is_passed_over(parameter)]


def _lora(
    lora: LoraSpec,
    loaded: tuple[Parameter, ...],
    inside: tuple[Parameter, ...],
    held: tuple[Parameter, ...],
    model_type: str,
) -> Trained:
    """Return the shapes trained for a LoraConfig; `inside` are the parameters in the parts that get an adapter, `held`
    those that only a copy of their module trains."""
    saved = _saved(lora, (*loaded, *held))
    names = EXPERT_NAMES.get(model_type, {})
    through_experts = experts_targeted(lora, loaded, names)
    added: list[Shape] = []
    targets = []
    for parameter in _with_tied(inside):
        rank = _rank(lora, parameter, through_experts)
        if _is_named(lora, parameter):
            added += _parameter_adapter(parameter, rank) if _is_kept(lora, parameter, names) else []
        elif parameter.role in ("experts", "router") and names:
            count = parameter.shape[0] if parameter.role == "experts" else 1
            is_wanted = placement.wanted(parameter.name, lora, names, count) == "all"
            is_kept = is_wanted and _is_kept(lora, parameter, names)
            added += _expert_adapter(parameter, rank, through_experts) if is_kept else []
        elif _is_target(lora, parameter, set(names)) and not _is_within_saved(lora, parameter):
            targets.append(parameter)
            added += [(rank, parameter.num_elements // max(1, parameter.num_outputs)), (parameter.num_outputs, rank)]
            magnitudes = parameter.shape[-1] if parameter.role == "embedding" else parameter.num_outputs
            added += [(magnitudes,)] if lora.use_dora else []
    embeddings = frozenset(
        place for place, parameter in enumerate(saved.values(), len(added)) if parameter.role == "embedding"
    )
    added += [parameter.shape for parameter in saved.values()]
    added += [(len(ids), parameter.shape[1]) for parameter, ids in token_rows(lora.trainable_token_indices, loaded)]
    apart = tuple(item for item in loaded if item.name not in saved)
    biases = _biases(lora, apart, {parameter.module for parameter in targets})
    return Trained(tuple(added), tuple(biases), embeddings)


def _with_tied(loaded: tuple[Parameter, ...]) -> Iterator[Parameter]:
    """Yield the parameters, and those that the checkpoint stores once for several modules: a head with the embedding,
    and the block that layers share.
    """
    yield from loaded
    if (head := tied_head(loaded)) is not None:
        yield head
    yield from _shared(loaded)


def input_embedding(loaded: Iterable[Parameter]) -> Parameter | None:
    """Return the embedding of words, if there is one: that with the most rows."""
    embeddings = [item for item in loaded if item.role == "embedding" and not _NOT_TIED.search(item.module)]
    return min(embeddings, key=lambda embedding: (-embedding.shape[0], embedding.num_elements), default=None)


def tied_head(loaded: tuple[Parameter, ...]) -> Parameter | None:
    """Return the head that has the embedding's weights; None where it has its own."""
    words = input_embedding(loaded)
    if words is None or any(item.role == "head" for item in loaded):
        return None
    has_dense = any(item.name.startswith("lm_head.") for item in loaded)
    return Parameter("decoder.weight" if has_dense else "lm_head.weight", words.shape, "head")


def asked_token_rows(spec: JobSpec, adapter: AdapterInfo | None) -> TokenRows | None:
    """Return the rows that a job's adapter trains, which it makes or continues."""
    indices = spec.lora.trainable_token_indices if spec.lora is not None else None
    stored = adapter.config.get("trainable_token_indices") if adapter is not None else None
    return stored if isinstance(stored, list | dict) else indices


def token_rows(asked: TokenRows | None, loaded: tuple[Parameter, ...]) -> list[tuple[Parameter, list[int]]]:
    """Return what trainable_token_indices trains rows of, and which; a tied head is not counted again."""
    if not asked:
        return []
    if isinstance(asked, list):
        words = input_embedding(loaded)
        return [(words, asked)] if words is not None else []
    return [(word, ids) for name, ids in asked.items() for word in named_words(name, loaded)]


def named_words(name: str, loaded: Iterable[Parameter]) -> list[Parameter]:
    """Return the embeddings and heads of this name, or of its last part: what is before it may change by loading."""
    words = [item for item in loaded if item.role in ("embedding", "head")]
    leaf = name.rpartition(".")[2]
    exact = [word for word in words if f".{word.module}".endswith(f".{name}")]
    return exact or [word for word in words if word.module.rpartition(".")[2] == leaf]


def is_head(module: str) -> bool:
    """Tell whether a name is one that families give their head."""
    return _HEAD.search(module) is not None


def key_of(lora: LoraSpec, parameter: Parameter, model_type: str = "") -> str | None:
    """Return the key by which a parameter's module is adapted or trained in full, if any."""
    if any(_owner(parameter).endswith(name) for name in lora.modules_to_save or ()):
        return "modules_to_save"
    if _is_named(lora, parameter):
        return "target_parameters"
    return "target_modules" if _is_target(lora, parameter, set(EXPERT_NAMES.get(model_type, {}))) else None


def _shared(loaded: tuple[Parameter, ...]) -> Iterator[Parameter]:
    """Yield a shared block's parameters for the layers that use it and do not store it; the blocks take turns."""
    blocks: dict[int, list[tuple[str, str, Parameter]]] = {}
    for item in loaded:
        if match := _SHARED.fullmatch(item.name):
            blocks.setdefault(int(match["layer"]), []).append((match["before"], match["after"], item))
    if not blocks:
        return
    layers = {int(hybrid["number"]) for item in loaded if (hybrid := _HYBRID.search(item.name))}
    stored = [blocks[number] for number in sorted(blocks)]
    for place, layer in enumerate(sorted(layers)):
        if layer not in blocks:
            for before, after, item in stored[place % len(stored)]:
                yield replace(item, name=f"{before}{layer}{after}")


def _is_target(lora: LoraSpec, parameter: Parameter, expert_names: set[str]) -> bool:
    """Match a name as peft does: `all-linear`, a regular expression for the whole name, or the ends of names."""
    module = parameter.module
    is_convolution = parameter.role == "other" and 3 <= len(parameter.shape) <= 5
    if not (is_convolution or parameter.role in ("linear", "head", "embedding")):
        return False
    if not parameter.name.endswith(".weight"):
        return False
    if placement.is_excluded(module, lora.exclude_modules):
        return False
    leaf = module.rpartition(".")[2]
    if leaf in expert_names and not isinstance(lora.target_modules, list):
        return False  # peft resolves these to the ends of names, and applies them to the experts
    if isinstance(lora.target_modules, list) and expert_names & {leaf} & set(lora.target_modules):
        return False
    if lora.target_modules == "all-linear":
        return parameter.role == "linear" and placement.is_in_layers(lora, module)
    return placement.matches(module, lora.target_modules) and placement.is_in_layers(lora, module)


def _rank(lora: LoraSpec, parameter: Parameter, through_experts: set[str]) -> int:
    """Return an adapter's rank. Gate and up of experts share one of twice the rank, unless the job gives it."""
    is_parameter = parameter.role in ("experts", "router")
    names = placement.spellings(parameter.name if is_parameter else parameter.module)
    for pattern, rank in (lora.rank_pattern or {}).items():
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
            return rank
    leaf = parameter.name.rpartition(".")[2]
    return 2 * lora.r if leaf == "gate_up_proj" and leaf in through_experts and is_parameter else lora.r


def experts_targeted(lora: LoraSpec, loaded: tuple[Parameter, ...], names: dict[str, str]) -> set[str]:
    """Return the names among router, gate_up_proj and down_proj that get an adapter."""
    targets = lora.target_modules
    if targets == "all-linear":
        return set(names.values())
    if isinstance(targets, list):
        return {names[leaf] for leaf in (target.rpartition(".")[2] for target in targets) if leaf in names}
    prefixes = {parameter.module.rpartition(".")[0] for parameter in loaded if parameter.role in ("experts", "router")}
    return {
        to for leaf, to in names.items() if any(placement.matches(f"{prefix}.{leaf}", targets) for prefix in prefixes)
    }


def _is_named(lora: LoraSpec, parameter: Parameter) -> bool:
    names = placement.spellings(parameter.name)
    return any(name == item or name.endswith(f".{item}") for item in lora.target_parameters or () for name in names)


def _parameter_adapter(parameter: Parameter, rank: int) -> list[Shape]:
    """Return the shapes of the adapter of a parameter in target_parameters: one of the rank for every expert."""
    num_experts, num_outputs, num_inputs = (1, 1, *parameter.shape)[-3:]
    stacked = num_experts * rank
    return [(stacked, num_inputs), (num_outputs, stacked)]


def _is_kept(lora: LoraSpec, parameter: Parameter, names: dict[str, str]) -> bool:
    """Tell whether layers_to_transform and exclude_modules leave experts or a router their adapter."""
    count = parameter.shape[0] if parameter.role == "experts" else 1
    out = placement.covered(parameter.name, lora.exclude_modules, names, count)
    return placement.is_in_layers(lora, parameter.name) and out == "none"


def _expert_adapter(parameter: Parameter, rank: int, targeted: set[str]) -> list[Shape]:
    """Return the shapes of the adapter that peft stacks for the experts."""
    if parameter.role == "router":
        return [(rank, parameter.shape[1]), (parameter.shape[0], rank)] if "router" in targeted else []
    leaf = parameter.name.rpartition(".")[2]
    if leaf not in targeted:
        return []
    return _parameter_adapter(parameter, rank)


def _saved(lora: LoraSpec, loaded: tuple[Parameter, ...]) -> dict[str, Parameter]:
    """Return the parameters in modules_to_save: peft matches the ends of module names, and copies everything below."""
    return {parameter.name: parameter for parameter in _with_tied(loaded) if _is_saved(lora, parameter)}


def _is_saved(lora: LoraSpec, parameter: Parameter) -> bool:
    parts = _owner(parameter).split(".")
    above = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return any(module.endswith(name) for module in above for name in lora.modules_to_save or ())


def _owner(parameter: Parameter) -> str:
    """Return the name of the module that has a parameter; stacked experts are one of their container."""
    return parameter.module.rpartition(".")[0] if parameter.role == "experts" else parameter.module


def _is_within_saved(lora: LoraSpec, parameter: Parameter) -> bool:
    """Tell whether a module gets no adapter for being saved: peft compares whole parts of names here."""
    return any(re.match(rf"(^|.*\.){name}($|\..*)", parameter.module) for name in lora.modules_to_save or ())


def _biases(lora: LoraSpec, loaded: tuple[Parameter, ...], targets: set[str]) -> list[Shape]:
    biases = [parameter for parameter in loaded if parameter.name.endswith(".bias") and lora.bias != "none"]
    return [bias.shape for bias in biases if lora.bias == "all" or bias.module in targets]
