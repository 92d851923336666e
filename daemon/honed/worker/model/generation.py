"""The base model's generation settings (generation_config.json): not used in predictions, kept for the output.

transformers fills in every setting that a call of `generate` leaves open from the model's own. A base that ships a
`repetition_penalty` would use it in "greedy" answers, too. `neutral` resets all settings that shape the choice of
tokens. Settings that transformers does not know stay: a model's class may need them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

FILE = "generation_config.json"
#: Settings of the base that stay: ids and words that begin, end and fill answers, and those that change no token.
KEPT = frozenset(
    {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        "stop_strings",
        "disable_compile",
        "prefill_chunk_size",
        "transformers_version",
        "_commit_hash",
        "_from_model_config",
    }
)
#: Settings that are reset, as if the base had none. Anything else that transformers knows is treated the same way; a
#: test compares both lists with the installed version.
NEUTRAL = frozenset(
    {
        # length and time of an answer, which are the job's
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "max_time",
        "max_cache_len",
        "exponential_decay_length_penalty",
        "length_penalty",
        "early_stopping",
        # how tokens are chosen
        "do_sample",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "num_return_sequences",
        "penalty_alpha",
        "constraints",
        "force_words_ids",
        "low_memory",
        # drawing
        "temperature",
        "top_k",
        "top_p",
        "top_h",
        "min_p",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        # scores that are changed
        "repetition_penalty",
        "encoder_repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "guidance_scale",
        "dola_layers",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "watermarking_config",
        "token_healing",
        "renormalize_logits",
        "remove_invalid_values",
        # other ways to the same tokens, which are the same only in theory
        "use_cache",
        "cache_implementation",
        "cache_config",
        "compile_config",
        "continuous_batching_config",
        "use_mtp",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_lookbehind",
        "assistant_ensemble_weight",
        "target_lookbehind",
        "speculation_type",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        # what a call returns
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
    }
)


@contextmanager
def neutral(model: Any) -> Iterator[None]:
    """Reset the settings that shape the choice of tokens, in the model and in every part that generates by itself."""
    from transformers import GenerationConfig

    known = {name: value for name, value in vars(GenerationConfig()).items() if name not in KEPT}
    # Changed in place: peft hands one and the same object on to the model that it wraps.
    saved = [(config, dict(vars(config))) for config in _configs(model)]
    try:
        for config, settings in saved:
            vars(config).update({name: value for name, value in known.items() if name in settings})
        yield
    finally:
        for config, settings in saved:
            vars(config).update(settings)


def savable(model: Any) -> AbstractContextManager[None]:
    """Return a context in which the model can be saved.

    transformers refuses to write settings that contradict each other (a temperature without do_sample), which
    checkpoints of older versions contain.
    """
    for config in _configs(model):
        try:
            config.validate(strict=True)
        except ValueError:
            return neutral(model)
    return nullcontext()


def end_ids(model: Any) -> list[int]:
    """Return the tokens at which answers end, by the base's settings: Llama-3.1's `<|eom_id|>` ends a call."""
    values = (getattr(config, "eos_token_id", None) for config in _configs(model))
    ids: Any = next((item for item in values if item is not None), [])
    return [int(item) for item in ([ids] if isinstance(ids, int) else ids)]


def stop_strings(model: Any) -> Any:
    """Return the words at which answers end, by the base's own settings."""
    return next((config.stop_strings for config in _configs(model) if getattr(config, "stop_strings", None)), None)


def _configs(model: Any) -> list[Any]:
    """Return every generation config once, the outermost model's first."""
    configs = {id(config): config for module in model.modules() if (config := module.__dict__.get("generation_config"))}
    if not configs:
        return []
    from transformers import GenerationConfig

    return [config for config in configs.values() if isinstance(config, GenerationConfig)]
