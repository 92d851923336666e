"""Everything about a job that can be known before its model is loaded, checked without torch.

    spec ── permissions ── base model ── adapter ── chat template ── data sets ── packages ── plan ── memory ──
    output dir ── disk

`check` does it, in honectl's own process or in the helper: a small process (`python -m honed.preflight --root DIR`)
that is kept for it, with limits, so that nothing a job file names, a dead network file system or a file of terabytes,
can stall or bloat the daemon. The daemon's end of it is checker.py. One line of JSON a request, one a stage entered,
one an answer:

    > {"id": 7, "spec_path": "/…/spec.yaml", "config": {…}, "device": {…} | null}
    < {"id": 7, "stage": "datasets"}
    < {"id": 7, "ok": true, "spec": {…}, "plan": {…}, "output_dir": "/…", "warnings": […], "waits_for": {…},
       "needs_fetch": {"repo_id", "revision"} | null, …}
    < {"id": 7, "ok": false, "error": {"code", "message", "hint"}}
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from honed import (
    activation,
    basemodel,
    dataset,
    device,
    installed,
    memory,
    plan,
    precision,
    remedy,
    score,
    snapshot,
    spec,
)
from honed import layout as layouts
from honed.activation import Row
from honed.basemodel import BITS, AdapterInfo, BaseModelInfo, UncachedError
from honed.config import Config
from honed.device import Device
from honed.error import (
    DatasetError,
    DiskShortError,
    EnvironmentInvalidError,
    HonedError,
    InternalError,
    MemoryShortError,
    ModelError,
    SpecError,
)
from honed.installed import Installed
from honed.layout import Layout
from honed.media import PLURAL, Kind
from honed.plan import Plan
from honed.policy import Named, Policy, inputs, nearest_existing
from honed.snapshot import Missing
from honed.spec import DatasetSpec, JobSpec

#: Bytes of address space that the helper may have: enough for pyarrow's pools and a large .json, not for the machine.
MAX_HELPER_BYTES = 4 * 1024**3
#: Bytes of a chat template that is read.
MAX_TEMPLATE_BYTES = 1024 * 1024
#: Rows of a data set that are looked at.
NUM_ROWS = 200
#: Bytes of text that a token stands for, and tokens of the chat template around a turn; both on the small side of what
#: tokenizers give, since a job is not to be refused for tokens that it has not.
BYTES_PER_TOKEN = 4
TOKENS_PER_TURN = 4
#: Checkpoints that are kept where save_total_limit says nothing.
NUM_CHECKPOINTS = 2
#: Tokenizer files that go with each checkpoint.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt")
#: The file in an output directory that says whose it is.
MANIFEST_NAME = "honed.json"

#: Called with the name of each stage as it is entered.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Verdict:
    """A job that may run, or one whose plan has to wait for what another job makes or for a model to be fetched."""

    spec: JobSpec
    plan: Plan | None  #: None while it waits
    output_dir: Path
    warnings: list[str]
    adapter_path: Path | None = None
    waits_for: Mapping[str, str] = field(default_factory=dict)  #: key → name of the job that makes what it means
    needs_fetch: Missing | None = None  #: the base model, where it is not in the cache and may be fetched
    commit: str | None = None  #: the one that the base model's hub id means; a branch may mean another one tomorrow


def check(
    spec_path: Path,
    *,
    layout: Layout,
    config: Config,
    device: Device | None = None,
    job_id: int | None = None,
    jobs: Mapping[str, Path] | None = None,
    commit: str | None = None,
    uid: int | None = None,
    progress: Progress = lambda _stage: None,
) -> Verdict:
    """Check a job file and all that it names. Raises a HonedError with place, cause and remedy for the first fault.

    `device` is the one that the job is planned for, by default the first of this machine. `jobs` has the output
    directories of jobs that are done, for `job:NAME`; where one is missing, the rest is checked and nothing planned,
    as where the base model has yet to be fetched. `commit` is what a hub id's branch meant when the job was accepted.
    `uid` is who dropped it, by default whoever asks.
    An exception that nobody foresaw is an InternalError, its traceback on stderr.
    """
    try:
        return _check(spec_path, layout, config, device, job_id, jobs or {}, commit, uid, progress)
    except HonedError:
        raise
    except MemoryError as error:
        raise DatasetError(
            "a file that the job names needs more memory to be looked at than the check may have",
            hint="rows on lines of their own (.jsonl) and .parquet are read piece by piece",
        ) from error
    except OSError as error:
        raise EnvironmentInvalidError(
            f"{error.filename or spec_path}: {error.strerror}", hint="can the group honed-job read it?"
        ) from error
    except Exception as error:
        traceback.print_exc()
        raise unforeseen(error) from error


def _check(
    spec_path: Path,
    layout: Layout,
    config: Config,
    device: Device | None,
    job_id: int | None,
    jobs: Mapping[str, Path],
    commit: str | None,
    uid: int | None,
    progress: Progress,
) -> Verdict:
    progress("spec")
    job_spec = spec.load(spec_path, max_bytes=config.spool.max_spec_bytes)
    if commit is not None:
        job_spec = job_spec.model_copy(update={"revision": commit})
    _check_policy(job_spec, config)
    progress("permissions")
    rights = Policy.of(layout, config, uid)
    _check_rights(job_spec, rights, config, jobs)
    waits_for = {key: name for key, name in spec.references(job_spec).items() if name not in jobs}
    if waits_for:
        return _check_the_rest(job_spec, layout, config, device, job_id, jobs, rights, progress, waits_for)
    progress("base model")
    try:
        model = _inspect_model(job_spec, layout, config, jobs)
    except UncachedError:
        return _check_the_rest(job_spec, layout, config, device, job_id, jobs, rights, progress, {})
    progress("adapter")
    adapter = _inspect_adapter(job_spec, jobs)
    if adapter is not None:
        basemodel.check_fits(adapter, model)
    _check_merge(job_spec, model, adapter)
    progress("chat template")
    has_chat_template = _check_chat_template(job_spec, model)
    progress("datasets")
    looked = _check_datasets(job_spec, model, rights, has_chat_template=has_chat_template)
    warnings = looked.warnings
    progress("packages")
    here = installed.look()
    candidates = _devices(job_spec, config, device)
    _check_packages(job_spec, model, candidates[0], here)
    warnings += _outside_window(here) + _lacking(looked.attached, here)
    progress("plan")

    def planned(changed: JobSpec, target: Device) -> Plan:
        return plan.make(
            changed, model, target, config=config, installed=here, adapter=adapter,
            num_row_tokens=looked.num_row_tokens, num_rows=looked.num_rows, rows=looked.attached,
        )  # fmt: skip

    def fitting(target: Device) -> Plan:
        made = planned(job_spec, target)
        progress("memory")
        remedy.check(job_spec, made.memory, target, lambda changed: planned(changed, target).memory)
        return made

    made = _first_that_fits(candidates, fitting)
    progress("output directory")
    output_dir = _output_dir(job_spec, layout, job_id, rights)
    progress("disk")
    _check_disk(job_spec, made, layout, output_dir)
    adapter_path = adapter.path if adapter else None
    return Verdict(
        job_spec, made, output_dir, [*made.warnings, *warnings], adapter_path, commit=_commit(job_spec, model)
    )


def _check_the_rest(
    job_spec: JobSpec,
    layout: Layout,
    config: Config,
    device: Device | None,
    job_id: int | None,
    jobs: Mapping[str, Path],
    rights: Policy,
    progress: Progress,
    waits_for: Mapping[str, str],
) -> Verdict:
    """Of a job that waits for another's files, or for a model from the hub: all that stands without them."""
    model, missing = None, None
    if "base_model" not in waits_for:
        progress("base model")
        try:
            model = _inspect_model(job_spec, layout, config, jobs)
            _check_merge(job_spec, model, None)
        except UncachedError as error:
            missing = error.missing
    if "adapter" not in waits_for:
        progress("adapter")
        _inspect_adapter(job_spec, jobs)
    progress("chat template")
    has_chat_template = _check_chat_template(job_spec, model)
    progress("datasets")
    warnings = _check_datasets(job_spec, model, rights, has_chat_template=has_chat_template).warnings
    progress("packages")
    here = installed.look()
    _check_packages(job_spec, model, _devices(job_spec, config, device)[0], here)
    warnings += _outside_window(here)
    progress("output directory")
    output_dir = _output_dir(job_spec, layout, job_id, rights)
    warnings += [
        f"{key}: job:{name}: looked at, and the job planned, when that job has succeeded"
        for key, name in waits_for.items()
    ]
    if missing is not None:
        where = f"{missing.repo_id} at {missing.revision} is not, or not wholly, in the local cache"
        warnings.append(
            f"base_model: {where}: it is fetched from the hub first, and the job is checked and planned then"
        )
    commit = _commit(job_spec, model) if model is not None else None
    return Verdict(job_spec, None, output_dir, warnings, waits_for=waits_for, needs_fetch=missing, commit=commit)


