"""Packages installed beside honed, found by their metadata without importing them, so it takes milliseconds.

The version ranges are those of pyproject.toml, within which the training stack and Unsloth work together.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

#: Packages that every worker needs, and the tested versions.
WINDOWS: dict[str, str] = {
    "torch": ">=2.6,<2.15",
    "transformers": ">=5.2,<=5.17",
    "trl": ">=1.9,<1.15",
    "datasets": ">=4.6,<5",
    "peft": ">=0.19,<0.22",
    "accelerate": ">=1.13,<1.16",
    "jinja2": ">=3.1.4,<4",
}
#: Packages that some jobs need.
OPTIONAL_WINDOWS: dict[str, str] = {
    "bitsandbytes": ">=0.49,<0.51",
    "huggingface_hub": ">=1.5,<2",
    "unsloth": ">=2026.10.4",
    "unsloth_zoo": ">=2026.10.4",
    "pillow": ">=11,<14",
    "av": ">=14,<19",
    "torchvision": ">=0.21,<0.30",
    "xxhash": ">=3.4,<5",
}
#: The module of a package, if its name differs.
MODULES = {"pillow": "PIL"}

#: Versions that are known to fail, each with the reason.
BROKEN: tuple[tuple[str, str, str], ...] = (
    (
        "transformers",
        "==4.57.2",
        "cannot load a model from a local directory: 'dict' object has no attribute 'model_type' "
        "(huggingface/transformers#42369)",
    ),
    ("transformers", "<5", "uses other names for the trainer's arguments"),
    ("trl", "<1", "uses other names for the trainer's arguments"),
)
#: The same for versions that fail only together with Unsloth.
BROKEN_BESIDE_UNSLOTH: tuple[tuple[str, str, str], ...] = (
    ("transformers", ">5.17", "is newer than Unsloth supports"),
    ("trl", ">1.15", "is newer than Unsloth supports"),
    ("datasets", ">=5", "is newer than Unsloth supports"),
    *(("datasets", f"=={version}", "is not supported by Unsloth") for version in ("4.0.*", "4.1.0", "4.4.*", "4.5.0")),
    *(("transformers", f"=={version}", "is not supported by Unsloth") for version in ("5.0.0", "5.1.0")),
)

#: The oldest version of a tracker that transformers can report to: trackio 0.20 does not accept `bucket_id`.
OLDEST_TRACKERS = {"trackio": "0.21.1"}

#: Other names for an architecture, found in real checkpoints, which transformers does not know.
MODEL_TYPE_ALIASES = {
    "code_llama": "llama",
    "codellama": "llama",
    "llama2": "llama",
    "llama3": "llama",
    "vicuna": "llama",
    "yi": "llama",
    "qwen": "qwen2",
    "qwen2.5": "qwen2",
    "qwen2_5": "qwen2",
    "phi4": "phi3",
    "zephyr": "mistral",
}


@dataclass(frozen=True)
class Installed:
    """Versions of the relevant packages; None for one that is not installed."""

    versions: dict[str, str | None]
    importable: frozenset[str]  #: those whose module is found beside their metadata

    def has(self, name: str) -> bool:
        return self.versions.get(name) is not None and name in self.importable


def look() -> Installed:
    """Return the packages installed in this interpreter's environment."""
    return _look(tuple(map(_mark, sys.path)))


def _mark(place: str) -> tuple[str, int]:
    """Return a directory of packages and its modification time: pip creates and removes directories there."""
    try:
        return place, Path(place).stat().st_mtime_ns
    except OSError:
        return place, 0


@lru_cache(maxsize=1)
def _look(_marks: tuple[tuple[str, int], ...]) -> Installed:
    """Read the packages, cached until a directory changes: it takes half the time of checking a small job."""
    names = [*WINDOWS, *OPTIONAL_WINDOWS, "flash_attn"]
    versions = {name: version(name) for name in names}
    return Installed(versions, frozenset(name for name in names if importlib.util.find_spec(MODULES.get(name, name))))


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def fits(version: str, window: str) -> bool:
    """Tell whether a version is in a range such as `>=5.2,<=5.17`; pre-release and local tags are ignored."""
    return all(_fits_bound(version, bound.strip()) for bound in window.split(","))


def _fits_bound(version: str, bound: str) -> bool:
    match = re.fullmatch(r"(>=|<=|==|!=|<|>)\s*([\d.]+?)(\.\*)?", bound)
    assert match is not None, f"not a version bound: {bound}"
    limit, exact = _places(match[2]), _places(version)
    if match[3]:
        exact = exact[: len(limit)]
    width = max(len(limit), len(exact))
    short, limit = (places + (0,) * (width - len(places)) for places in (exact, limit))
    match match[1]:
        case ">=":
            return short >= limit
        case "<=":
            return short <= limit
        case "<":
            return short < limit
        case ">":
            return short > limit
        case "!=":
            return short != limit
        case _:
            return short == limit


def _places(text: str) -> tuple[int, ...]:
    """Return the release numbers of a version: `2.13.0+cpu` is (2, 13, 0)."""
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(place) for place in release[0].split(".")) if release else ()


