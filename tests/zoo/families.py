"""Tiny whole checkpoints of the families of transformers that honed trains, with each kind of layer that a family has.

Nothing in them is as a constructor leaves it: norms, biases and buffers are random too, so that whatever is lost on the
way and initialised anew shows in the logits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

Settings = Mapping[str, Any]
Kind = Literal["dense", "experts", "recurrent", "vision"]

#: What is tried of each; see promises.py.
PROMISES = ("resumed", "best", "divided", "merged", "exported", "bfloat16", "adapted")
WIDTH = 32
VOCABULARY = 408
#: The padding token.
PAD = 400
#: Families whose configs have no beginning of text that is null.
NEED_BOS = ("cwm", "mllama", "modernbert-decoder")
#: Tokens of those that see, 403 to 407.
_MEDIA = ("<image>", "<video>", "<audio>", "<vision_start>", "<vision_end>")
#: The settings that most families share. Each family below says what it has otherwise or beyond them.
_BASE: Settings = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
_WHOLE = {"num_key_value_heads": 4}
_HEAD = {"head_dim": 8}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 64, "tie_word_embeddings": True}
_LOCAL = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
_GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.15}
_UNDROPPED = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.05}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
}
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_SELECTIVE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "state_size": 8,
    "initializer_range": 0.15,
    "use_mambapy": False,
}
_GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7}

_DENSE: dict[str, Settings] = {
    "apertus": _BASE,
    "arcee": _BASE | _HEAD,
    "bitnet": _BASE,
    "bloom": {"hidden_size": WIDTH, "n_layer": 2, "n_head": 4, "initializer_range": 0.15},
    "codegen": _GPT | {"rotary_dim": 8},
    "cohere": _BASE | {"logit_scale": 0.5},
    "cohere2": _BASE | _HEAD | _LOCAL | {"logit_scale": 0.5},
    "cwm": _BASE | _HEAD | _LOCAL,
    "diffllama": _BASE | _HEAD,
    "doge": _BASE,
    "ernie4_5": _BASE | _HEAD,
    "exaone4": _BASE | _LOCAL,
    "falcon": {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 48,
        "new_decoder_architecture": True,
        "initializer_range": 0.15,
    },
    "gemma": _BASE | _HEAD,
    "gemma2": _BASE | _GEMMA | {"layer_types": _LOCAL["layer_types"]},
    "gemma3_text": _BASE | _GEMMA | {"layer_types": _LOCAL["layer_types"]},
    "gemma3n_text": _BASE
    | _HEAD
    | _LOCAL
    | {
        "intermediate_size": [48, 48, 48, 48],
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_text": _BASE
    | _HEAD
    | _LOCAL
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
    "glm": _BASE | _HEAD | {"pad_token_id": None},
    "glm4": _BASE | _HEAD,
    "gpt2": _GPT | _UNDROPPED,
    "gpt_bigcode": _GPT | _UNDROPPED,
    "gpt_neo": {
        "hidden_size": WIDTH,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "window_size": 64,
        "initializer_range": 0.15,
    },
    "gpt_neox": _BASE,
    "gptj": _GPT | {"rotary_dim": 8},
    "granite": _BASE | _GRANITE,
    "granite_swa": _BASE | _GRANITE | _LOCAL | {"layer_rope_theta": [10000.0, 10000.0]},
    "helium": _BASE | _HEAD,
    "hunyuan_v1_dense": _BASE | _HEAD,
    "hyperclovax": _BASE | _HEAD,
    "jais2": _BASE | _HEAD,
    "llama": _BASE,
    "minicpm3": _BASE | _LATENT | {"dim_model_base": 16},
    "ministral": _BASE | _HEAD | _LOCAL,
    "ministral3": _BASE | _HEAD,
    "mistral": _BASE | _HEAD | {"sliding_window": 64},
    "modernbert-decoder": _BASE | {"local_attention": 64, "layer_types": ["full_attention", "sliding_attention"]},
    "mpt": {"d_model": WIDTH, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "initializer_range": 0.15},
    "nanochat": _BASE,
    "nemotron": _BASE | _HEAD,
    "olmo": _BASE,
    "olmo2": _BASE,
    "olmo3": _BASE | _LOCAL,
    "opt": {
        "hidden_size": WIDTH,
        "word_embed_proj_dim": WIDTH,
        "ffn_dim": 48,
        "dropout": 0.0,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "init_std": 0.15,
    },
    "persimmon": _BASE,
    "phi": _BASE,
    "phi3": _BASE,
    "qwen2": _BASE,
    "qwen3": _BASE | _HEAD,
    "seed_oss": _BASE | _HEAD | {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": _BASE | {"no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2},
    "stablelm": _BASE,
    "starcoder2": _BASE,
    "vaultgemma": _BASE | _GEMMA | {"layer_types": _LOCAL["layer_types"]},
    "xglm": {
        "d_model": WIDTH,
        "ffn_dim": 48,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": 512,
        "init_std": 0.15,
    },
    "youtu": _BASE | _LATENT,
}

_MIXTURES: dict[str, Settings] = {
    "afmoe": _BASE | _HEAD | _LOCAL | _EXPERTS | {"num_dense_layers": 1, "num_shared_experts": 1},
    "axk1": _BASE | _LATENT | _ROUTED | {"first_k_dense_replace": 1},
    "cohere2_moe": _BASE | _HEAD | _LOCAL | _EXPERTS | {"logit_scale": 0.5, "num_shared_experts": 1},
    "dbrx": {
        "d_model": WIDTH,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 512,
        "initializer_range": 0.15,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": WIDTH},
    },
    "deepseek_v2": _BASE | _LATENT | _ROUTED | {"first_k_dense_replace": 1, "topk_method": "greedy"},
    "deepseek_v3": _BASE | _LATENT | _ROUTED | {"first_k_dense_replace": 1},
    "dots1": _BASE | _HEAD | _ROUTED | {"first_k_dense_replace": 1},
    "ernie4_5_moe": _BASE
    | {
        "moe_intermediate_size": 24,
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
    },
    "exaone_moe": _BASE
    | _HEAD
    | _LOCAL
    | _EXPERTS
    | _DENSE_FIRST
    | {"num_shared_experts": 1, "first_k_dense_replace": 1},
    "flex_olmo": _BASE | {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": _BASE | _HEAD | _ROUTED | {"first_k_dense_replace": 1, "use_qk_norm": True},
    "glm4_moe_lite": _BASE | _LATENT | _ROUTED | _DENSE_FIRST,
    "gpt_oss": _BASE | _HEAD | _LOCAL | _LOCAL_EXPERTS,
    "granitemoe": _BASE | _GRANITE | _LOCAL_EXPERTS,
    "granitemoeshared": _BASE | _GRANITE | _LOCAL_EXPERTS | {"shared_intermediate_size": 24},
    "hunyuan_v1_moe": _BASE | _HEAD | {"num_experts": 4, "moe_topk": 2},
    "hy_v3": _BASE | _HEAD | _EXPERTS | _DENSE_FIRST | {"num_shared_experts": 1},
    "jetmoe": _BASE | _LOCAL_EXPERTS | {"kv_channels": 8, "num_key_value_heads": 2},
    "laguna": _BASE
    | _HEAD
    | _LOCAL
    | _EXPERTS
    | _DENSE_FIRST
    | {"shared_expert_intermediate_size": 24, "num_attention_heads_per_layer": [4, 4]},
    "llama4_text": _BASE
    | _HEAD
    | {
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "moe_layers": [1],
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 64,
    },
    "longcat_flash": _BASE
    | _LATENT
    | {
        "head_dim": 8,
        "num_layers": 2,
        "num_hidden_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "minimax_m2": _BASE | _HEAD | _LOCAL_EXPERTS,
    "mimo_v2_flash": _BASE | _HEAD | _LOCAL | _ROUTED | _DENSE_FIRST | {"v_head_dim": 8},
    "mixtral": _BASE | _LOCAL_EXPERTS,
    "olmoe": _BASE | {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": _BASE | _LOCAL_EXPERTS | {"router_jitter_noise": 0.0},
    "qwen2_moe": _BASE | _EXPERTS | {"shared_expert_intermediate_size": 24, "router_aux_loss_coef": 0.05},
    "qwen3_moe": _BASE | _HEAD | _EXPERTS | {"router_aux_loss_coef": 0.05},
    "solar_open": _BASE | _HEAD | _ROUTED,
    "zaya": _BASE | _HEAD | _EXPERTS | {"router_hidden_size": 8, "num_experts_per_tok": 1},
}

_RECURRENT: dict[str, Settings] = {
    "bamba": _BASE | _MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": _BASE | _MAMBA2 | {"mamba_d_ssm": 64},
    "falcon_mamba": _SELECTIVE | {"time_step_rank": 4},
    "granitemoehybrid": _BASE
    | _GRANITE
    | _LOCAL_EXPERTS
    | _MAMBA2
    | {"shared_intermediate_size": 24, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": _BASE
    | _LOCAL_EXPERTS
    | {
        "num_experts": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": _BASE
    | {
        "moe_intermediate_size": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": _BASE | {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": _BASE | _EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "mamba": _SELECTIVE | {"time_step_rank": 4},
    "mamba2": _SELECTIVE | {"num_heads": 8, "head_dim": 8, "n_groups": 1, "time_step_rank": 4, "chunk_size": 16},
    "minimax": _BASE
    | _HEAD
    | _LOCAL_EXPERTS
    | {"block_size": 16, "layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": _BASE
    | _HEAD
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "use_mamba_kernels": False,
    },
    "olmo_hybrid": _BASE | _DELTA | {"linear_num_key_heads": 4},
    "qwen3_5_moe_text": _BASE | _HEAD | _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3_5_text": _BASE | _HEAD | _DELTA,
    "qwen3_next": _BASE | _HEAD | _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 24},
    "recurrent_gemma": _BASE
    | _HEAD
    | {"lru_width": WIDTH, "attention_window_size": 64, "block_types": ["recurrent", "attention"]},
    "rwkv": {
        "hidden_size": WIDTH,
        "attention_hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "context_length": 512,
    },
    "zamba": _BASE
    | {
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "zamba2": _BASE
    | {
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "chunk_size": 16,
        "adapter_rank": 8,
        "use_shared_attention_adapter": True,
        "use_mamba_kernels": False,
    },
}

_EYES: Settings = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "initializer_range": 0.15,
}
_CLIP = _EYES | {"model_type": "clip_vision_model", "projection_dim": 16}
_SIGLIP = _EYES | {"model_type": "siglip_vision_model"}
_SIZED = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": WIDTH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.15,
}
_QWEN2_EYES = _SIZED | {"patch_size": 14, "fullatt_block_indexes": [0]}
_QWEN3_EYES = _SIZED | {"patch_size": 16, "num_position_embeddings": 16}
_GLM_EYES = _SIZED | {"patch_size": 14, "image_size": 28}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
_INTERLEAVED = {"rope_parameters": _SECTIONS["rope_parameters"] | {"mrope_interleaved": True}}
_VIDEO = {"video_token_id": 404, "vision_start_token_id": 406, "vision_end_token_id": 407}
_SELECTED = {"image_token_index": 403, "vision_feature_layer": -1, "vision_feature_select_strategy": "default"}

#: Of those that see: the settings of the whole, in which `text_config` is completed.
_VISION: dict[str, Settings] = {
    "aya_vision": {
        "text_config": _DENSE["cohere2"] | {"model_type": "cohere2"},
        "vision_config": _SIGLIP,
        "image_token_index": 403,
    },
    "cohere2_vision": {
        "text_config": _DENSE["cohere2"] | {"model_type": "cohere2"},
        "vision_config": _SIGLIP,
        "alignment_intermediate_size": 24,
        "image_token_id": 403,
    },
    "gemma3": {
        "text_config": _DENSE["gemma3_text"],
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 4,
        "image_token_index": 403,
        "boi_token_index": 406,
        "eoi_token_index": 407,
    },
    "gemma4": {
        "text_config": _DENSE["gemma4_text"],
        "vision_config": _EYES | {"model_type": "gemma4_vision", "head_dim": 8, "position_embedding_size": 16},
        "image_token_id": 403,
        "video_token_id": 404,
        "audio_token_id": 405,
        "boi_token_id": 406,
        "eoi_token_id": 407,
    },
    "glm4v": {
        "text_config": _BASE | _SECTIONS,
        "vision_config": _GLM_EYES,
        "image_token_id": 403,
        "video_token_id": 404,
    },
    "glm4v_moe": {
        "text_config": _MIXTURES["glm4_moe"] | _SECTIONS | {"head_dim": 16},
        "vision_config": _GLM_EYES,
        "image_token_id": 403,
        "video_token_id": 404,
    },
    "idefics2": {
        "text_config": _BASE | {"model_type": "mistral"},
        "vision_config": _EYES,
        "perceiver_config": {
            "hidden_size": WIDTH,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 8,
            "num_key_value_heads": 1,
            "resampler_n_latents": 4,
        },
        "image_token_id": 403,
    },
    "idefics3": {
        "text_config": _BASE | {"model_type": "llama"},
        "vision_config": _EYES,
        "image_token_id": 403,
        "scale_factor": 2,
    },
    "internvl": {
        "text_config": _BASE | {"model_type": "qwen2"},
        "vision_config": _EYES | {"image_size": [28, 28], "patch_size": [14, 14]},
        "image_token_id": 403,
        "image_seq_length": 1,
    },
    "lfm2_vl": {
        "text_config": _RECURRENT["lfm2"] | {"model_type": "lfm2"},
        "vision_config": _EYES | {"model_type": "siglip2_vision_model", "num_patches": 16},
        "projector_hidden_size": 24,
        "image_token_id": 403,
    },
    "llama4": {
        "text_config": _MIXTURES["llama4_text"],
        "vision_config": _EYES
        | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "intermediate_size": 64},
        "image_token_index": 403,
        "boi_token_index": 406,
        "eoi_token_index": 407,
    },
    "llava": {"text_config": _BASE | {"model_type": "llama"}, "vision_config": _CLIP} | _SELECTED,
    "llava_next": {"text_config": _BASE | {"model_type": "mistral"}, "vision_config": _CLIP}
    | _SELECTED
    | {"image_grid_pinpoints": [[28, 28]]},
    "llava_onevision": {"text_config": _BASE | {"model_type": "qwen2"}, "vision_config": _SIGLIP}
    | _SELECTED
    | {"video_token_index": 404, "image_grid_pinpoints": [[28, 28]]},
    "mistral3": {
        "text_config": _BASE | _HEAD | {"model_type": "mistral"},
        "vision_config": _EYES | {"model_type": "pixtral", "head_dim": 8},
        "image_token_index": 403,
    },
    "mllama": {
        "text_config": _BASE | {"cross_attention_layers": [1]},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 2,
            "vision_output_dim": 32,
            "image_size": 28,
            "patch_size": 14,
            "intermediate_layers_indices": [0],
            "initializer_range": 0.15,
        },
        "image_token_index": 403,
    },
    "paligemma": {
        "text_config": _DENSE["gemma"] | {"model_type": "gemma"},
        "vision_config": _SIGLIP,
        "projection_dim": WIDTH,
        "image_token_index": 403,
    },
    "qwen2_vl": {
        "text_config": _BASE | _SECTIONS,
        "vision_config": {
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": WIDTH,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
        },
        "image_token_id": 403,
    }
    | _VIDEO,
    "qwen2_5_vl": {"text_config": _BASE | _SECTIONS, "vision_config": _QWEN2_EYES, "image_token_id": 403} | _VIDEO,
    "qwen3_vl": {
        "text_config": _BASE | _HEAD | _INTERLEAVED,
        "vision_config": _QWEN3_EYES | {"deepstack_visual_indexes": [0]},
        "image_token_id": 403,
    }
    | _VIDEO,
    "qwen3_vl_moe": {
        "text_config": _MIXTURES["qwen3_moe"] | _INTERLEAVED,
        "vision_config": _QWEN3_EYES | {"deepstack_visual_indexes": [0]},
        "image_token_id": 403,
    }
    | _VIDEO,
    "qwen3_5": {
        "text_config": _RECURRENT["qwen3_5_text"],
        "vision_config": _QWEN3_EYES,
        "image_token_id": 403,
    }
    | _VIDEO,
    "qwen3_5_moe": {
        "text_config": _RECURRENT["qwen3_5_moe_text"],
        "vision_config": _QWEN3_EYES,
        "image_token_id": 403,
    }
    | _VIDEO,
    "smolvlm": {
        "text_config": _BASE | {"model_type": "llama"},
        "vision_config": _EYES,
        "image_token_id": 403,
        "scale_factor": 2,
    },
    "vipllava": {
        "text_config": _BASE | {"model_type": "llama"},
        "vision_config": _CLIP,
        "vision_feature_layers": [-1, -2],
        "image_token_index": 403,
    },
}

#: Of some families, keys of `training` without which they do not train, and why.
REMEDIES: dict[str, tuple[dict[str, Any], str]] = {
    **dict.fromkeys(
        ("doge", "granitemoe", "granitemoehybrid", "granitemoeshared", "llama4", "llama4_text"),
        (
            {"router_aux_loss_coef": 0.0},
            "with router_aux_loss_coef: 0, as transformers computes no balancing loss of it",
        ),
    ),
    "jetmoe": ({"gradient_checkpointing": False}, "without gradient_checkpointing, which its model does not support"),
}

#: Linear layers that take no adapter: these routers return tuples. honed refuses the job with this remedy.
EXCLUDED: dict[str, tuple[str, ...]] = dict.fromkeys(("llama4", "llama4_text", "phimoe"), ("router",))
#: The same: peft cannot read their adapter again, as transformers renames its stored names twice.
EXCLUDED |= {"laguna": ("shared_experts.down_proj", "shared_experts.gate_proj", "shared_experts.up_proj")}

#: Families in which transformers sets the padding token's row to zero at each load, in `_init_weights`.
ZEROED = ("youtu",)

#: Every family: its kind, and its settings.
FAMILIES: dict[str, tuple[Kind, Settings]] = {
    **{name: ("dense", settings) for name, settings in _DENSE.items()},
    **{name: ("experts", settings) for name, settings in _MIXTURES.items()},
    **{name: ("recurrent", settings) for name, settings in _RECURRENT.items()},
    **{name: ("vision", settings) for name, settings in _VISION.items()},
}


def build(directory: Path, family: str, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Write a complete base model. The same arguments give the same weights."""
    import torch
    from transformers import AutoConfig

    from zoo.tokenizer import build_tokenizer

    kind, settings = FAMILIES[family]
    tokenizer = build_tokenizer("chatml", vocab_size=400)
    if kind == "vision":
        tokenizer.add_tokens(list(_MEDIA), special_tokens=True)
        (directory / "preprocessor_config.json").parent.mkdir(parents=True, exist_ok=True)
        (directory / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14, "merge_size": 2}))
    if family in NEED_BOS:
        tokenizer.bos_token = tokenizer.eos_token
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    common = {"vocab_size": VOCABULARY} | ids
    whole = common | settings
    if "text_config" in settings:
        whole = ids | settings | {"text_config": common | settings["text_config"]}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(family).from_config(AutoConfig.for_model(family, **whole))
        shake(model)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def model_class(family: str) -> Any:
    """Return the class of transformers that reads a family's checkpoints."""
    import transformers

    return transformers.AutoModelForImageTextToText if is_vision(family) else transformers.AutoModelForCausalLM


def is_vision(family: str) -> bool:
    return FAMILIES[family][0] == "vision"


def shake(model: Any) -> None:
    """Change each tensor that a checkpoint holds so that it has neither zeros alone nor ones."""
    import torch

    with torch.no_grad():
        for name, tensor in dict(model.state_dict()).items():
            if name.endswith("balancing_biases"):  # zaya's have a constant
                continue
            if tensor.is_floating_point() and tensor.numel() > 1 and (tensor.ndim == 1 or is_constant(tensor)):
                generator = torch.Generator().manual_seed(len(name))
                tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))


def is_constant(tensor: Any) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def write_rows(path: Path, number: int = 12) -> Path:
    """Write rows of unequal length: answers of one word to many."""
    words = ("Paris", "is", "the", "capital", "of", "France", "and", "Berlin", "that", "of", "Germany", "too")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n}?"},
                {"role": "assistant", "content": " ".join(words[: 1 + 5 * n % len(words)]) + "."},
            ]
        }
        for n in range(number)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