def _devices(job_spec: JobSpec, config: Config, given: Device | None) -> list[Device]:
    """Those that the job may run on; it is planned for the first that it fits on."""
    if job_spec.resources.gpus == 0 or job_spec.kind == "merge":
        return [device.cpu()]
    return [given] if given else device.probe(config.device.gpus)


def _first_that_fits(candidates: list[Device], fitting: Callable[[Device], Plan]) -> Plan:
    """The plan for the first device on which the job fits. Raises what the largest one says where there is none."""
    refusals = []
    for candidate in candidates:
        try:
            return fitting(candidate)
        except MemoryShortError as error:
            refusals.append((candidate.total_bytes, error))
    raise max(refusals, key=lambda refusal: refusal[0])[1]


def _check_policy(job_spec: JobSpec, config: Config) -> None:
    if job_spec.trust_remote_code and not config.policy.trust_remote_code:
        raise SpecError(
            "trust_remote_code: code that comes with a model may not run here",
            hint="leave it out, or the administrator sets policy.trust_remote_code in honed.toml",
        )


def _check_rights(job_spec: JobSpec, rights: Policy, config: Config, jobs: Mapping[str, Path]) -> None:
    """Before anything that a job names is opened. What jobs make is theirs to name by then (acceptance.py)."""
    named = spec.references(job_spec)
    model = None
    with contextlib.suppress(UncachedError):  # it is fetched into honed's own cache
        model = None if "base_model" in named else _resolve_model(job_spec, rights.layout, config, jobs)
    adapter = None if job_spec.adapter is None or "adapter" in named else Path(job_spec.adapter)
    for each in inputs(job_spec, model, adapter):
        rights.check_read(each)