@cache
def unshifted_model_types() -> frozenset[str]:
    """Return the model types for which transformers' label smoothing does not shift the labels: it shifts them for
    classes of causal language models only, and many multimodal models are none. Read from its source.
    """
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return frozenset()
    try:
        models = (Path(package.origin).parent / "models" / "auto" / "modeling_auto.py").read_text()
    except OSError:
        return frozenset()
    named = {
        mapping: dict(re.findall(r'\("([\w.-]+)", "(\w+)"', block))
        for mapping, block in re.findall(r"^MODEL_FOR_(\w+)_MAPPING_NAMES = (.*?^\))", models, re.M | re.S)
    }
    causal = named.get("CAUSAL_LM", {})
    taken = {**named.get("MULTIMODAL_LM", {}), **causal, **named.get("IMAGE_TEXT_TO_TEXT", {})}
    return frozenset(model_type for model_type, name in taken.items() if name not in causal.values())


@cache
def known_model_types() -> tuple[frozenset[str], frozenset[str]]:
    """Return the model types that the installed transformers knows, and those among them that generate text, whatever
    other input they take.

    They are read from its source, since importing it takes a second. Both are empty if the source has another form:
    then nothing is known, and nothing may be rejected.
    """
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return frozenset(), frozenset()
    auto = Path(package.origin).parent / "models" / "auto"
    try:
        configs = (auto / "configuration_auto.py").read_text() + (auto / "auto_mappings.py").read_text()
        models = (auto / "modeling_auto.py").read_text()
    except OSError:
        return frozenset(), frozenset()
    known = re.findall(r'"([\w.-]+)"[:,]\s*"\w+Config"', configs)
    blocks = re.findall(
        r"^MODEL_FOR_(?:CAUSAL_LM|IMAGE_TEXT_TO_TEXT|MULTIMODAL_LM)_MAPPING_NAMES = .*?^\)", models, re.M | re.S
    )
    writing = re.findall(r'\("([\w.-]+)", "', "".join(blocks))
    return frozenset([*known, *writing]), frozenset(writing)


_ASSIGNED = re.compile(r"\b\w+\.(\w+)\s*(?::[^=\n]+)?=[^=]")


#: Tensors that a module makes and no optimizer steps.
_FIXED = re.compile(
    r'\.(\w+)\s*=\s*(?:torch\.)?nn\.(?:Buffer\(|Parameter\([^=]*?requires_grad=False)|register_buffer\(\s*"(\w+)"'
)


#: Those of them that are parameters.
_HELD = re.compile(r"\.(\w+)\s*=\s*(?:torch\.)?nn\.Parameter\([^=]*?requires_grad=False")


@lru_cache(maxsize=64)
def attribute_names(model_type: str) -> frozenset[str] | None:
    """Return the attribute names in a model type's classes, from the source of the installed transformers, or None."""
    return frozenset(name for text in _sources(model_type) for name in _ASSIGNED.findall(text)) or None


@lru_cache(maxsize=64)
def fixed_names(model_type: str) -> frozenset[str]:
    """Return the names of tensors that are no trained parameters of a model type's classes, from the same source."""
    names = (name for text in _sources(model_type) for item in _FIXED.findall(text) for name in item)
    return frozenset(names) - {"", "weight", "bias"}


@lru_cache(maxsize=64)
def held_names(model_type: str) -> frozenset[str]:
    """Return those of `fixed_names` that are parameters."""
    return frozenset(name for text in _sources(model_type) for name in _HELD.findall(text)) - {"weight", "bias"}


def _sources(model_type: str) -> Iterator[str]:
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None or not re.fullmatch(r"[\w.-]+", model_type):
        return
    folder = Path(package.origin).parent / "models"
    names = (_module_names().get(model_type, model_type), re.sub(r"_(text|vision|audio).*", "", model_type))
    for name in dict.fromkeys(names):
        for source in (folder / name.replace("-", "_")).glob("*.py"):
            if source.name.startswith(("modeling_", "vision", "perceiver")):
                with contextlib.suppress(OSError, ValueError):
                    yield source.read_text(encoding="utf-8")


@lru_cache(maxsize=64)
def base_prefix(model_type: str) -> str | None:
    """Return the name under which a model with a head holds the bare model, from transformers' source, or None."""
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None or not re.fullmatch(r"[\w.-]+", model_type):
        return None
    name = _module_names().get(model_type, model_type).replace("-", "_")
    source = Path(package.origin).parent / "models" / name / f"modeling_{name}.py"
    try:
        match = re.search(r'^    base_model_prefix = "(\w+)"', source.read_text(encoding="utf-8"), re.M)
    except (OSError, ValueError):
        return None
    return match[1] if match else None


@cache
def _module_names() -> dict[str, str]:
    """Return the module folder of every model type whose folder has another name."""
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return {}
    auto = Path(package.origin).parent / "models" / "auto"
    try:
        text = (auto / "auto_mappings.py").read_text() + (auto / "configuration_auto.py").read_text()
    except OSError:
        return {}
    blocks = re.findall(r"^SPECIAL_MODEL_TYPE_TO_MODULE_NAME\b.*?^\)", text, re.M | re.S)
    return dict(re.findall(r'"([\w.-]+)"[,:] "(\w+)"', "".join(blocks)))
