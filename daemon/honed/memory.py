"""How much memory a job will take, estimated before anything is loaded, without torch.

    headers ──► the parameters as they will be loaded ──► weights (quantization state included)
    lora, or all of them ──► the trained parameters ──► adapter, gradients, optimizer
    config, batch, length ──► activations

Weights, adapter, gradients and optimizer are sums over tensors whose shapes are known, and within 5 % of what is held
(tests/worker/test_memory.py). Activations are a model of what a forward pass keeps, and are rough. So a job is refused
only where it cannot fit even if gradients and activations are never there at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from honed import precision, rule
from honed.basemodel import BITS, QUANTIZATION_STATE, AdapterInfo, BaseModelInfo, Tensor, is_vision_module
from honed.device import Device
from honed.error import HonedError, MemoryShortError
from honed.precision import Precision
from honed.spec import JobSpec, LoraSpec

Shape = tuple[int, ...]
#: `linear` and `head` are nn.Linear or GPT-2's Conv1D; of these bitsandbytes quantizes the first alone. `experts` are
#: the stacked weights that transformers 5 makes of a mixture's experts, and `router` chooses among them: parameters of
#: their own, which bitsandbytes leaves as they are.
Role = Literal["linear", "head", "embedding", "experts", "router", "other"]

#: Bytes of a bitsandbytes 4-bit weight beside its packed values, with the double quantization that the worker asks
#: for: one byte of scale a block of 64, a float32 for each 256 of those, two tables of float32 and an offset.
BLOCK_4BIT, NESTED_BLOCK_4BIT, TABLES_4BIT = 64, 256, 4 * (16 + 256 + 1)
#: Parameters for one float32 of scale in an 8-bit optimizer's state; smaller tensors keep float32 states.
BLOCK_OPTIMIZER, MIN_8BIT_SIZE = 256, 4096
#: Elements from which a paged optimizer lets a state be moved into the machine's memory.
MIN_PAGED_SIZE = 100_000
#: Rank to which GaLore and APOLLO project a matrix where optim_args does not say.
PROJECTED_RANK = 128
#: Tokens that a row is taken to have where nothing cuts it and no row was looked at.
UNCUT_LENGTH = 1024
#: Tokens of the logits that TRL's chunked loss has at a time.
CHUNKED_TOKENS = 256
#: What a layer keeps for its backward pass, measured on llama, qwen3, gpt2 and mixtral: numbers of its dtype for each
#: token, in units of the hidden size beside the MLP, in units of the MLP's width, and what adapters add.
KEPT_HIDDEN, KEPT_MLP, KEPT_ADAPTER = 10.5, 4.0, 2.5
#: Eager attention keeps its scores this many times: masked, softmaxed in float32, cast back and multiplied.
KEPT_SCORES = 5

#: Families whose linear layers are Conv1D, stored as (in, out).
CONV1D_TYPES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
#: Families whose experts peft adapts although they are no linear layers, by their names in older checkpoints: a list,
#: a regular expression or all-linear that meets these names means the stacked weights.
EXPERT_NAMES: dict[str, dict[str, str]] = {
    **{
        family: {"gate": "router", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
        for family in ("mixtral", "minimax", "minimax_m2")
    },
    **{
        family: {"gate": "router", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
        for family in (
            "afmoe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "glm4_moe",
            "glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "solar_open", "mellum", "qwen3_moe", "qwen3_next",
            "hunyuan_v1_moe", "flex_olmo", "olmoe", "exaone_moe", "cohere2_moe",
        )
    },
}  # fmt: skip

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_projection)$")
_EMBEDDING = re.compile(r"(^|\.)([^.]*embed[^.]*|wte|wpe|position_embeddings)$")
_EXPERT = re.compile(r"(?P<prefix>.*\.experts)\.(?P<number>\d+)\.(?P<leaf>w[123]|(gate|up|down)_proj)\.weight")
_STACKED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r".*\.(block_sparse_moe|mlp|moe|feed_forward)\.gate\.weight")
#: Masks and frequencies that older checkpoints carry and transformers passes over.
_BUFFER = re.compile(r"(^|\.)((attn|attention)\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")


@dataclass(frozen=True)
class Parameter:
    """One parameter as it will be loaded."""

    name: str  #: as in the checkpoint, or of the stacked weight that experts become
    shape: Shape
    role: Role
    stored_bytes: int | None = None  #: of a quantized checkpoint's, which are held as they are stored
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
    """The shapes of all that is trained."""

    added: tuple[Shape, ...]  #: by peft: low-rank matrices, magnitudes, whole copies of modules_to_save
    own: tuple[Shape, ...]  #: the model's own: all in full fine-tuning, else the biases that are trained along
    embeddings: frozenset[int] = frozenset()  #: places among `shapes` whose states 8-bit optimizers keep in 32 bits

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.added + self.own

    @property
    def num_added(self) -> int:
        return sum(map(math.prod, self.added))

    @property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True)
class Memory:
    """Estimates, in bytes."""

    weights_bytes: int  #: quantization state included
    adapter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    available_bytes: int  #: the device's whole memory, less the administrator's reserve
    batch_size: int
    length: int  #: tokens of the longest row that is expected in a batch
    paged_bytes: int = 0  #: of the optimizer's states, what the device may leave to the machine

    @property
    def total_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        names = ("weights", "adapter", "gradient", "optimizer", "activation")
        return tuple((name, getattr(self, f"{name}_bytes")) for name in names)

    @property
    def fits(self) -> bool:
        return self.total_bytes - self.paged_bytes <= self.available_bytes

    @property
    def can_fit(self) -> bool:
        """Whether it fits where gradients and activations are never whole at once, as without accumulation."""
        lasting = self.weights_bytes + self.adapter_bytes + self.optimizer_bytes - self.paged_bytes
        return lasting + max(self.gradient_bytes, self.activation_bytes) <= self.available_bytes

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total_bytes": self.total_bytes, "fits": self.fits}


def estimate(
    spec: JobSpec,
    model: BaseModelInfo,
    device: Device,
    choices: Precision,
    *,
    adapter: AdapterInfo | None = None,
    reserve_bytes: int = 0,
    num_row_tokens: int | None = None,
    num_rows: int | None = None,
) -> Memory:
    """What the job takes on a device. `num_row_tokens`: of the longest row that was looked at, if any was; `num_rows`:
    all that there are, where that is known: a batch has no more."""
    loaded = parameters(model)
    available_bytes = max(0, device.total_bytes - reserve_bytes)
    if spec.kind == "merge":  # goes from file to file, a module at a time
        largest = max(parameter.num_elements for parameter in loaded) if model.tensors else 0
        return Memory(3 * 4 * largest, adapter.num_bytes if adapter else 0, 0, 0, 0, available_bytes, 0, 0)
    learns = trained(spec, model, adapter)
    size = BITS[choices.adapter_dtype or choices.load_dtype] // 8
    states = [
        (shape, _state_bytes(spec, shape, size, is_embedding=place in learns.embeddings))
        for place, shape in enumerate(learns.shapes)
    ]
    is_paged = (spec.training.optim or "").startswith("paged_") and device.kind == "cuda"
    has_gradients = not re.search("lomo|layerwise", spec.training.optim or "")
    length = row_length(spec, num_row_tokens)
    return Memory(
        weights_bytes=_weights_bytes(model, loaded, choices),
        adapter_bytes=learns.num_added * size,
        gradient_bytes=learns.num_parameters * size if has_gradients else max(map(math.prod, learns.shapes)) * size,
        optimizer_bytes=sum(num_bytes for _, num_bytes in states),
        activation_bytes=_activation_bytes(spec, model, device, choices, loaded, length, num_rows),
        available_bytes=available_bytes,
        batch_size=_rows_at_once(spec.training.per_device_train_batch_size, num_rows),
        length=length,
        paged_bytes=sum(each for shape, each in states if is_paged and math.prod(shape) >= MIN_PAGED_SIZE),
    )


def row_length(spec: JobSpec, num_row_tokens: int | None) -> int:
    """Tokens of a batch's longest row: what is packed to, else the longest seen, cut where the job cuts."""
    training = spec.training
    if training.packing and training.max_length is not None:
        return training.max_length
    limits = [limit for limit in (training.cut_at, num_row_tokens) if limit is not None]
    return min(limits, default=UNCUT_LENGTH)