# --- Base model -------------------------------------------------------------------------------------------------------


def _resolve_model(job_spec: JobSpec, layout: Layout, config: Config, jobs: Mapping[str, Path]) -> Path:
    return basemodel.resolve(
        job_spec.base_model,
        cache_dir=layout.cache_dir,
        allow_hub=config.policy.hub,
        revision=job_spec.revision,
        jobs=jobs,
    )


def _inspect_model(job_spec: JobSpec, layout: Layout, config: Config, jobs: Mapping[str, Path]) -> BaseModelInfo:
    path = _resolve_model(job_spec, layout, config, jobs)
    try:
        model = basemodel.inspect(path, model_type=job_spec.model_type, allow_pickle=config.policy.pickle)
    except ModelError as error:
        _check_whole(job_spec, layout, config, path, error)
        raise
    _check_trainable(job_spec, model)
    if job_spec.trust_remote_code and snapshot.lacks_code(layout.cache_dir, job_spec.base_model, path):
        _check_whole(job_spec, layout, config, path, None)
    return model


def _check_whole(job_spec: JobSpec, layout: Layout, config: Config, path: Path, fault: ModelError | None) -> None:
    """Raises UncachedError where what is wrong with a snapshot may be that it is torn, and a fetch may mend it."""
    if not config.policy.hub or not basemodel.is_hub_id(job_spec.base_model):
        return
    if fault is not None and snapshot.is_fetched(layout.cache_dir, job_spec.base_model, path):
        return
    missing = Missing(job_spec.base_model, job_spec.revision or "main")
    words = fault.message if fault else f"{path}: fetched without the code that comes with it"
    raise UncachedError(words, missing, hint="honed fetches what is missing")


