"""The tokenizer's files of an output: the base model's, byte for byte, but for what a reader needs.

    tokenizer_config.json    tokenizer_class         one that transformers 4.57 and 5 know, and that uses tokenizer.json
                                                     as it is
                             extra_special_tokens    as additional_special_tokens: 4.57 refuses a list
                             eos_token               training.eos_token, where the job sets it
                             chat_template           left out where the job has a template
    special_tokens_map.json  eos_token               as above
    chat_template.jinja                              the job's template, where it has one
    generation_config.json   eos_token_id            every token at which predictions stopped

What is changed is returned as lines for the model card.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from honed.inputs import basemodel
from honed.job import tree
from honed.text import tokenfile
from honed.worker.assignment import Assignment
from honed.worker.model import generation
from honed.worker.model import tokenizer as tokenizers

#: Files of tokenizers, whatever their class.
NAMES = re.compile(
    r"tokenizer.*\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt|bpe)|merges\.txt|.*\.model"
    r"|tokenizer\.model\..*|tekken\.json|.*\.tiktoken|chat_template\.jinja"
)
TEMPLATES_DIR = "additional_chat_templates"
CONFIG, SPECIAL, TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
#: transformers' class that uses tokenizer.json as it is, in 4 and in 5.
PLAIN = "PreTrainedTokenizerFast"
#: Classes that only transformers 5 has, and that read tokenizer.json.
_NEW_CLASSES = frozenset({"TokenizersBackend", "PythonBackend", "SentencePieceBackend", "Qwen3_5Tokenizer"})


def write(assignment: Assignment, tokenizer: Any, made: Path, stop_ids: Sequence[int]) -> list[str]:
    """Write the tokenizer's files of what was trained, and its generation_config.json.

    `stop_ids` are the tokens that end the trained turns. Returns the changes.
    """
    base, spec = assignment.base_model_path, assignment.spec
    _copy(base, made, extra=_vocabulary_files(tokenizer), with_code=spec.trust_remote_code)
    changes = [*_for_readers(made, tokenizer)]
    if (end := spec.training.eos_token) is not None:
        changes += _set_end(made, end)
    if spec.chat_template is not None:
        changes += _set_template(made, Path(spec.chat_template))
    changes += write_ends(base, made, stop_ids, first=tokenizer.eos_token_id if end is not None else None)
    if any("tokenizer_class" in change for change in changes) and (fault := _fault(assignment, made)):
        changes.append(fault)
    return changes


def merged(base: Path, adapter: Path, made: Path, chat_template: str | None, *, with_code: bool) -> list[str]:
    """Copy the files of a merged model: the adapter's where it has them, else the base's. Returns the changes."""
    has_own = any(all((adapter / name).is_file() for name in row) for row in basemodel.TOKENIZER_FILES)
    _copy(adapter if has_own else base, made, with_code=with_code)
    ends = adapter if (adapter / generation.FILE).is_file() else base
    if (ends / generation.FILE).is_file():
        shutil.copyfile(ends / generation.FILE, made / generation.FILE)
    if (made / TEMPLATE).exists() and not (base / TEMPLATE).exists():
        (made / "chat_template.json").unlink(missing_ok=True)  # the adapter has another template
    changes = [*_for_readers(made, None)]
    if chat_template is not None:
        changes += _set_template(made, Path(chat_template))
    return changes


def is_one(name: str) -> bool:
    """Return True for a file that `merged` copies."""
    return NAMES.fullmatch(name) is not None or name == generation.FILE


def _copy(source: Path, made: Path, *, extra: Sequence[str] = (), with_code: bool) -> None:
    has_code = with_code and "auto_map" in (tokenfile.config(source) or {})
    for path in sorted(source.iterdir()):  # not glob, which silently skips what may not be read
        is_wanted = NAMES.fullmatch(path.name) or path.name in extra or (has_code and path.suffix == ".py")
        if is_wanted and path.is_file():
            shutil.copyfile(path, made / path.name)
    if (source / TEMPLATES_DIR).is_dir():
        shutil.copytree(source / TEMPLATES_DIR, made / TEMPLATES_DIR, dirs_exist_ok=True)


def _vocabulary_files(tokenizer: Any) -> list[str]:
    """Return the names that a tokenizer's class has for its files: BertTokenizer's vocab.txt, BARThez' .model."""
    return [name for name in getattr(tokenizer, "vocab_files_names", {}).values() if isinstance(name, str)]


# --- tokenizer_config.json ------------------------------------------------------------------------------------------