# --- Parameters -------------------------------------------------------------------------------------------------------


def parameters(model: BaseModelInfo) -> tuple[Parameter, ...]:
    """What the checkpoint's tensors become once loaded; one nameless parameter for pickled weights."""
    if not model.tensors:
        return (Parameter("", (model.num_parameters,), "other"),)
    tensors = {tensor.name: tensor for tensor in model.tensors if not QUANTIZATION_STATE.search(tensor.name)}
    state: dict[str, int] = {}
    for tensor in model.tensors:
        if QUANTIZATION_STATE.search(tensor.name):
            owner = QUANTIZATION_STATE.sub("", tensor.name).removesuffix(".weight")
            state[owner] = state.get(owner, 0) + tensor.num_bytes
    experts: dict[str, list[tuple[str, Tensor]]] = {}
    found = []
    is_tied = model.config.get("tie_word_embeddings") is True and any(map(_is_embedding, tensors.values()))
    for tensor in tensors.values():
        if match := _EXPERT.fullmatch(tensor.name):
            stacked = "down_proj" if match["leaf"] in ("w2", "down_proj") else "gate_up_proj"
            experts.setdefault(f"{match['prefix']}.{stacked}", []).append((match["number"], tensor))
        elif not (_is_buffer(tensor) or (is_tied and _HEAD.search(_module(tensor)))):
            found.append(_parameter(tensor, model, state))
    found += [_stacked(name, each, model, state) for name, each in experts.items()]
    return tuple(found)


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
    if _ROUTER.fullmatch(tensor.name) and model.model_type in EXPERT_NAMES:
        return "router"
    return "linear"