def _commit(job_spec: JobSpec, model: BaseModelInfo) -> str | None:
    """The snapshot of a hub id, whose directory has the commit's name."""
    return model.path.name if basemodel.is_hub_id(job_spec.base_model) else None


def _inspect_adapter(job_spec: JobSpec, jobs: Mapping[str, Path]) -> AdapterInfo | None:
    if job_spec.adapter is None:
        return None
    name = spec.references(job_spec).get("adapter")
    return basemodel.inspect_adapter(Path(job_spec.adapter) if name is None else jobs[name])


def _check_merge(job_spec: JobSpec, model: BaseModelInfo, adapter: AdapterInfo | None) -> None:
    """Whether what a merge or `save_merged` asks for can be written from these files."""
    if job_spec.kind != "merge" and job_spec.save_merged == "none":
        return
    if model.is_pickled:
        raise ModelError(f"{model.path}: an adapter is not merged into pickled weights", hint="convert them first")
    if model.speaks:
        raise ModelError(
            f"{model.path}: an adapter is not merged into a model that also speaks ({model.model_type})",
            hint="load the adapter beside the model's thinker, or leave save_merged out",
        )
    if model.is_quantized and model.quantization is None:
        raise ModelError(
            f"{model.path}: an adapter cannot be merged into weights that are stored in {model.quantization_method}",
            hint="name the unquantized checkpoint as base_model, or leave save_merged out",
        )
    kind = adapter.config.get("peft_type", "LORA") if adapter else "LORA"
    if adapter is not None and kind != "LORA":
        raise ModelError(f"{adapter.path}: a {kind} adapter; LoRA is what can be merged")
    begins = adapter.config.get("init_lora_weights") if adapter else job_spec.lora and job_spec.lora.init_lora_weights
    if isinstance(begins, str) and begins.startswith(("pissa_niter", "corda", "loftq")):
        raise SpecError(
            f"init_lora_weights: {begins} changes the base model when training begins, which a merge cannot do again",
            hint="pissa, olora, gaussian or true can be merged",
        )


def _check_trainable(job_spec: JobSpec, model: BaseModelInfo) -> None:
    """Whether this version trains models of this kind: the one place for that."""
    where = model.path / "config.json"
    if not model.is_quantized and any(dtype.startswith("float8") for dtype in model.stored_dtypes):
        raise ModelError(
            f"{where}: the weights are stored in float8, and no quantization_config says how they are scaled",
            hint="take the checkpoint in bfloat16, with quantization: 4bit if memory is short",
        )
    known, writing = installed.known_model_types()
    model_type = model.model_type
    if model_type not in known:
        model_type = installed.MODEL_TYPE_ALIASES.get(model_type, model_type)
    if model_type in writing or not known:
        return
    if "auto_map" in model.config:
        _check_own_code(job_spec, model)
    elif model_type in known:
        raise ModelError(
            f"{where}: {model_type} is not a model that continues text (a causal language model)",
            hint="sft trains those: llama, qwen3, mistral, gemma2 and the like",
        )
    else:
        raise ModelError(
            f"{where}: transformers {installed.version('transformers')} does not know the model_type {model_type!r}",
            hint="if it is another name for one that it knows, say so in the job file, as in `model_type: llama`",
        )


def _check_own_code(job_spec: JobSpec, model: BaseModelInfo) -> None:
    if not job_spec.trust_remote_code:
        raise ModelError(
            f"{model.path / 'config.json'}: {model.model_type} comes with code of its own (auto_map)",
            hint="trust_remote_code: true runs it, where the administrator allows that",
        )


# --- Data sets and templates ------------------------------------------------------------------------------------------


def _check_chat_template(job_spec: JobSpec, model: BaseModelInfo | None) -> bool:
    """Whether there is a template; a model that is not there yet may have one.

    Raises SpecError or ModelError for one that does not compile.
    """
    if job_spec.chat_template is not None:
        _compile_template(
            _read_template(Path(job_spec.chat_template)), f"chat_template: {job_spec.chat_template}", SpecError
        )
        return True
    if model is None:
        return True
    if model.chat_template is not None:
        _compile_template(model.chat_template, f"{model.path}: the chat template", ModelError)
    return model.has_chat_template


