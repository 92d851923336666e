"""What others call our keys: names that are gone from transformers and trl, and those of axolotl, LLaMA-Factory,
Unsloth, torchtune, AutoTrain, TRL's command line and OpenAI. One table, used at every level of a spec.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Synonym:
    key: str  #: ours, dotted; empty where there is none
    hint: str


def _key(key: str) -> Synonym:
    return Synonym(key, f"write {key}" if "." in key else f"write {key} at the top level")


def _none(hint: str) -> Synonym:
    return Synonym("", hint)


def _all(synonym: Synonym, *names: str) -> dict[str, Synonym]:
    return dict.fromkeys(names, synonym)


_TRAINED = "honed trains on the assistant's turns alone"
_LORA = Synonym("lora", "a lora: section makes an adapter, without one the job is full fine-tuning")
_REPORT = Synonym("report_to", "write report_to: [tensorboard, wandb, mlflow, trackio], those wanted")

#: Another's name -> ours. `section.name` stands for a name in one section alone.
NAMES: dict[str, Synonym] = {
    # Gone from transformers and trl
    **_all(Synonym("training.warmup_steps", "write training.warmup_steps: it takes a fraction too"),
           "warmup_ratio", "warmup", "num_warmup_steps", "lr_warmup_steps"),
    **_all(_key("training.max_length"), "max_seq_length", "max_seq_len", "sequence_len", "cutoff_len",
           "model_max_length", "block_size", "seq_length", "context_length"),
    **_all(_key("training.eval_strategy"), "evaluation_strategy", "do_eval"),
    **_all(Synonym("resources", "write resources: {gpus: 0}"), "no_cuda", "use_cpu"),
    "overwrite_output_dir": _none("leave it out: an output_dir is the job's own or refused"),
    **_all(Synonym("training.train_sampling_strategy", "write training.train_sampling_strategy: group_by_length"),
           "group_by_length"),
    "logging_dir": Synonym("report_to", "report_to says who gets the figures, honed where they lie"),
    **_all(_none("leave it out: checkpoints are safetensors"), "save_safetensors", "safe_serialization"),
    **_all(Synonym("dtype", "write dtype at the top level"), "torch_dtype", "half_precision_backend", "infer_dtype",
           "mixed_precision", "pure_bf16", "fp8", "bfloat16", "float16", "fp16_opt_level", "precision"),
    "include_tokens_per_second": _none("leave it out: honed reports speed by itself"),
    **_all(_key("training.optim"), "adafactor", "optimizer", "optimiser", "optimizer_type"),
    **_all(_key("training.per_device_train_batch_size"), "per_gpu_train_batch_size", "per_device_batch_size",
           "micro_batch_size", "batch_size", "train_batch_size"),
    **_all(_key("training.per_device_eval_batch_size"), "per_gpu_eval_batch_size", "eval_batch_size"),
    **_all(_key("training.dataloader_num_workers"), "num_workers", "preprocessing_num_workers", "dataset_num_proc"),
    # The model
    **_all(_key("base_model"), "model_name_or_path", "model_name", "model", "model_id", "model_path",
           "pretrained_model", "base_model_name_or_path", "model_local_path", "base_model_config", "checkpoint"),
    **_all(_key("revision"), "model_revision", "revision_of_model"),
    **_all(_key("model_type"), "type_of_model", "architecture"),
    **_all(_key("chat_template"), "template", "prompt_template", "chat_template_jinja", "chat_template_path"),
    **_all(_key("adapter"), "adapter_name_or_path", "lora_model_dir", "adapter_path", "peft_model_path"),
    **_all(Synonym("attn_implementation", "write attn_implementation: flash_attention_2 at the top level"),
           "flash_attn", "flash_attention", "use_flash_attention_2", "use_flash_attn"),
    **_all(Synonym("attn_implementation", "write attn_implementation: sdpa at the top level"), "sdp_attention",
           "eager_attention", "attention_implementation"),
    **_all(Synonym("backend", "write backend: unsloth at the top level"), "use_unsloth"),
    **_all(_key("backend"), "engine"),
    # Quantization
    **_all(Synonym("quantization", "write quantization: 4bit at the top level"), "load_in_4bit", "use_4bit", "qlora"),
    **_all(Synonym("quantization", "write quantization: 8bit at the top level"), "load_in_8bit", "use_8bit"),
    **_all(Synonym("quantization", "write quantization: 4bit or 8bit at the top level"), "quantization_bit",
           "quantization_method", "quantization_config", "quantize", "bnb_config_kwargs", "use_int4", "use_int8"),
    **_all(_none("leave it out: honed quantizes to nf4 with double quantization"), "bnb_4bit_quant_type",
           "double_quantization", "use_bnb_nested_quant", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage"),
    "bnb_4bit_compute_dtype": Synonym("dtype", "write dtype at the top level: the two agree"),
    # LoRA
    **_all(_key("lora.r"), "lora_r", "lora_rank", "rank", "lora.rank", "lora.lora_r", "lora.lora_rank"),
    **_all(_key("lora.lora_alpha"), "lora.alpha", "alpha"),
    **_all(_key("lora.lora_dropout"), "lora.dropout"),
    **_all(_key("lora.target_modules"), "lora_target", "lora_target_modules", "lora_attn_modules", "lora.target",
           "lora.lora_target", "lora.lora_target_modules"),
    **_all(Synonym("lora.target_modules", "write lora.target_modules: all-linear"), "lora_target_linear",
           "lora.lora_target_linear"),
    **_all(_key("lora.modules_to_save"), "lora_modules_to_save", "additional_target"),
    **_all(_key("lora.bias"), "lora_bias"),
    **_all(_key("lora.use_dora"), "peft_use_dora", "dora"),
    **_all(_key("lora.use_rslora"), "peft_use_rslora", "rslora"),
    **_all(_key("lora.finetune_vision_layers"), "freeze_vision_tower", "freeze_vit", "freeze_vision", "train_vision",
           "tune_mm_vision"),
    **_all(_key("lora.finetune_audio_layers"), "freeze_audio_tower", "freeze_audio", "train_audio"),
    **_all(_key("lora.finetune_projector"), "freeze_multi_modal_projector", "freeze_aligner", "tune_mm_mlp_adapter",
           "finetune_projector_layers", "lora.finetune_projector_layers", "train_projector"),
    **_all(Synonym("lora", "lora: {finetune_language_layers: false, finetune_projector: true} trains an adapter there"),
           "train_mm_proj_only"),
    **_all(Synonym("lora", "lora.finetune_vision_layers, finetune_audio_layers and finetune_projector say what gets an "
                   "adapter; without a lora: section the language model is trained, whole"),
           "freeze_mm_modules", "unfrozen_parameters", "freeze_modules", "freeze_trainable_modules"),
    **_all(Synonym("training.learning_rate", "write training.learning_rate: all that is trained has the same"),
           "mm_projector_lr", "vision_tower_lr", "vit_lr", "aligner_lr", "audio_lr"),
    **_all(_none("leave it out: the base model says whether it sees or hears, and with what processor"),
           "is_multimodal", "processor_type", "processor_config", "processor", "vision_tower", "vision", "multimodal",
           "is_vision_model"),
    **_all(_none("leave it out: honed renders and tokenizes the rows itself"), "skip_prepare_dataset"),
    **_all(_key("lora.finetune_language_layers"), "freeze_language_model", "freeze_llm"),
    **_all(_none("leave it out: lora.target_modules says which kinds of layers get an adapter"),
           "finetune_attention_modules", "finetune_mlp_modules"),
    **_all(_key("lora.layers_to_transform"), "peft_layers_to_transform"),
    **_all(_LORA, "finetuning_type", "use_peft", "peft", "use_lora", "training_type", "peft_config", "lora_config",
           "finetune_type", "tuner_type", "train_type"),
    # Length of the run, learning rate, optimizer
    **_all(_key("training.num_train_epochs"), "num_epochs", "epochs", "n_epochs", "num_epoch", "epoch"),
    **_all(_key("training.max_steps"), "num_steps", "total_steps", "max_train_steps", "num_train_steps",
           "max_steps_per_epoch"),
    **_all(_key("training.learning_rate"), "lr", "learning_rate_multiplier", "peak_lr"),
    **_all(_key("training.lr_scheduler_type"), "lr_scheduler", "scheduler", "lr_scheduler_name", "schedule"),
    **_all(_key("training.lr_scheduler_kwargs"), "cosine_min_lr_ratio"),
    **_all(_key("training.gradient_accumulation_steps"), "gradient_accumulation", "grad_accum", "accumulation_steps",
           "grad_accumulation_steps"),
    **_all(_key("training.max_grad_norm"), "gradient_clip_val", "clip_grad", "grad_clip", "max_norm"),
    **_all(_key("training.gradient_checkpointing"), "enable_gradient_checkpointing", "use_gradient_checkpointing",
           "activation_checkpointing", "enable_activation_checkpointing"),
    "enable_activation_offloading": _key("training.activation_offloading"),
    **_all(_key("training.weight_decay"), "wd"),
    **_all(_key("training.packing"), "sample_packing", "neat_packing", "packed", "multipack"),
    **_all(_key("training.eval_packing"), "eval_sample_packing"),
    **_all(_key("training.seed"), "random_seed", "random_state"),
    **_all(_key("training.use_liger_kernel"), "enable_liger_kernel", "liger", "use_liger"),
    **_all(_key("training.torch_compile"), "compile"),
    **_all(_key("training.neftune_noise_alpha"), "neftune_alpha"),
    # Data
    **_all(Synonym("datasets", "write datasets: [{path: /srv/data/rows.jsonl}]"), "dataset", "dataset_name", "data",
           "train_file", "training_file", "train_dataset", "dataset_path", "data_path", "train_data_path", "train_data",
           "dataset_dir",
           "dataset_mixture", "data_files", "train_files", "local_dataset", "dataset_config", "dataset_train_split"),
    **_all(Synonym("eval_datasets", "write eval_datasets: [{path: /srv/data/held-out.jsonl}]"), "test_datasets",
           "eval_dataset", "eval_data_path", "validation_file", "eval_file", "valid_data", "eval_data",
           "validation_dataset",
           "test_dataset", "dataset_test_split"),
    **_all(_key("eval_split"), "val_set_size", "val_size", "test_split_size", "validation_split", "test_size",
           "eval_size", "validation_split_percentage", "split_dataset_ratio"),
    **_all(Synonym("datasets.max_rows", "write max_rows in the data set"), "max_samples", "num_rows",
           "max_train_samples", "datasets.limit"),
    **_all(Synonym("datasets.media_dir", "write media_dir in the data set: one directory, or {image: …, audio: …}"),
           "image_dir", "image_folder", "images_dir", "media_folder", "video_dir", "audio_dir", "frames_dir",
           "videos_dir", "audios_dir", "media_root", "image_root", "images_folder", "video_folder", "eval_audio_dir"),
    **_all(_none("leave it out: `<image>`, `<video>` and `<audio>` in a text are the places of what the columns hold"),
           "image_token", "video_token", "audio_token", "image_placeholder"),
    **_all(Synonym("media.max_pixels", "write media: {max_pixels: …}"), "image_max_pixels", "video_max_pixels",
           "max_image_pixels"),
    **_all(Synonym("media.min_pixels", "write media: {min_pixels: …}"), "image_min_pixels", "video_min_pixels"),
    **_all(Synonym("media.max_image_size", "write media: {max_image_size: …}, pixels of the longer side"), "image_size",
           "image_resolution", "max_image_side", "max_resolution", "image_longest_edge"),
    **_all(Synonym("media.num_frames", "write media: {num_frames: …}"), "video_maxlen", "nframes", "max_frames",
           "video_fps", "fps_max_frames", "num_video_frames", "fps", "max_num_frames", "media.frames"),
    **_all(Synonym("datasets.media_dir", "write media_dir: {video: …}, where a video may be a directory of frames"),
           "datasets.media_dir.frames", "datasets.media_dir.frame", "datasets.media_dir.frames_dir"),
    **_all(_none("leave it out: what a row has beside its text is in the row, the sound of a video as well as `audio`"),
           "use_audio_in_video"),
    **_all(_none("leave it out: how images are cut up is the model's processor's affair; `media:` limits their size"),
           "crop_to_patches", "image_do_pan_and_scan", "do_image_splitting"),
    **_all(Synonym("datasets.columns", "write columns: {image: their column} in the data set"), "image_column",
           "images_column", "video_column", "audio_column", "datasets.images", "datasets.image", "datasets.videos",
           "datasets.audios", "field_images"),
    **_all(_none("leave it out: sound is read at the rate of the model's processor"), "audio_sampling_rate",
           "sampling_rate", "sample_rate"),
    **_all(_none("leave it out: pictures are fitted to media.max_image_size, bicubic"), "image_resize_algorithm"),
    **_all(Synonym("datasets.columns", "write columns: {our name: their column} in the data set"), "column_mapping",
           "field_messages", "message_property_mappings", "message_field_role", "message_field_content", "text_column",
           "dataset_text_field", "prompt_column", "conversation_column", "field_instruction", "field_output",
           "field_input"),
    **_all(Synonym("datasets.path", "write path"), "datasets.name", "datasets.file", "datasets.data_files",
           "datasets.data_dir", "datasets.file_name", "datasets.source", "datasets.dataset"),
    **_all(Synonym("datasets.format", "write format"), "datasets.type", "datasets.formatting", "datasets.kind",
           "data.format_type"),
    "datasets.ds_type": _none("leave it out: the file's suffix says it"),
    **_all(Synonym("datasets.fraction", "write fraction"), "datasets.weight", "datasets.ratio", "datasets.share",
           "datasets.proportion", "datasets.probability"),
    **_all(Synonym("datasets.fraction", "write fraction in each data set"), "interleave_probs", "mix_strategy"),
    "streaming": _none("leave it out: rows are read from files as they are needed"),
    **_all(_none(f"leave it out: {_TRAINED}"), "train_on_inputs", "train_on_input", "train_on_prompt", "mask_history",
           "roles_to_train", "train_on_eos", "train_on_completions", "train_on_responses_only"),
    **_all(_none("leave it out: honed reads what it needs, each time"), "overwrite_cache", "dataset_prepared_path",
           "tokenized_path", "preprocessing_batch_size"),
    # Evaluation and predictions
    **_all(_key("training.eval_steps"), "run_val_every_n_steps", "eval_every", "evals_per_epoch", "val_check_interval"),
    **_all(_key("predictions.num_samples"), "num_generation_samples", "max_predict_samples", "sample_prompts"),
    **_all(_key("predictions.sample_frequency"), "generate_samples", "predict_with_generate", "sample_every"),
    **_all(_key("predictions.max_new_tokens"), "generation_max_new_tokens", "max_generated_tokens"),
    **_all(_none("leave it out: predictions are greedy, so that they can be compared"), "temperature", "top_p", "top_k",
           "generation_temperature", "generation_do_sample", "do_sample"),
    **_all(_key("early_stopping_patience"), "early_stopping", "patience"),
    # Saving and the rest
    **_all(_key("training.save_steps"), "save_every", "checkpoint_every", "saves_per_epoch", "checkpointing_steps"),
    **_all(_key("training.save_total_limit"), "max_checkpoints", "keep_checkpoints"),
    **_all(_key("output_dir"), "output_path", "save_dir", "out_dir", "export_dir", "output"),
    **_all(Synonym("save_merged", "write save_merged: bfloat16 at the top level"), "merge_lora", "merge_adapter",
           "save_merged_model", "merge"),
    **_all(_none("leave it out: honed resumes by itself"), "auto_resume_from_checkpoints", "auto_resume", "resume"),
    **_all(_REPORT, "use_wandb", "enable_wandb", "wandb_project", "use_mlflow", "use_tensorboard", "enable_tensorboard",
           "wandb", "metric_logger", "log", "integrations", "wandb_entity", "wandb_name"),
    **_all(_key("name"), "job_name", "project_name", "suffix", "experiment_name", "title"),
    **_all(Synonym("kind", "write kind: sft, or leave it out"), "stage", "task", "method", "trainer", "rl",
           "rlhf_type", "job_type"),
    **_all(Synonym("resources", "write resources: {gpus: 1}"), "gpus", "num_gpus", "n_gpu", "devices",
           "resources.gpu", "resources.num_gpus", "nproc_per_node"),
    **_all(_key("retry.max_attempts"), "max_attempts", "max_retries", "retries", "retry.max_retries"),
    **_all(_key("time_limit_sec"), "time_limit", "timeout", "timeout_sec", "max_time", "walltime"),
    **_all(_key("depends_on"), "dependency", "dependencies", "after"),
    **_all(_none("leave it out; honectl submit --hold drops a job that waits"), "hold", "held"),
    **_all(_none("a job has one device for now"), "fsdp", "fsdp_config", "deepspeed", "tensor_parallel_size",
           "context_parallel_size", "ddp"),
}  # fmt: skip

#: Values that others write, and ours: the first that the key takes is named.
VALUES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bf16", "bfloat", "torch.bfloat16"), ("bfloat16",)),
    **dict.fromkeys(("fp16", "half", "f16", "torch.float16"), ("float16",)),
    **dict.fromkeys(("fp32", "float", "full", "f32", "torch.float32"), ("float32",)),
    **dict.fromkeys(("int4", "nf4", "fp4", "4", "4-bit", "bnb-4bit", "qlora"), ("4bit",)),
    **dict.fromkeys(("int8", "8", "8-bit", "bnb-8bit"), ("8bit",)),
    **dict.fromkeys(("fa2", "flash", "flash_attention", "flash_attn", "flash-attention-2"), ("flash_attention_2",)),
    **dict.fromkeys(("chat", "chatml", "chat_template", "openai", "conversational", "messages"), ("messages",)),
    **dict.fromkeys(("prompt-completion", "instruction", "input_output"), ("prompt_completion",)),
    **dict.fromkeys(("completion", "pretrain", "raw", "plain"), ("text",)),
    **dict.fromkeys(("json", "jsonl", "csv", "parquet"), ("auto",)),
    **dict.fromkeys(("never", "off", "false", "none"), ("no", "off", "none")),
    **dict.fromkeys(("hf", "huggingface", "trl", "peft"), ("transformers",)),
    **dict.fromkeys(("train", "lora", "qlora", "finetune", "fine-tune"), ("sft",)),
    "adamw": ("adamw_torch",),
    "adam": ("adamw_torch",),
}

#: Keys that would hold a secret. Their values are never shown.
SECRETS = re.compile(
    r"(.*_)?(api_key|apikey|secret|secret_key|password|passwd|access_key|credentials?|(hf|hub|auth|access|api|job|bearer|wandb)_token|token)"
)
#: What tokens look like: of Hugging Face, GitHub, OpenAI and the like, Slack, AWS, and signed ones (JWT).
SECRET_VALUES = re.compile(
    r"(?<![A-Za-z0-9])(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|AKIA[A-Z0-9]{16}|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.)"
)