def _unpacked(tensor: Tensor, model: BaseModelInfo) -> Shape:
    """The shape of a weight that bitsandbytes stores as a column of bytes, two weights each: one side is known."""
    widths = sizes(model.config)
    if tensor.dtype != "uint8" or model.quantization != "4bit" or widths is None:
        return tensor.shape
    number = 2 * tensor.num_elements
    return (number // widths.hidden, widths.hidden) if number % widths.hidden == 0 else (number,)


def _stacked(name: str, members: list[tuple[str, Tensor]], model: BaseModelInfo, state: dict[str, int]) -> Parameter:
    """One weight for all experts of a layer: (experts, out, in), with gate above up."""
    num_experts = len({number for number, _ in members})
    number = sum(tensor.num_elements for _, tensor in members)
    num_inputs = members[0][1].shape[-1]
    stored = None
    if model.is_quantized:
        stored = sum(tensor.num_bytes + state.get(_module(tensor), 0) for _, tensor in members)
    return Parameter(name, (num_experts, number // num_experts // max(1, num_inputs), num_inputs), "experts", stored)


def _weights_bytes(model: BaseModelInfo, loaded: Iterable[Parameter], choices: Precision) -> int:
    size = BITS[choices.load_dtype] // 8
    quantization = "none" if model.is_quantized else choices.quantization
    return sum(_parameter_bytes(parameter, quantization, size) for parameter in loaded)


def _parameter_bytes(parameter: Parameter, quantization: str, size: int) -> int:
    number = parameter.num_elements
    if parameter.stored_bytes is not None:
        return parameter.stored_bytes
    if quantization == "none" or parameter.role != "linear":
        return number * size
    if quantization == "8bit":
        return number + 4 * parameter.num_outputs
    blocks = math.ceil(number / BLOCK_4BIT)
    return math.ceil(number / 2) + blocks + 4 * math.ceil(blocks / NESTED_BLOCK_4BIT) + TABLES_4BIT


# --- What is trained --------------------------------------------------------------------------------------------------


def trained(spec: JobSpec, model: BaseModelInfo, adapter: AdapterInfo | None = None) -> Trained:
    """All that has a gradient."""
    if adapter is not None:
        shapes = tuple(tensor.shape for tensor in adapter.tensors)
        return Trained(shapes or ((adapter.num_parameters,),), ())
    loaded = parameters(model)
    if spec.lora is None:
        embeddings = frozenset(place for place, parameter in enumerate(loaded) if parameter.role == "embedding")
        return Trained((), tuple(parameter.shape for parameter in loaded), embeddings)
    return _lora(spec.lora, loaded, model.model_type)


def _lora(lora: LoraSpec, loaded: tuple[Parameter, ...], model_type: str) -> Trained:
    """What peft adds for a LoraConfig."""
    saved = _saved(lora, loaded)
    names = EXPERT_NAMES.get(model_type, {})
    through_experts = _experts_targeted(lora, loaded, names)
    added: list[Shape] = []
    targets = []
    for parameter in _with_tied_head(loaded):
        rank = _rank(lora, parameter)
        if parameter.role in ("experts", "router") and names:
            added += _expert_adapter(parameter, lora.r, through_experts)
        elif _is_target(lora, parameter, set(names)) and parameter.name not in saved:
            targets.append(parameter)
            added += [(rank, _num_inputs(parameter)), (parameter.num_outputs, rank)]
            added += [(parameter.num_outputs,)] if lora.use_dora else []
    embeddings = frozenset(
        place for place, parameter in enumerate(saved.values(), len(added)) if parameter.role == "embedding"
    )
    added += [parameter.shape for parameter in saved.values()]
    biases = _biases(lora, loaded, {parameter.module for parameter in targets})
    return Trained(tuple(added), tuple(biases), embeddings)


def _num_inputs(parameter: Parameter) -> int:
    return parameter.num_elements // max(1, parameter.num_outputs)


def _with_tied_head(loaded: tuple[Parameter, ...]) -> Iterator[Parameter]:
    """The parameters, and a head of the embedding's shape where the checkpoint stores them as one."""
    yield from loaded
    if not any(parameter.role == "head" for parameter in loaded):
        embedding = max(
            (each for each in loaded if each.role == "embedding"), key=lambda each: each.num_elements, default=None
        )
        if embedding is not None:
            yield Parameter("lm_head.weight", embedding.shape, "head")


def _is_target(lora: LoraSpec, parameter: Parameter, expert_names: set[str]) -> bool:
    """peft's own matching: `all-linear`, a regular expression for the whole name, or the ends of names."""
    module = parameter.module
    if parameter.role not in ("linear", "head", "embedding") or not parameter.name.endswith(".weight"):
        return False
    if is_vision_module(module) or (lora.exclude_modules and _matches(module, lora.exclude_modules)):
        return False
    leaf = module.rpartition(".")[2]
    if leaf in expert_names and not isinstance(lora.target_modules, list):
        return False  # peft resolves these to the ends of names, and gives those to the experts
    if isinstance(lora.target_modules, list) and expert_names & {leaf} & set(lora.target_modules):
        return False
    if lora.target_modules == "all-linear":
        return parameter.role == "linear" and _is_in_layers(lora, module)
    return _matches(module, lora.target_modules) and _is_in_layers(lora, module)


def _is_in_layers(lora: LoraSpec, module: str) -> bool:
    if not lora.layers_to_transform:
        return True
    match = _LAYER.match(module)
    return match is not None and int(match[1]) in lora.layers_to_transform


def _matches(module: str, names: str | list[str]) -> bool:
    if isinstance(names, str):  # a checkpoint of the bare model lacks the first part of the name
        return any(re.fullmatch(names, prefix + module) for prefix in ("", "model.", "transformer."))
    return any(module == name or module.endswith(f".{name}") for name in names)


def _rank(lora: LoraSpec, parameter: Parameter) -> int:
    for pattern, rank in (lora.rank_pattern or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", parameter.module):
            return rank
    return lora.r


def _experts_targeted(lora: LoraSpec, loaded: tuple[Parameter, ...], names: dict[str, str]) -> set[str]:
    """Which of router, gate_up_proj and down_proj get an adapter."""
    targets = lora.target_modules
    if targets == "all-linear":
        return set(names.values())
    if isinstance(targets, list):
        return {names[leaf] for leaf in (target.rpartition(".")[2] for target in targets) if leaf in names}
    prefixes = {parameter.module.rpartition(".")[0] for parameter in loaded if parameter.role in ("experts", "router")}
    return {to for leaf, to in names.items() if any(_matches(f"{prefix}.{leaf}", targets) for prefix in prefixes)}


def _expert_adapter(parameter: Parameter, rank: int, targeted: set[str]) -> list[Shape]:
    """peft stacks the experts' matrices; gate and up have one of twice the rank."""
    if parameter.role == "router":
        return [(rank, parameter.shape[1]), (parameter.shape[0], rank)] if "router" in targeted else []
    leaf = parameter.name.rpartition(".")[2]
    if leaf not in targeted:
        return []
    num_experts, num_outputs, num_inputs = parameter.shape
    stacked = num_experts * rank * (2 if leaf == "gate_up_proj" else 1)
    return [(stacked, num_inputs), (num_outputs, stacked)]


def _saved(lora: LoraSpec, loaded: tuple[Parameter, ...]) -> dict[str, Parameter]:
    """modules_to_save: peft goes by the ends of modules' names, and copies all that is below."""

    def is_saved(parameter: Parameter) -> bool:
        parts = parameter.module.split(".")
        above = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        return any(module.endswith(name) for module in above for name in lora.modules_to_save or ())

    return {parameter.name: parameter for parameter in _with_tied_head(loaded) if is_saved(parameter)}


def _biases(lora: LoraSpec, loaded: tuple[Parameter, ...], targets: set[str]) -> list[Shape]:
    biases = [parameter for parameter in loaded if parameter.name.endswith(".bias") and lora.bias != "none"]
    return [bias.shape for bias in biases if lora.bias == "all" or bias.module in targets]


# --- Optimizer --------------------------------------------------------------------------------------------------------

#: Optimizers by a pattern of their name: what each parameter's state is made of. `8bit` and `32bit` are bitsandbytes',
#: which keep float32 whatever the parameter's dtype; `own` states have the parameter's dtype.
OPTIMIZERS: tuple[tuple[str, Literal["own", "8bit", "32bit", "factored", "projected"], float], ...] = (
    (r"(paged_)?(adamw_8bit)|adamw_bnb_8bit", "8bit", 2),
    (r"(paged_)?ademamix_8bit", "8bit", 3),
    (r"(paged_)?lion_8bit|rmsprop_bnb_8bit", "8bit", 1),
    (r"paged_adamw_32bit", "32bit", 2),
    (r"ademamix|paged_ademamix_32bit", "32bit", 3),
    (r"(paged_)?lion_32bit|rmsprop_bnb(_32bit)?", "32bit", 1),
    (r"adamw_anyprecision", "32bit", 1.5),  # the mean in float32, the variance in bfloat16
    (r"adamw_torch_8bit", "32bit", 0.5),
    (r"adamw_torch_4bit", "32bit", 0.25),
    (r"adafactor", "factored", 0),
    (r"sgd|lomo|adalomo", "own", 0),
    (r"adagrad|rmsprop|schedule_free_sgd", "own", 1),
    (r"grokadamw", "own", 3),
    (r"(galore|apollo)_.*", "projected", 2),
    (r".*", "own", 2),
)


def _state_bytes(spec: JobSpec, shape: Shape, size: int, *, is_embedding: bool) -> int:
    """The optimizer's state for one trained tensor, whose elements have `size` bytes."""
    name, number = spec.training.optim or "", math.prod(shape)
    kind, num_states = next((kind, each) for pattern, kind, each in OPTIMIZERS if re.fullmatch(pattern, name))
    match kind:
        case "8bit" if number >= MIN_8BIT_SIZE and not is_embedding:
            return int(num_states * (number + 4 * math.ceil(number / BLOCK_OPTIMIZER)))
        case "8bit" | "32bit":
            return int(4 * num_states * number)
        case "factored":
            return 4 * (number // shape[-1] + number // shape[-2] if len(shape) > 1 else number)
        case "projected" if len(shape) > 1:
            return int(size * (num_states * PROJECTED_RANK * max(shape) + PROJECTED_RANK * min(shape)))
        case _:
            return int(size * num_states * number) + (4 if num_states else 0)  # and its step, a float32


# --- Activations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """What a config says of a model's widths."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    mlp: int  #: width, of all experts that see one token together


def sizes(config: dict[str, Any]) -> Sizes | None:
    """None where the config tells nothing, under the names that families give them."""
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config

    def first(*names: str) -> int | None:
        return next((config[name] for name in names if isinstance(config.get(name), int)), None)

    hidden, layers = first("hidden_size", "n_embd", "d_model"), first("num_hidden_layers", "n_layer", "num_layers")
    heads, vocabulary = first("num_attention_heads", "n_head", "num_heads"), first("vocab_size")
    if not (hidden and layers and heads and vocabulary):
        return None
    wide = first("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * hidden
    active = first("num_experts_per_tok", "num_experts_per_token", "moe_topk") or 1
    return Sizes(hidden, layers, heads, vocabulary, wide * active)


def _activation_bytes(
    spec: JobSpec,
    model: BaseModelInfo,
    device: Device,
    choices: Precision,
    loaded: Iterable[Parameter],
    length: int,
    num_rows: int | None,
) -> int:
    """What a forward pass keeps for the backward one, or what an evaluation has at once; 0 where nothing is known."""
    widths = sizes(model.config)
    if widths is None:
        return 0
    training = spec.training
    is_half = choices.load_dtype in precision.HALF or choices.bf16 or choices.fp16
    size = 2 if is_half else 4
    tokens = _rows_at_once(training.per_device_train_batch_size, num_rows) * length
    unit = tokens * size
    layer = unit * (KEPT_HIDDEN * widths.hidden + KEPT_MLP * widths.mlp)
    if not precision.is_full(spec):
        layer += unit * KEPT_ADAPTER * widths.hidden + _experts_copied(spec, model, loaded, size, widths)
    if choices.attn_implementation == "eager":
        layer += unit * KEPT_SCORES * widths.heads * length
    if training.activation_offloading:
        kept = layer
    elif training.gradient_checkpointing:
        kept = unit * widths.hidden * widths.layers + layer
    else:
        kept = layer * widths.layers
    kept += _autocast_copies(spec, choices, loaded) + _logits_bytes(spec, device, tokens, widths.vocabulary, size)
    has_eval = bool(spec.eval_datasets or spec.eval_split)
    eval_tokens = _rows_at_once(training.per_device_eval_batch_size, num_rows) * length if has_eval else 0
    return int(max(kept, _logits_bytes(spec, device, eval_tokens, widths.vocabulary, size)))


def _rows_at_once(batch_size: int, num_rows: int | None) -> int:
    return batch_size if num_rows is None else min(batch_size, max(num_rows, 1))


def _logits_bytes(spec: JobSpec, device: Device, tokens: int, vocabulary: int, size: int) -> int:
    """As computed, in float32 for the loss, and their gradient: the largest part of a small model with many words."""
    training = spec.training
    # What the worker leaves to TRL on a GPU; elsewhere it asks for nll.
    is_chunked = training.use_liger_kernel or training.loss_type == "chunked_nll"
    if training.loss_type is None and device.kind == "cuda":
        is_chunked = True
    return (min(tokens, CHUNKED_TOKENS) if is_chunked else tokens) * vocabulary * (size + 8)


def _experts_copied(
    spec: JobSpec, model: BaseModelInfo, loaded: Iterable[Parameter], size: int, widths: Sizes
) -> float:
    """Under an adapter, peft adds up a layer's stacked experts anew in each pass: a copy for the backward one."""
    names = EXPERT_NAMES.get(model.model_type, {})
    if spec.lora is None or not names:
        return 0
    targeted = _experts_targeted(spec.lora, tuple(loaded), names)
    copied = [each for each in loaded if each.role == "experts" and each.name.rpartition(".")[2] in targeted]
    return sum(each.num_elements for each in copied) * size / widths.layers


def _autocast_copies(spec: JobSpec, choices: Precision, loaded: Iterable[Parameter]) -> int:
    """Autocast keeps a half-precision copy of each trained float32 matrix through a pass."""
    if not (precision.is_full(spec) and choices.load_dtype == "float32" and (choices.bf16 or choices.fp16)):
        return 0
    return 2 * sum(each.num_elements for each in loaded if each.role in ("linear", "head", "experts", "router"))


# --- What would fit ---------------------------------------------------------------------------------------------------

#: A change of a job, in the job file's words.
Change = tuple[str, JobSpec]


def check(spec: JobSpec, memory: Memory, device: Device, estimate_for: Callable[[JobSpec], Memory]) -> None:
    """Raises MemoryShortError for a job that can never fit: the sum, its parts, and what would fit instead.

    `estimate_for` estimates a changed job; nothing is proposed that it does not find to fit.
    """
    if memory.can_fit:
        return
    parts = ", ".join(f"{_PART_WORDS[name]} {gib(number)}" for name, number in memory.parts if number)
    found = list(remedies(spec, device, estimate_for))
    rows = f"{memory.batch_size} row{'s' if memory.batch_size > 1 else ''} of {memory.length} tokens at a time"
    raise MemoryShortError(
        f"about {gib(memory.total_bytes)} are needed ({parts}; {rows}), "
        f"and {device.name} has {gib(memory.available_bytes)} for a job",
        hint="; or ".join(found) if found else "a smaller model, or a device with more memory: no smaller change helps",
    )


_PART_WORDS = {
    "weights": "weights",
    "adapter": "adapter",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "activation": "activations",
}


def remedies(spec: JobSpec, device: Device, estimate_for: Callable[[JobSpec], Memory]) -> Iterator[str]:
    """Up to three of the smallest changes that make a job fit: single ones, else the shortest chains of them."""

    def fits(candidate: JobSpec) -> Memory | None:
        try:
            found = estimate_for(candidate)
        except HonedError:
            return None
        return found if found.fits and not rule.problems(candidate, {}, except_of=[]) else None

    def say(words: str, found: Memory) -> str:
        return f"{words} ({gib(found.total_bytes)})"

    single = []
    for way in (*_SMALL, *_LARGE):
        for words, candidate in way(spec, device):
            if found := fits(candidate):
                single.append(say(words, found))
                break
    yield from single[:3]
    if single:
        return
    chains = [_SMALL, (_eight_bit_optimizer, *_SMALL), (_adapter, *_SMALL), (_four_bit, *_SMALL),
              (_adapter, _four_bit, *_SMALL), (_four_bit, _eight_bit_optimizer, *_SMALL)]  # fmt: skip
    said: list[str] = []
    for chain in chains:
        candidate, steps_taken = spec, []
        for way in chain:
            steps = list(way(candidate, device))
            chosen = next((step for step in steps if fits(step[1])), steps[-1] if steps else None)
            if chosen is None:
                continue
            steps_taken.append(chosen[0])
            candidate = chosen[1]
            if found := fits(candidate):
                text = say(", ".join(steps_taken), found)
                if text not in said and len(said) < 2:
                    said.append(text)
                    yield text
                break


def _changed(spec: JobSpec, **training: Any) -> JobSpec:
    return spec.model_copy(update={"training": spec.training.model_copy(update=training)})


def _checkpointing(spec: JobSpec, _device: Device) -> Iterator[Change]:
    if not spec.training.gradient_checkpointing:
        yield "gradient_checkpointing: true", _changed(spec, gradient_checkpointing=True)


def _chunked_loss(spec: JobSpec, device: Device) -> Iterator[Change]:
    if device.kind == "cuda" and spec.training.loss_type == "nll" and not spec.training.use_liger_kernel:
        yield "loss_type: chunked_nll", _changed(spec, loss_type="chunked_nll")


def _smaller_batch(spec: JobSpec, _device: Device) -> Iterator[Change]:
    """The largest first; accumulation keeps the product."""
    size, accumulated = spec.training.per_device_train_batch_size, spec.training.gradient_accumulation_steps
    for smaller in range(size - 1, 0, -1):
        if size * accumulated % smaller == 0:
            steps = size * accumulated // smaller
            words = f"per_device_train_batch_size: {smaller} with gradient_accumulation_steps: {steps}"
            changes = {"per_device_train_batch_size": smaller, "gradient_accumulation_steps": steps}
            if spec.training.per_device_eval_batch_size > smaller and (spec.eval_datasets or spec.eval_split):
                changes["per_device_eval_batch_size"] = smaller
                words += f" and per_device_eval_batch_size: {smaller}"
            yield words, _changed(spec, **changes)


def _shorter(spec: JobSpec, _device: Device) -> Iterator[Change]:
    """Halves, down to 256 tokens."""
    length = spec.training.max_length or 2 * UNCUT_LENGTH
    while length > 256:
        length //= 2
        yield f"max_length: {length}", _changed(spec, max_length=length)


def _eight_bit_optimizer(spec: JobSpec, device: Device) -> Iterator[Change]:
    if (spec.training.optim or "").startswith("adamw_torch") and device.kind == "cuda":
        yield "optim: adamw_8bit", _changed(spec, optim="adamw_8bit")


def _four_bit(spec: JobSpec, device: Device) -> Iterator[Change]:
    if spec.quantization != "4bit" and not precision.is_full(spec) and device.kind != "mps":
        yield "quantization: 4bit", spec.model_copy(update={"quantization": "4bit"})


def _adapter(spec: JobSpec, _device: Device) -> Iterator[Change]:
    if precision.is_full(spec):
        yield "lora: {r: 16} in place of full fine-tuning", spec.model_copy(update={"lora": LoraSpec()})


#: Ways to need less, from the change that alters the result least.
_SMALL = (_checkpointing, _chunked_loss, _smaller_batch, _shorter)
_LARGE = (_eight_bit_optimizer, _four_bit, _adapter)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 10 else f"{math.ceil(num_bytes / 2**20)} MiB"