def _read_template(path: Path) -> str:
    if not path.is_file():  # nor a pipe, on which reading would wait for ever
        raise SpecError(f"chat_template: no such file: {path}", hint="name a file with a Jinja chat template")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE_BYTES)
    except (OSError, ValueError) as error:
        raise SpecError(
            f"chat_template: {path}: {error}", hint="it is UTF-8, and the group honed-job can read it"
        ) from error
    if not text.strip():
        raise SpecError(f"chat_template: {path} is empty", hint="name a file with a Jinja chat template")
    return text


def _compile_template(text: str, where: str, kind: type[HonedError]) -> None:
    """Parse it with transformers' own `{% generation %}`; where jinja2 is missing, the packages' check tells."""
    try:
        import jinja2.ext  # noqa: PLC0415  (it belongs to the worker's packages)
        import jinja2.nodes  # noqa: PLC0415
        import jinja2.sandbox  # noqa: PLC0415
    except ImportError:
        return

    class Generation(jinja2.ext.Extension):  # type: ignore[misc]
        tags = {"generation"}  # noqa: RUF012  (jinja2's own form)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(
                line
            )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[Generation, jinja2.ext.loopcontrols])
    try:
        environment.compile(text)
    except (jinja2.TemplateError, ValueError, RecursionError) as error:  # a number with thousands of digits
        line = getattr(error, "lineno", None)
        at = f", line {line}" if line else ""
        raise kind(
            f"{where}{at}: not a Jinja template: {error}", hint="correct it, or name another as chat_template:"
        ) from error


@dataclass(frozen=True)
class _Looked:
    """What the first rows of a job's data sets say."""

    warnings: list[str]  #: what is wrong with some of them
    num_row_tokens: int | None  #: about how many tokens the longest without media has
    num_rows: int | None  #: in all, where all were looked at
    attached: list[Row]  #: those with images, videos or sounds


def _check_datasets(
    job_spec: JobSpec, model: BaseModelInfo | None, rights: Policy, *, has_chat_template: bool
) -> _Looked:
    """Raises DatasetError, which names the key of the data set."""
    warnings: list[str] = []
    lengths: list[int] = []
    attached: list[Row] = []
    num_rows: int | None = 0
    for key, datasets in (("datasets", job_spec.datasets), ("eval_datasets", job_spec.eval_datasets)):
        for number, each in enumerate(datasets):
            name = f"{key}.{number}"
            try:
                found = _check_dataset(each, rights, has_chat_template=has_chat_template)
                warnings += [f"{name}: {told}" for told in _overlooked(model, found)]
                warnings += _check_attached(job_spec, model, each, found)
            except DatasetError as error:
                raise DatasetError(f"{name}: {error.message}", hint=error.hint) from error
            warnings += [f"{name}: {bad}" for bad in found.bad]
            lengths += [_num_tokens(row) for row in found.rows]
            attached += [Row(_num_tokens(list(seen.texts)), seen.media) for seen in found.attached]
            num_rows = num_rows + found.num_rows if num_rows is not None and found.num_rows < NUM_ROWS else None
    return _Looked(warnings, max(lengths, default=None), num_rows, attached)


def _num_tokens(row: Any) -> int:
    """Of a row, without its tokenizer: few have fewer bytes a token."""
    match row:
        case str():
            return math.ceil(len(row.encode(errors="replace")) / BYTES_PER_TOKEN)
        case dict():
            return sum(_num_tokens(value) for value in row.values())
        case list():
            return sum(_num_tokens(value) + TOKENS_PER_TURN for value in row)
        case _:
            return 0


def _check_dataset(each: DatasetSpec, rights: Policy, *, has_chat_template: bool) -> dataset.Inspection:
    for path in dataset.files(Path(each.path), split=each.split):  # one of them may be a link to elsewhere
        rights.check_read(Named("path", path, DatasetError))
    found = dataset.inspect(
        each, num_rows=NUM_ROWS, permit=lambda path: rights.check_read(Named("a row", path, DatasetError))
    )
    if not has_chat_template and _needs_template(found, each):
        raise DatasetError(
            f"{each.path}: rows of {found.format} are rendered by a chat template, and the base model has none",
            hint="name a file with one as chat_template:, or use rows of prompt and completion, or of text",
        )
    return found


