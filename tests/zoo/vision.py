"""Tiny complete vision and audio models of real families with random weights: config, weights, tokenizer, processor.

The processors are the families' own, scaled down for fast tests: an image is a handful of tokens, a second of sound is
fifty. Half of the models are laid out as on the hub (preprocessor_config.json beside the rest), half as transformers 5
writes them (all in processor_config.json).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from honed.worker.model import torchvision
from zoo.tokenizer import build_tokenizer

#: Seconds that the audio encoders accept at once; thirty in the real ones.
MAX_SOUND_SEC = 2
SAMPLING_RATE = 16000


def _chatml(media: str, *, default_system: bool = True) -> str:
    """Return ChatML whose messages are strings or parts; `media` is the template code for parts other than text."""
    system = "{{- '<|im_start|>system\\nYou are a careful assistant.<|im_end|>\\n' -}}" if default_system else ""
    return (
        "{%- set seen = namespace(audio=0) -%}"
        "{%- if messages[0].role != 'system' -%}" + system + "{%- endif -%}"
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}"
        "{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for part in m.content -%}"
        + media
        + "{%- elif 'text' in part -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
        "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


QWEN_VL = _chatml(
    "{%- if part.type == 'image' or 'image' in part -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part.type == 'video' or 'video' in part -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
)
#: Qwen3-VL's own expansion of a video writes the start and end around each frame.
QWEN3_VL = _chatml(
    "{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part.type == 'video' -%}{{- '<|video_pad|>' -}}",
    default_system=False,
)
QWEN_AUDIO = _chatml(
    "{%- if part.type == 'audio' -%}{%- set seen.audio = seen.audio + 1 -%}"
    "{{- 'Audio ' ~ seen.audio ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' -}}"
)
QWEN_OMNI = _chatml(
    "{%- if part.type == 'image' -%}{{- '<|vision_bos|><|IMAGE|><|vision_eos|>' -}}"
    "{%- elif part.type == 'video' -%}{{- '<|vision_bos|><|VIDEO|><|vision_eos|>' -}}"
    "{%- elif part.type == 'audio' -%}{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}"
)
LLAVA = _chatml("{%- if part.type == 'image' -%}{{- '<image>\\n' -}}")

#: LLaVA 1.5's: all images of a turn come first, string contents are iterated letter by letter and give no text, and an
#: assistant's turn ends with a space.
LLAVA_1_5 = (
    "{%- for m in messages -%}"
    "{%- if m.role != 'system' -%}{{- m.role | upper + ': ' -}}{%- endif -%}"
    "{%- for part in m.content | selectattr('type', 'equalto', 'image') -%}{{- '<image>\\n' -}}{%- endfor -%}"
    "{%- for part in m.content | selectattr('type', 'equalto', 'text') -%}{{- part.text + ' ' -}}{%- endfor -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"
)

#: Idefics3's and SmolVLM's: parts alone, and no space after the colon where an image follows.
IDEFICS3 = (
    "{{- '<|im_start|>' -}}{%- for m in messages -%}{{- m.role | capitalize -}}"
    "{%- if m.content is not string and m.content[0].type == 'image' -%}{{- ':' -}}"
    "{%- else -%}{{- ': ' -}}{%- endif -%}"
    "{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for part in m.content -%}"
    "{%- if part.type == 'text' -%}{{- part.text -}}{%- elif part.type == 'image' -%}{{- '<image>' -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<end_of_utterance>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"
)

GEMMA3 = (
    "{{- bos_token -}}{%- if messages[0].role == 'system' -%}"
    "{%- set system = messages[0].content -%}"
    "{%- set lead = (system if system is string else system[0].text) + '\\n\\n' -%}{%- set rest = messages[1:] -%}"
    "{%- else -%}{%- set lead = '' -%}{%- set rest = messages -%}{%- endif -%}"
    "{%- for m in rest -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}{%- endif -%}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (lead if loop.first else '') -}}"
    "{%- if m.content is string -%}{{- m.content | trim -}}{%- else -%}{%- for part in m.content -%}"
    "{%- if part.type == 'image' -%}{{- '<start_of_image>' -}}"
    "{%- elif part.type == 'text' -%}{{- part.text | trim -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '<end_of_turn>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class Family:
    """The ingredients of one family's checkpoint."""

    template: str  #: whose special tokens the tokenizer has
    chat_template: str
    tokens: Mapping[str, str] = field(default_factory=dict)  #: named special tokens: `image_token` → `<image>`
    more_tokens: tuple[str, ...] = ()  #: special tokens without a name
    media: tuple[str, ...] = ("image",)
    is_hub_layout: bool = True


_QWEN_VL_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}

FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        "gemma",
        GEMMA3,
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        is_hub_layout=False,
    ),
    "llava": Family("chatml", LLAVA, {"image_token": "<image>"}),
    "idefics3": Family(
        "chatml",
        IDEFICS3,
        {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        tuple(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
    ),
    "qwen2_vl": Family("chatml", QWEN_VL, _QWEN_VL_TOKENS, media=("image", "video")),
    "qwen2_5_vl": Family("chatml", QWEN_VL, _QWEN_VL_TOKENS, media=("image", "video")),
    "qwen3_vl": Family("chatml", QWEN3_VL, _QWEN_VL_TOKENS, media=("image", "video"), is_hub_layout=False),
    "qwen2_audio": Family(
        "chatml",
        QWEN_AUDIO,
        {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
        media=("audio",),
    ),
    "qwen2_5_omni_thinker": Family(
        "chatml",
        QWEN_OMNI,
        {
            "image_token": "<|IMAGE|>",
            "video_token": "<|VIDEO|>",
            "audio_token": "<|AUDIO|>",
            "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
        media=("image", "video", "audio"),
        is_hub_layout=False,
    ),
}


def build_vision_checkpoint(
    directory: Path,
    family: str = "gemma3",
    *,
    dtype: str = "float32",
    seed: int = 0,
    vocab_size: int = 640,
    chat_template: str | None = None,
    **text_config: Any,
) -> Path:
    """Build a complete vision or audio model. The same arguments give the same weights."""
    torchvision.mend()
    import torch
    from transformers import AutoConfig, AutoModelForMultimodalLM

    kind = FAMILIES[family]
    tokenizer = build_tokenizer(kind.template, vocab_size=vocab_size)
    tokenizer._set_model_specific_special_tokens(special_tokens=dict(kind.tokens))  # image_token, image_token_id, …
    tokenizer.add_tokens([*kind.tokens.values(), *kind.more_tokens], special_tokens=True)
    tokenizer.chat_template = chat_template or kind.chat_template
    settings = _settings(family, (len(tokenizer) + 7) // 8 * 8, tokenizer.get_vocab())
    settings["text_config"] |= text_config
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        settings[name] = settings["text_config"][name] = getattr(tokenizer, name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(family, **settings))
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    _processor(family, tokenizer).save_pretrained(directory)
    if kind.is_hub_layout:
        _lay_out_as_on_the_hub(directory)
    return directory


def write_pictures(path: Path, number: int) -> Path:
    """Write rows with an image of one color each, and the color's name; the images lie beside the file."""
    from PIL import Image

    rows = []
    for n in range(number):
        color = ("red", "green", "blue", "yellow")[n % 4]
        Image.new("RGB", (40 + n, 40), color).save(path.with_name(f"{path.stem}-{n}.png"))
        parts = [{"type": "image", "image": f"{path.stem}-{n}.png"}, {"type": "text", "text": "Which color?"}]
        rows.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": color}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build_speaking_checkpoint(directory: Path) -> Path:
    """Build a complete Qwen2.5-Omni: the thinker, and the speaking parts, which nobody trains here."""
    import torch
    from transformers import AutoConfig, AutoProcessor, Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    thinker = build_vision_checkpoint(directory.with_name("thinker"), "qwen2_5_omni_thinker")
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    talker = {
        "vocab_size": 64,
        "embedding_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": rope,
    }
    mouth = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ff_mult": 1,
        "head_dim": 16,
        "emb_dim": 16,
        "enc_dim": 16,
        "enc_emb_dim": 16,
        "num_embeds": 32,
        "mel_dim": 8,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 8,
        "enc_se_channels": 8,
        "enc_res2net_scale": 2,
    }
    voice = {
        "mel_dim": 8,
        "upsample_initial_channel": 16,
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]],
        "upsample_rates": [2],
        "upsample_kernel_sizes": [4],
    }
    config = Qwen2_5OmniConfig(
        thinker_config=AutoConfig.from_pretrained(thinker).to_dict(),
        talker_config=talker,
        token2wav_config={"dit_config": mouth, "bigvgan_config": voice},
        enable_audio_output=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2_5OmniForConditionalGeneration(config).save_pretrained(directory)
    AutoProcessor.from_pretrained(thinker).save_pretrained(directory)
    return directory


def _lay_out_as_on_the_hub(directory: Path) -> None:
    """Move image and audio settings to one preprocessor_config.json, and the rest, if any, to processor_config.json."""
    path = directory / "processor_config.json"
    rest = json.loads(path.read_text())
    flat: dict[str, Any] = {}
    for name in ("feature_extractor", "image_processor"):
        flat |= rest.pop(name, {})
    rest.pop("video_processor", None)  # older checkpoints have none: it is made from the image processor's file
    (directory / "preprocessor_config.json").write_text(json.dumps(flat | {"processor_class": rest["processor_class"]}))
    path.write_text(json.dumps(rest))


def _processor(family: str, tokenizer: Any) -> Any:
    import transformers

    def qwen_images() -> Any:
        patch_size = 16 if family == "qwen3_vl" else 14
        size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
        return transformers.Qwen2VLImageProcessor(size=size, patch_size=patch_size, merge_size=2, temporal_patch_size=2)

    template = tokenizer.chat_template
    match family:
        case "gemma3":
            images = transformers.Gemma3ImageProcessor(size={"height": 28, "width": 28})
            return transformers.Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template)
        case "llava":
            images = transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
            return transformers.LlavaProcessor(
                images,
                tokenizer,
                patch_size=14,
                vision_feature_select_strategy="default",
                num_additional_image_tokens=1,
                chat_template=template,
            )
        case "idefics3":
            images = transformers.Idefics3ImageProcessor(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
            return transformers.Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=template)
        case "qwen2_vl" | "qwen2_5_vl":
            videos = transformers.Qwen2VLVideoProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112 * 4})
            kind = transformers.Qwen2VLProcessor if family == "qwen2_vl" else transformers.Qwen2_5_VLProcessor
            return kind(qwen_images(), tokenizer, videos, chat_template=template)
        case "qwen3_vl":
            videos = transformers.Qwen3VLVideoProcessor(
                size={"shortest_edge": 32 * 32, "longest_edge": 128 * 128 * 4}, patch_size=16
            )
            return transformers.Qwen3VLProcessor(qwen_images(), tokenizer, videos, chat_template=template)
        case "qwen2_audio":
            return transformers.Qwen2AudioProcessor(_ears(), tokenizer, chat_template=template)
        case "qwen2_5_omni_thinker":
            videos = transformers.Qwen2VLVideoProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112 * 4})
            return transformers.Qwen2_5OmniProcessor(qwen_images(), videos, _ears(), tokenizer, chat_template=template)
        case _:
            raise ValueError(family)