def _for_readers(made: Path, tokenizer: Any) -> Iterator[str]:
    """Change what a reader stumbles over. Yields the changes. `tokenizer` is the one of the training, if there was
    one."""
    config = tokenfile.config(made)
    if config is None or not (made / tokenizers.FILE).is_file():
        return
    was = config.get("tokenizer_class")
    if isinstance(was, str) and "auto_map" not in config and not _fits(made, was, tokenizer):
        config["tokenizer_class"] = PLAIN
        # In transformers 4 that class also returns token_type_ids, which few models take; in 5 it returns these two.
        config.setdefault("model_input_names", ["input_ids", "attention_mask"])
        _write(made / CONFIG, config)
        why = (
            "transformers 4 does not know that class"
            if was in _NEW_CLASSES
            else "with that class, transformers 5 gives other token ids than tokenizer.json"
        )
        yield f"{CONFIG}: tokenizer_class is {PLAIN} instead of {was}: {why}"
    if isinstance(listed := config.get("extra_special_tokens"), list):
        del config["extra_special_tokens"]
        named = [*(config.get("additional_special_tokens") or []), *listed]
        config["additional_special_tokens"] = [item for n, item in enumerate(named) if item not in named[:n]]
        _write(made / CONFIG, config)
        yield f"{CONFIG}: extra_special_tokens is named additional_special_tokens: transformers 4 refuses such a list"


def _fits(made: Path, name: str, tokenizer: Any) -> bool:
    """Return True if transformers 4 and 5 both know a class, and it uses tokenizer.json as it is."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if name in _NEW_CLASSES:
        return False
    bare = name.removesuffix("Fast")
    if bare == "PreTrainedTokenizer" or (tokenizer is not None and bare == type(tokenizer).__name__):
        return True  # `tokenizer` was compared with the file when it was loaded
    kind = tokenizer_class_from_name(name) or tokenizer_class_from_name(bare)
    if kind is None:
        return False
    try:
        opened = kind.from_pretrained(made)
        return not hasattr(opened, "backend_tokenizer") or tokenizers.agrees(
            opened, tokenizers.from_file(made / tokenizers.FILE)
        )
    except Exception:  # noqa: BLE001 - a class that does not suit the file raises anything
        return False


def _fault(assignment: Assignment, made: Path) -> str:
    """Return what is wrong with the ids of a reader that lets transformers choose the class; empty if nothing is."""
    try:
        opened = tokenizers.open_auto(made, assignment)
    except Exception as error:  # noqa: BLE001 - what a reader would see
        return f"{CONFIG}: AutoTokenizer cannot open it ({type(error).__name__}): open it with {PLAIN}"
    if tokenizers.agrees(opened, tokenizers.from_file(made / tokenizers.FILE)):
        return ""
    return (
        f"AutoTokenizer of transformers 5 opens this tokenizer as {type(opened).__name__} whatever its files say, and "
        f"gives other token ids than in training: open it with {PLAIN}.from_pretrained"
    )


def _set_end(made: Path, end: str) -> Iterator[str]:
    for name in (CONFIG, SPECIAL):
        config = _read(made / name)
        if (config is None and name == SPECIAL) or _text(was := (config or {}).get("eos_token")) == end:
            continue
        if name == SPECIAL and was is None:
            continue
        _write(made / name, (config or {"tokenizer_class": PLAIN}) | {"eos_token": end})
        yield f"{name}: eos_token is {end} instead of {_text(was)}: training.eos_token"


def _set_template(made: Path, template: Path) -> Iterator[str]:
    """Give an output the job's template alone: readers take that of a tokenizer from either place."""
    shutil.copyfile(template, made / TEMPLATE)
    tree.remove(made / TEMPLATES_DIR)
    (made / "chat_template.json").unlink(missing_ok=True)
    yield f"{TEMPLATE}: the job's chat_template"
    if (config := tokenfile.config(made)) is not None and config.pop("chat_template", None) is not None:
        _write(made / CONFIG, config)
        yield f"{CONFIG}: chat_template is left out: it is in {TEMPLATE}"


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


# --- generation_config.json -----------------------------------------------------------------------------------------


def write_ends(base: Path, made: Path, stop_ids: Sequence[int], *, first: int | None = None) -> Iterator[str]:
    """Give an output the base's generation_config.json, in which every token that ends a trained turn stops an answer.

    `first` is the one that the job names, if it names one. A base without that file ends answers by its config.json.
    """
    raw = _read(base / generation.FILE)
    whole = _read(made / generation.FILE) if raw is None else raw  # written with a whole model
    known = basemodel.end_ids(base)
    ids = list(dict.fromkeys([*([first] if first is not None else []), *known, *stop_ids]))
    if raw is not None and (not ids or raw.get("eos_token_id") in (ids, *(ids if len(ids) == 1 else []))):
        shutil.copyfile(base / generation.FILE, made / generation.FILE)
        return
    written = dict(whole if whole is not None else _defaults(base)) | {"eos_token_id": ids[0] if len(ids) == 1 else ids}
    written.pop("_from_model_config", None)  # else transformers may take the ids from config.json again
    _write(made / generation.FILE, written)
    if ids != known:
        yield f"{generation.FILE}: eos_token_id is {ids} instead of {known}: these tokens end the trained turns"


def _defaults(base: Path) -> dict[str, int]:
    """Return what transformers takes from a base model's config.json where there is no generation_config.json."""
    config = _read(base / "config.json") or {}
    return {key: config[key] for key in ("bos_token_id", "pad_token_id") if type(config.get(key)) is int}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