def _overlooked(model: BaseModelInfo | None, found: dataset.Inspection) -> list[str]:
    """What is in the rows, or should be, and is not read. A model for text passes over images with good reason."""
    told = list(found.overlooked) if model is None or model.has_vision or model.has_audio else []
    return told + [f"`columns` names `{each}`, and none of the {found.num_rows} rows has it" for each in found.absent]


#: What a model must have for each kind of media, in words.
_SENSES: Mapping[Kind, str] = {"image": "does not see", "video": "does not see", "audio": "does not hear"}


def _check_attached(
    job_spec: JobSpec, model: BaseModelInfo | None, each: DatasetSpec, found: dataset.Inspection
) -> list[str]:
    """Of the images, videos and sounds in a data set's first rows: what is wrong with some, as warnings."""
    if not found.num_attached:
        return []
    kinds = {facts.kind for seen in found.attached for facts in seen.media}
    for kind in sorted(kinds):
        if model is not None and not (model.has_audio if kind == "audio" else model.has_vision):
            raise DatasetError(
                f"{each.path}: rows with {PLURAL[kind]}, and {model.path} is a model that {_SENSES[kind]}",
                hint="take a vision or audio model as base_model, or rows of text",
            )
    if job_spec.training.packing or job_spec.training.padding_free:
        key = "packing" if job_spec.training.packing else "padding_free"
        raise DatasetError(
            f"{each.path}: rows with {' and '.join(PLURAL[kind] for kind in sorted(kinds)) or 'media'} and "
            f"training.{key}: they are not put into one row with others",
            hint=f"leave {key} out",
        )
    warnings = _too_long(job_spec, model, each, found)
    if not found.num_broken:
        return warnings
    told = f"{found.num_broken} of the first {found.num_attached} rows with media have a file that cannot be used"
    named = "; ".join(found.broken)
    if job_spec.media.broken == "refuse" or found.num_broken == found.num_attached:
        hint = "paths start from the data file's directory, or from the data set's `media_dir`"
        raise DatasetError(f"{each.path}: {told}: {named}", hint=hint)
    return [*warnings, f"{each.path}: {told}, and will be left out: {named}"]


def _too_long(
    job_spec: JobSpec, model: BaseModelInfo | None, each: DatasetSpec, found: dataset.Inspection
) -> list[str]:
    """That rows seem to be too long for their media. They are counted for good once the model is loaded."""
    cut_at = job_spec.training.cut_at
    if model is None or cut_at is None or not found.attached:
        return []
    tokens = [activation.media_cost(Row(0, seen.media), job_spec, model).tokens for seen in found.attached]
    too_long = [number for number in tokens if number > cut_at]
    if not too_long:
        return []
    what = "will be left out" if job_spec.media.too_long == "drop" else "end the job"
    return [
        f"{each.path}: {len(too_long)} of {len(tokens)} rows with media seem to be longer than max_length ({cut_at}) "
        f"by their media alone (up to {max(too_long)} tokens), and {what}: a longer training.max_length, or fewer "
        "pixels and frames (`media:`), keeps them"
    ]


def _needs_template(found: dataset.Inspection, each: DatasetSpec) -> bool:
    if found.num_attached:
        return True
    for row in found.rows:
        with contextlib.suppress(DatasetError):
            example = dataset.convert(row, found.format, columns=each.columns, has_chat_template=False)
            return example.kind == "messages"
    return found.format in ("messages", "sharegpt")


# --- Packages ---------------------------------------------------------------------------------------------------------