def _ears() -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=16, sampling_rate=SAMPLING_RATE, chunk_length=MAX_SOUND_SEC)


def _settings(family: str, vocab_size: int, vocab: Mapping[str, int]) -> dict[str, Any]:
    text: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": 1024,
    }
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}}
    eyes: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    ears: dict[str, Any] = {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "max_source_positions": MAX_SOUND_SEC * 50,
    }
    qwen_ids = {
        "image_token_id": vocab.get("<|image_pad|>"),
        "video_token_id": vocab.get("<|video_pad|>"),
        "vision_start_token_id": vocab.get("<|vision_start|>"),
        "vision_end_token_id": vocab.get("<|vision_end|>"),
    }
    match family:
        case "gemma3":
            text |= {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64}
            return {
                "text_config": text,
                "vision_config": vision,
                "image_token_index": vocab["<image_soft_token>"],
                "boi_token_index": vocab["<start_of_image>"],
                "eoi_token_index": vocab["<end_of_image>"],
                "mm_tokens_per_image": 4,
            }
        case "llava":
            vision |= {"model_type": "clip_vision_model", "projection_dim": 32}
            text |= {"model_type": "llama"}
            return {
                "text_config": text,
                "vision_config": vision,
                "image_token_index": vocab["<image>"],
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "default",
            }
        case "idefics3":
            text |= {"model_type": "llama"}
            return {"text_config": text, "vision_config": vision, "image_token_id": vocab["<image>"], "scale_factor": 2}
        case "qwen2_vl":
            eyes = {
                "depth": 1,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            }
            return {"text_config": text | rope, "vision_config": eyes} | qwen_ids
        case "qwen2_5_vl":
            eyes |= {"fullatt_block_indexes": [0]}
            return {"text_config": text | rope, "vision_config": eyes} | qwen_ids
        case "qwen3_vl":
            rope["rope_parameters"] |= {"mrope_interleaved": True}
            eyes |= {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
            return {"text_config": text | {"head_dim": 16} | rope, "vision_config": eyes} | qwen_ids
        case "qwen2_audio":
            text |= {"model_type": "qwen2"}
            return {"text_config": text, "audio_config": ears, "audio_token_index": vocab["<|AUDIO|>"]}
        case "qwen2_5_omni_thinker":
            return {
                "text_config": text | rope,
                "vision_config": eyes | {"fullatt_block_indexes": [0]},
                "audio_config": ears | {"output_dim": 64, "n_window": 25},
                "image_token_index": vocab["<|IMAGE|>"],
                "video_token_index": vocab["<|VIDEO|>"],
                "audio_token_index": vocab["<|AUDIO|>"],
                "audio_start_token_id": vocab["<|audio_bos|>"],
                "audio_end_token_id": vocab["<|audio_eos|>"],
                "user_token_id": vocab.get("user", 0),
                "vision_start_token_id": vocab["<|vision_bos|>"],
                "vision_end_token_id": vocab["<|vision_eos|>"],
            }
        case _:
            raise ValueError(family)
