"""The `training` section: SFTConfig's own fields (TRL 1.14.2, transformers 5.17), listed here so that no torch is
needed.

    TrainingSpec   the fields that a spec may set, with SFTConfig's own defaults
    OWNED          the fields that honed sets itself, each with the key or the reason

A test compares both with the installed SFTConfig: every field is in exactly one of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import SerializerFunctionWrapHandler, model_serializer

from honed.spec.field import Count, Expected, Flag, NotEmpty, Section, Steps, StepsOrZero, any_of

Optimizer = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_xla",
    "adamw_torch_npu_fused",
    "adafactor",
    "adamw_anyprecision",
    "adamw_torch_4bit",
    "adamw_torch_8bit",
    "ademamix",
    "sgd",
    "adagrad",
    "adamw_bnb_8bit",
    "adamw_8bit",
    "ademamix_8bit",
    "lion_8bit",
    "lion_32bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "rmsprop",
    "rmsprop_bnb",
    "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit",
    "galore_adamw",
    "galore_adamw_8bit",
    "galore_adafactor",
    "galore_adamw_layerwise",
    "galore_adamw_8bit_layerwise",
    "galore_adafactor_layerwise",
    "lomo",
    "adalomo",
    "grokadamw",
    "schedule_free_radam",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "apollo_adamw",
    "apollo_adamw_layerwise",
    "stable_adamw",
]
Schedule = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "greedy",
]
Interval = Literal["no", "steps", "epoch"]
#: In transformers, -1 means "no limit".
MaxSteps = Annotated[
    int,
    any_of(lambda value: value == -1 or value >= 1, int, schema=Count | Literal[-1]),
    Expected("an integer number of steps, at least 1, or -1"),
]
Fraction = Annotated[float, Ge(0), Lt(1)]
Seed = Annotated[int, Ge(0), Lt(2**32)]


class TrainingSpec(Section):
    """`training:`"""

    # How long
    num_train_epochs: Annotated[float, Gt(0)] = 3.0
    """Number of passes over the training data."""
    max_steps: MaxSteps = -1
    """Total number of optimizer steps; if set, it overrides `num_train_epochs`."""

    # Batches and lengths
    per_device_train_batch_size: Count = 8
    """Examples per forward pass."""
    gradient_accumulation_steps: Count = 1
    """Forward passes per optimizer step."""
    max_length: Count | None = 1024
    """Maximum tokens per example; longer ones are cut. null cuts nothing."""
    packing: Flag = False
    """Pack several examples into one sequence of `max_length`; rejected where the model would mix them."""
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd"
    """Packing method: best fit, best fit with long examples split, or one after the other, all mixed."""
    padding_free: Flag = False
    """Concatenate a batch into one long sequence without padding."""
    pad_to_multiple_of: Count | None = None
    """Pad sequences to a multiple of this number of tokens."""
    truncation_mode: Literal["keep_start"] = "keep_start"
    """End of a truncated example that is kept."""
    train_sampling_strategy: Literal["random", "sequential", "group_by_length", "batch_rebalance"] = "random"
    """Order of the examples."""
    shuffle_dataset: Flag = False
    """Shuffle the data once, before the first epoch."""

    eos_token: NotEmpty | None = None
    """Token that ends an answer: of the tokenizer, of the rows that no template renders, and of the output. null takes
    the base model's. Set it where the chat template ends turns with another token than the tokenizer's."""

    # Learning rate and optimizer
    learning_rate: Annotated[float, Gt(0), Le(1)] = 2e-5
    """Peak learning rate. LoRA usually needs ten times that of full fine-tuning."""
    lr_scheduler_type: Schedule = "linear"
    """Schedule of the learning rate."""
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Arguments of the schedule, such as `num_cycles`."""
    warmup_steps: StepsOrZero = 0
    """Steps in which the learning rate rises; a value below 1 is a share of the run."""
    optim: Optimizer = "adamw_torch_fused"
    """Optimizer. Some need a package of their own."""
    optim_args: str | None = None
    """Arguments of the optimizer, as `key=value,key=value`."""
    optim_target_modules: (
        Annotated[str | list[str], any_of(bool, str, list), Expected("text or a list of words")] | None
    ) = None
    """Modules that GaLore and APOLLO apply to."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Weight decay at each step."""
    adam_beta1: Fraction = 0.9
    """Decay rate of Adam's running mean."""
    adam_beta2: Fraction = 0.999
    """Decay rate of Adam's running variance."""
    adam_epsilon: Annotated[float, Gt(0)] = 1e-8
    """Adam's term against division by zero."""
    max_grad_norm: Annotated[float, Ge(0)] = 1.0
    """Maximum gradient norm; larger gradients are scaled down, 0 scales none."""

    # Loss
    loss_type: Literal["nll", "dft", "chunked_nll"] | None = None
    """Loss function; null leaves it to TRL, or to Unsloth, which computes the same in its own way. Where their loss is
    not the model's, null takes nll: see docs/jobs.md."""
    label_smoothing_factor: Fraction = 0.0
    """Factor of label smoothing."""
    neftune_noise_alpha: Annotated[float, Ge(0)] | None = None
    """Noise level on the embeddings (NEFTune)."""
    router_aux_loss_coef: Annotated[float, Ge(0)] | None = None
    """Weight of the load-balancing loss of a mixture of experts."""
    average_tokens_across_devices: Flag = True
    """Average the loss over the tokens of all devices."""

    # Memory and speed
    gradient_checkpointing: Flag = True
    """Recompute activations in the backward pass: saves memory, slower by a fifth."""
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    """Arguments of gradient checkpointing, such as `use_reentrant`."""
    activation_offloading: Flag = False
    """Keep activations in main memory."""
    torch_compile: Flag = False
    """Compile the model with torch.compile."""
    torch_compile_backend: str | None = None
    """Backend of torch.compile."""
    torch_compile_mode: str | None = None
    """Mode of torch.compile."""
    use_liger_kernel: Flag = False
    """Use Liger's kernels; needs the package liger-kernel."""
    liger_kernel_config: dict[str, bool] | None = None
    """Liger's kernels to turn on or off, by name."""
    torch_empty_cache_steps: Count | None = None
    """Steps after which the device's cache is emptied each time."""

    # Evaluation
    eval_strategy: Interval = "no"
    """Interval type of evaluations on held-out rows. If not set: by `eval_steps` where given, else each epoch."""
    eval_steps: Steps | None = None
    """Steps between evaluations; null takes `logging_steps`."""
    eval_delay: Annotated[float, Ge(0)] = 0
    """Epochs or steps before the first evaluation."""
    eval_on_start: Flag = False
    """Evaluate before the first step. If not set: true where the trainer evaluates at all."""
    per_device_eval_batch_size: Count = 8
    """Examples per forward pass of an evaluation."""
    eval_accumulation_steps: Count | None = None
    """Batches whose outputs accumulate on the device."""
    eval_packing: Flag | None = None
    """Pack held-out examples; null takes the value of `packing`."""

    # Checkpoints
    save_strategy: Literal["no", "steps", "epoch", "best"] = "steps"
    """Interval type of checkpoints. A stop always writes one. If not set: with each evaluation, where the best
    checkpoint is needed."""
    save_steps: Steps = 500
    """Steps between checkpoints; see also save_interval_sec."""
    save_total_limit: Count | None = None
    """Maximum number of checkpoints to keep, and the best one; null keeps 2."""
    load_best_model_at_end: Flag = False
    """Use the best checkpoint as the result, instead of the last."""
    metric_for_best_model: str | None = None
    """Metric that selects the best checkpoint; null takes the loss."""
    greater_is_better: Flag | None = None
    """Prefer a higher `metric_for_best_model`; null decides by its name."""

    # Logging
    logging_strategy: Interval = "steps"
    """Interval type for reporting metrics."""
    logging_steps: Steps = 10
    """Steps between reports of metrics. If not set: every step."""
    logging_first_step: Flag = False
    """Report the first step too."""
    include_num_input_tokens_seen: Annotated[
        Literal["all", "non_padding", "no"] | bool,
        any_of(
            lambda value: value in ("all", "non_padding", "no", True, False),
            str,
            bool,
            schema=Literal["all", "non_padding", "no"] | bool,
        ),
        Expected("one of all, non_padding, no"),
    ] = "no"
    """Count input tokens."""
    project: str = "huggingface"
    """Project in Trackio."""
    skip_memory_metrics: Flag = True
    """Leave memory usage out of the metrics."""

    # Seeds and loading
    seed: Seed = 42
    """Seed for weights, order, split and samples."""
    data_seed: Seed | None = None
    """Seed for the order alone; null takes `seed`."""
    full_determinism: Flag = False
    """Use slower kernels with bit-identical results."""
    dataloader_drop_last: Flag = False
    """Skip an incomplete last batch."""
    dataloader_num_workers: Annotated[int, Ge(0)] = 0
    """Processes that load data; 0 loads in the worker itself."""
    dataloader_pin_memory: Flag = True
    """Keep batches in pinned memory."""
    dataloader_persistent_workers: Flag = False
    """Keep the data loading processes alive from epoch to epoch."""
    dataloader_prefetch_factor: Count | None = None
    """Batches that each data loading process loads ahead."""
    dataloader_multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None
    """Start method of the data loading processes."""
    dataloader_in_order: Flag = True
    """Return batches in the order of their requests."""

    @property
    def cut_at(self) -> int | None:
        """The token count at which rows are truncated; None if never: packing may split long rows instead."""
        splits = self.packing and self.packing_strategy != "bfd"
        return None if splits else self.max_length

    def as_kwargs(self) -> dict[str, Any]:
        """Return only the fields that the user set."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    @model_serializer(mode="wrap")
    def _only_set(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if name in self.model_fields_set}


_DTYPE = "precision is planned as one: set dtype at the top level"
_PARALLEL = "set resources: {gpus: …} and parallel at the top level"
_HUB = "honed uploads nothing to the hub"
_METRICS = "honed makes predictions itself: see predictions"
_SCRIPT = "kind sets what the job does"
_LOG = "honed writes the log; honectl logs shows it"
_RESUME = "honed resumes automatically and exactly"
_MODEL = "the model's keys belong at the top level: base_model, dtype, attn_implementation"
_TOKENIZED = "honed renders and tokenizes the rows itself"
_MASK = "honed trains only on the assistant's turns, in every format; plain text rows are trained on in full"

#: SFTConfig's fields that a user cannot set here: name -> the key that sets it, or the reason why there is none.
OWNED: dict[str, str] = {
    "output_dir": "write output_dir at the top level",
    "report_to": "write report_to at the top level",
    "run_name": "write name at the top level",
    "trust_remote_code": "write trust_remote_code at the top level",
    "chat_template_path": "write chat_template at the top level",
    "use_cpu": "write resources: {gpus: 0}",
    "dataset_text_field": "write columns: {text: …} in the data set",
    **dict.fromkeys(("bf16", "fp16", "tf32", "bf16_full_eval", "fp16_full_eval", "accelerator_config"), _DTYPE),
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss"), _MASK),
    **dict.fromkeys(("dataset_kwargs", "dataset_num_proc", "remove_unused_columns", "label_names"), _TOKENIZED),
    "length_column_name": _TOKENIZED,
    "pad_token": "the tokenizer has one; if not, honed chooses one",
    "model_init_kwargs": _MODEL,
    "use_cache": "honed disables the cache in training and enables it in predictions",
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo"), _HUB),
    **dict.fromkeys(("hub_always_push", "hub_revision"), _HUB),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), _HUB),
    "hub_token": "a job file must not contain secrets",
    **dict.fromkeys(("resume_from_checkpoint", "ignore_data_skip", "restore_callback_states_from_checkpoint"), _RESUME),
    "enable_jit_checkpoint": "honed writes a checkpoint at every stop",
    "save_only_model": "resuming from a checkpoint needs the optimizer's state",
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), _SCRIPT),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "local_rank"), _PARALLEL),
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"), _PARALLEL),
    **dict.fromkeys(("ddp_static_graph", "ddp_backend", "ddp_timeout"), _PARALLEL),
    **dict.fromkeys(("log_on_each_node", "save_on_each_node", "log_level_replica"), _PARALLEL),
    **dict.fromkeys(("disable_tqdm", "log_level"), _LOG),
    "logging_nan_inf_filter": "honed stops a run whose loss is not a number",
    "auto_find_batch_size": "another batch size would change the result: set per_device_train_batch_size",
    **dict.fromkeys(("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object"), _METRICS),
    **dict.fromkeys(("include_for_metrics", "batch_eval_metrics"), _METRICS),
    "debug": "honed checks the loss itself",
}