def _check_packages(job_spec: JobSpec, model: BaseModelInfo | None, planned_for: Device, here: Installed) -> None:
    """Raises EnvironmentInvalidError for a package that the job needs and that is missing or known to fail."""
    needed = [*installed.WINDOWS]
    if job_spec.quantization != "none" or (model is not None and model.quantization):
        needed.append("bitsandbytes")
    if missing := [name for name in needed if here.versions[name] is None]:
        raise EnvironmentInvalidError(
            f"not installed beside honed: {', '.join(missing)}", hint="pip install 'honed[train]'; see honectl doctor"
        )
    for name, window, why in installed.BROKEN:
        found = here.versions[name]
        if found is not None and installed.fits(found, window):
            raise EnvironmentInvalidError(
                f"{name} {found} {why}", hint=f"pip install '{name}{installed.WINDOWS[name]}'"
            )
    torch = here.versions["torch"] or ""
    if planned_for.kind == "cuda" and torch.endswith("+cpu"):
        raise EnvironmentInvalidError(
            f"torch {torch} was built without CUDA, and the job is planned for {planned_for.name}",
            hint="install torch from the ordinary index, or write resources: {gpus: 0}",
        )
    if job_spec.guard is not None:
        score.check(job_spec.guard.metric, "guard.metric")
    for name in job_spec.predictions.metrics if job_spec.predictions.metrics != "auto" else ():
        score.check(name, "predictions.metrics")
    if (chooser := score.chooser(job_spec.training.metric_for_best_model)) is not None:
        score.check(chooser, "training.metric_for_best_model")
    for tracker in job_spec.report_to:
        if installed.version(tracker) is None:
            raise EnvironmentInvalidError(f"report_to: {tracker} is not installed here", hint=f"pip install {tracker}")


def _lacking(attached: list[Row], here: Installed) -> list[str]:
    """What rows with images need of most models' processors, though not of all."""
    if here.versions["torchvision"] is None and any(each.kind != "audio" for row in attached for each in row.media):
        return [
            "torchvision is not installed: most vision models' processors need it, and the job may end for want of it"
        ]
    return []


def _outside_window(here: Installed) -> list[str]:
    return [
        f"{name} {here.versions[name]} is outside what honed was tried with ({window})"
        for name, window in {**installed.WINDOWS, **installed.OPTIONAL_WINDOWS}.items()
        if (found := here.versions[name]) is not None and not installed.fits(found, window)
    ]


# --- Output and disk --------------------------------------------------------------------------------------------------


def _output_dir(job_spec: JobSpec, layout: Layout, job_id: int | None, rights: Policy) -> Path:
    if job_spec.output_dir is None:
        return layout.jobs_dir / ("<id>" if job_id is None else str(job_id)) / "output"
    # Where it really lies: a rename onto a symbolic link would fail when all is done.
    path = Path(job_spec.output_dir).resolve()
    if path.is_mount():
        raise SpecError(f"output_dir: {path} is a mount point", hint="name a directory in it")
    if any(
        path == ours or path in ours.parents or ours in path.parents for ours in (layout.spool_dir, layout.state_dir)
    ):
        raise SpecError(
            f"output_dir: {path} is honed's own", hint="leave it out: a job has a directory there by itself"
        )
    try:
        _check_output_dir(path, layout, job_id, rights)
    except OSError as error:
        raise SpecError(f"output_dir: {path}: {error.strerror}", hint="name a directory that can be made") from error
    return path


def _check_output_dir(path: Path, layout: Layout, job_id: int | None, rights: Policy) -> None:
    existing = nearest_existing(path)
    if not existing.is_dir():
        raise SpecError(f"output_dir: {existing} is a file, not a directory", hint="name a directory that can be made")
    rights.check_write(path)
    if existing != path:
        return
    found = next((entry.name for entry in sorted(path.iterdir())), None)
    if found is not None and not _is_own_output(path, layout, job_id):
        raise SpecError(
            f"output_dir: {path} is not empty (there is {found}), and nothing is overwritten",
            hint="name a new directory, or empty this one",
        )


def _is_own_output(path: Path, layout: Layout, job_id: int | None) -> bool:
    """Whether the manifest in an output directory is this very job's, of this very instance."""
    try:
        manifest = json.loads((path / MANIFEST_NAME).read_bytes())
        owner = (manifest["job"]["id"], manifest["job"]["instance"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return job_id is not None and owner == (job_id, str(layout.root))


def _check_disk(job_spec: JobSpec, made: Plan, layout: Layout, output_dir: Path) -> None:
    """Hold what the job will write against the free disk. Raises DiskShortError."""
    written = made.memory.weights_bytes if precision.is_full(job_spec) else made.memory.adapter_bytes
    beside = sum(path.stat().st_size for name in TOKENIZER_FILES if (path := made.model.path / name).is_file())
    # The newest is whole before an older one goes, and the best one may be older still.
    num_kept = (job_spec.training.save_total_limit or NUM_CHECKPOINTS) + int(job_spec.training.load_best_model_at_end)
    checkpoints = (num_kept + 1) * (written + made.memory.optimizer_bytes + beside)
    output = written + beside
    if job_spec.kind == "merge":
        checkpoints, output = 0, made.model.num_parameters * BITS[made.precision.load_dtype] // 8
    if job_spec.save_merged != "none":
        output += made.model.num_parameters * 2 + beside
    needs: dict[int, tuple[Path, int]] = {}
    for path, num_bytes in ((layout.jobs_dir, checkpoints), (output_dir, output)):
        existing = nearest_existing(path)
        number = existing.stat().st_dev
        needs[number] = (existing, num_bytes + needs.get(number, (existing, 0))[1])
    for existing, num_bytes in needs.values():
        free = shutil.disk_usage(existing).free
        if num_bytes > free:
            raise DiskShortError(
                f"{existing}: checkpoints and output take about {memory.gib(num_bytes)}, "
                f"and {memory.gib(free)} are free",
                hint="free some, set training.save_total_limit, or write elsewhere with output_dir",
            )


# --- The helper -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer requests, one a line, until stdin ends. Only answers go to stdout; a bad request costs itself alone."""
    parser = argparse.ArgumentParser(prog="honed.preflight")
    parser.add_argument("--root", type=Path, default=Path("/"))
    parser.add_argument("--max-bytes", type=int, default=MAX_HELPER_BYTES)
    options = parser.parse_args()
    layout = layouts.of(options.root)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (options.max_bytes, options.max_bytes))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon ends us by closing stdin
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not pass for an answer
    for line in sys.stdin.buffer:
        _say(answers, _answer(line, layout, answers))


def _say(answers: IO[bytes], value: dict[str, Any]) -> None:
    answers.write(json.dumps(value).encode() + b"\n")


def _answer(line: bytes, layout: Layout, answers: IO[bytes]) -> dict[str, Any]:
    request_id = None
    try:
        request = json.loads(line)
        request_id = request["id"]
        config = Config.model_validate(request["config"])
        verdict = check(
            Path(request["spec_path"]),
            layout=layout,
            config=config,
            device=Device.from_dict(request["device"]) if request.get("device") else None,
            job_id=request_id,
            jobs={name: Path(path) for name, path in (request.get("jobs") or {}).items()},
            commit=request.get("commit"),
            uid=request.get("uid"),
            progress=lambda stage: _say(answers, {"id": request_id, "stage": stage}),
        )
    except HonedError as error:
        return {"id": request_id, "ok": False, "error": error.as_dict()}
    except Exception as error:  # noqa: BLE001  (the helper's main loop: this job file fails, the helper lives)
        traceback.print_exc()
        return {"id": request_id, "ok": False, "error": unforeseen(error).as_dict()}
    return {
        "id": request_id,
        "ok": True,
        "spec": verdict.spec.model_dump(mode="json"),
        "plan": (verdict.plan.as_dict() if verdict.plan else {})
        | {
            "warnings": verdict.warnings,
            "adapter_path": str(verdict.adapter_path) if verdict.adapter_path else None,
            "base_model_commit": verdict.commit,
            "may_read": _grant(verdict, Policy.of(layout, config, request.get("uid"))) if verdict.plan else None,
        },
        "output_dir": str(verdict.output_dir),
        "warnings": verdict.warnings,
        "references": spec.references(verdict.spec),
        "waits_for": dict(verdict.waits_for),
        "needs_fetch": asdict(verdict.needs_fetch) if verdict.needs_fetch else None,
    }


def _grant(verdict: Verdict, rights: Policy) -> dict[str, Any]:
    """What the worker may read; it asks again, since files and links change."""
    assert verdict.plan is not None
    return rights.grant(inputs(verdict.spec, verdict.plan.model.path, verdict.adapter_path)).as_dict()


def unforeseen(error: Exception) -> InternalError:
    """An exception that is no HonedError, as one."""
    return InternalError(
        f"the check failed in a way that nobody foresaw: {type(error).__name__}: {error}",
        hint="the log has the traceback: journalctl -u honed",
    )


if __name__ == "__main__":
    main()
