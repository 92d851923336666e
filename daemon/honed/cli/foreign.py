"""Settings of other tools as plain data under their own names, which spec/synonym.py knows.

    axolotl         YAML                      recognized by sequence_len, micro_batch_size, num_epochs, …
    llamafactory    YAML or JSON              stage, finetuning_type, cutoff_len, template, …
    trl             YAML of `trl sft`         model_name_or_path and dataset_name or datasets
    unsloth         a .py or .ipynb file      its calls are read with `ast`; nothing of it runs
    openai          JSON of a request         training_file, method, hyperparameters
    a shell script or a command line that starts one of the first three: see launch.py

What such a tool keeps elsewhere or means differently is settled here: data sets by name, shares of a mixture, total
batch sizes, and the defaults that differ from honed's.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from honed.cli import launch
from honed.spec import document, other_tool, synonym
from honed.spec.problem import shown
from honed.system.error import HonedError, SpecError, UsageError

NAMES = (*other_tool.TOOLS, "unsloth")


@dataclass(frozen=True)
class Note:
    """A key of the other tool that is not carried over, and why."""

    key: str
    why: str
    is_lost: bool = True  #: False if honed does without it, or does so anyway


@dataclass
class Foreign:
    """Another tool's settings."""

    tool: str
    data: dict[str, Any]  #: their keys, for the advice of spec/synonym.py
    notes: list[Note] = field(default_factory=list)
    #: Our keys, dotted: the tool's defaults where they differ from honed's, or functions of the job that return them.
    defaults: dict[str, Any] = field(default_factory=dict)
    #: Those that are in `data` already.
    stated: dict[str, Any] = field(default_factory=dict)
    directory: Path | None = None  #: where the tool is started, if a command line says so

    def note(self, key: str, why: str, *, is_lost: bool = True) -> None:
        self.notes.append(Note(key, why, is_lost))

    def take(self, key: str) -> Any:
        return self.data.pop(key, None)


def read(path: Path, tool: str | None = None) -> Foreign:
    """Read a settings file or a script. Raises SpecError for one of no known tool, or of a training that honed has
    not."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file", hint=launch.HINT)
    if launch.is_script(path):
        return started(launch.read(path), tool, str(path))
    if path.suffix.lower() in (".py", ".ipynb"):
        if tool not in (None, "unsloth"):
            raise SpecError(f"{path}: a {path.suffix} file can only be of unsloth, not of {tool}")
        return _script(path)
    settings = _settings(path, tool)
    _PREPARED[settings.tool](settings, path.parent)
    return settings


def started(given: launch.Launch, tool: str | None, name: str) -> Foreign:
    """Return the settings of a training that a command line starts. Raises SpecError and UsageError, as `read` does."""
    if tool not in (None, given.tool):
        raise SpecError(f"{name}: this starts {given.tool}, not {tool}")
    settings = Foreign(given.tool, {})
    if given.config is not None:
        if not given.config.is_file():
            raise UsageError(
                f"{given.config}: no such file, and the command line names it", hint=f"it starts in {given.directory}"
            )
        settings = _settings(given.config, given.tool)
    elif given.tool == "axolotl":
        raise SpecError(f"{name}: axolotl train without its settings file", hint="axolotl train FILE.yaml")
    settings.data |= given.data
    settings.directory = given.directory
    for key, why in given.notes:
        settings.note(key, why)
    _PREPARED[settings.tool](settings, given.directory)
    return settings


def _settings(path: Path, tool: str | None) -> Foreign:
    """Read a settings file as it is."""
    try:
        suffix = ".json" if path.suffix.lower() == ".json" else path.suffix
        parsed = document.parse(path.read_bytes(), suffix if suffix in document.SUFFIXES else ".yaml", is_lenient=True)
    except HonedError as error:
        error.surround(f"{path}: ")
        raise
    settings = Foreign(tool or _tool(path, parsed.data), parsed.data)
    for where, unread in parsed.problems.items():
        if unread.message == document.EMPTY:
            continue  # as templates leave keys that they do not use
        settings.note(".".join(map(str, where)), f"{unread.message}{f' ({unread.hint})' if unread.hint else ''}")
    return settings


def _tool(path: Path, data: Mapping[str, Any]) -> str:
    """Tell whose settings these are by their keys. Raises SpecError if that is not clear."""
    if (tool := other_tool.of(data)) is None:
        hint = f"name the tool with --from: {', '.join(NAMES)}"
        raise SpecError(f"{path}: it is not clear which tool these settings are of", hint=hint)
    return tool


# --- axolotl ----------------------------------------------------------------------------------------------------------


def _axolotl(settings: Foreign, _place: Path) -> None:
    data = settings.data
    settings.defaults = {
        "training.max_length": 512,
        "training.per_device_train_batch_size": 1,
        "training.lr_scheduler_type": "cosine",
    }
    if data.get("num_epochs") is None and not data.get("max_steps"):
        data["num_epochs"] = settings.stated["training.num_train_epochs"] = 1
    # axolotl's batch_size is that of an optimizer step, not of a device.
    total, micro = settings.take("batch_size"), data.get("micro_batch_size")
    if isinstance(total, int) and isinstance(micro, int) and micro > 0 and total % micro == 0:
        data["gradient_accumulation_steps"] = total // micro
    elif total is not None:
        settings.note(
            "batch_size", "the examples of an optimizer step are micro_batch_size × gradient_accumulation_steps"
        )
    if isinstance(sets := data.get("datasets"), list):
        data["datasets"] = [{"path": item} if isinstance(item, str) else item for item in sets]


# --- LLaMA-Factory ----------------------------------------------------------------------------------------------------


def _llamafactory(settings: Foreign, directory: Path) -> None:
    data = settings.data
    settings.defaults = {"training.max_length": 2048, "training.learning_rate": 5e-5}
    if str(data.get("finetuning_type", "lora")).lower() == "lora":
        data.setdefault("finetuning_type", "lora")
        settings.defaults |= {"lora.r": 8, "lora.lora_alpha": lambda job: 2 * job["lora"]["r"]}
    data_dir = directory / str(settings.take("dataset_dir") or "data")
    if not data_dir.is_dir() and (Path.cwd() / data_dir.name).is_dir():
        data_dir = Path.cwd() / data_dir.name
    media_dir = settings.take("media_dir")
    shares = _numbers(settings.take("interleave_probs"))
    if (strategy := settings.take("mix_strategy")) not in (None, "concat"):
        settings.note("mix_strategy", f"honed draws no row twice, which {strategy} may")
    for theirs, ours in (("dataset", "datasets"), ("eval_dataset", "eval_datasets")):
        names = data.get(theirs)
        if names is None:
            continue
        names = names if isinstance(names, list) else [part.strip() for part in str(names).split(",")]
        sets = [_dataset_of(settings, str(name), data_dir) for name in names]
        if ours == "datasets" and shares and len(shares) == len(sets):
            sets = [item | {"fraction": share} for item, share in zip(sets, shares, strict=True)]
        if media_dir is not None:
            sets = [item | {"media_dir": str((directory / str(media_dir)).resolve())} for item in sets]
        del data[theirs]
        data[ours] = sets


def _numbers(value: Any) -> list[float]:
    given = value if isinstance(value, list) else str(value).split(",") if value is not None else []
    try:
        return [float(item) for item in given]
    except (TypeError, ValueError):
        return []


#: LLaMA-Factory's names of columns, by format -> ours.
_COLUMNS = {
    "alpaca": {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "system": "system",
        "history": "history",
    },
    "sharegpt": {"messages": "conversations", "system": "system", "tools": "tools"},
}
_MEDIA_COLUMNS = {"images": "images", "videos": "videos", "audios": "audios"}


def _dataset_of(settings: Foreign, name: str, data_dir: Path) -> dict[str, Any]:
    """Return our entry for a data set that LLaMA-Factory names, from its dataset_info.json."""
    try:
        info = json.loads((data_dir / "dataset_info.json").read_text(encoding="utf-8"))[name]
        info = {**info, "columns": _mapping(info.get("columns")), "tags": _mapping(info.get("tags"))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        if (data_dir / name).exists():
            return {"path": str((data_dir / name).resolve())}
        what = f"{shown(name)} is not in {data_dir}/dataset_info.json: write the path of its file"
        settings.note(f"dataset.{name}", what)
        return {"path": f"{UNKNOWN}/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"}
    if info.get("ranking"):
        raise SpecError(f"dataset: {shown(name)} has preferences: {synonym.not_supported('dpo')}")
    file_name = info.get("file_name")
    made: dict[str, Any] = {
        "path": str((data_dir / file_name).resolve()) if file_name else str(info.get("hf_hub_url", ""))
    }
    if not made["path"]:
        settings.note("dataset", f"{shown(name)} has neither file_name nor hf_hub_url: write the path of its file")
        made["path"] = f"{UNKNOWN}/{name}"
    form = info.get("formatting", "alpaca")
    given = info["columns"]
    ours = _COLUMNS.get(form, {}) | _MEDIA_COLUMNS
    if form == "alpaca" and "response" not in given and given:
        made["format"], ours = "text", {"prompt": "text"}
    columns = {ours[key]: item for key, item in given.items() if key in ours and item and item != ours[key]}
    if columns.get("conversations") == "messages":
        del columns["conversations"]  # honed reads both
    for key in given.keys() - ours.keys():
        settings.note(f"dataset_info.{name}.columns.{key}", "honed has no such column")
    if columns:
        made["columns"] = columns
    tags = info["tags"]
    if (tags.get("role_tag", "from"), tags.get("content_tag", "value")) not in (("from", "value"), ("role", "content")):
        settings.note(f"dataset_info.{name}.tags", "honed reads from and value, and role and content")
    for theirs, key in (("subset", "name"), ("split", "split"), ("num_samples", "max_rows")):
        if info.get(theirs) is not None and (key == "max_rows" or not file_name):
            made[key] = info[theirs]
    return made


# --- TRL --------------------------------------------------------------------------------------------------------------


def _trl(settings: Foreign, _place: Path) -> None:
    data = settings.data
    if data.get("use_peft"):
        settings.defaults = {"lora.lora_dropout": 0.05}
        if not data.get("lora_target_modules"):
            settings.note(
                "lora_target_modules", "not set: peft then chooses a few layers by model; honed's default is all"
            )
    name, config = settings.take("dataset_name"), settings.take("dataset_config")
    train, test = settings.take("dataset_train_split"), settings.take("dataset_test_split")
    if name is None:
        return
    common = {"path": name} | ({"name": config} if config else {})
    is_hub = not Path(str(name)).suffix
    data["datasets"] = [common | ({"split": train or "train"} if is_hub or train else {})]
    if data.get("eval_strategy", "no") != "no":
        data["eval_datasets"] = [common | ({"split": test or "test"} if is_hub or test else {})]


# --- OpenAI -----------------------------------------------------------------------------------------------------------


def _openai(settings: Foreign, _place: Path) -> None:
    data = settings.data
    method = settings.take("method")
    kind = str(method.get("type", "supervised")) if isinstance(method, dict) else "supervised"
    if kind != "supervised":
        raise SpecError(f"method: {synonym.not_supported(kind) or shown(kind)}")
    inner = method.get("supervised") if isinstance(method, dict) else None
    given = {**_mapping(settings.take("hyperparameters")), **_mapping(_mapping(inner).get("hyperparameters"))}
    for key, value in given.items():
        if key == "learning_rate_multiplier" and value != "auto":
            settings.note(key, "it multiplies a rate that OpenAI chooses: write training.learning_rate")
        elif value == "auto":
            settings.note(key, "auto: honed's default", is_lost=False)
        else:
            data[key] = value
    for theirs, ours in (("training_file", "datasets"), ("validation_file", "eval_datasets")):
        value = settings.take(theirs)
        if value is None:
            continue
        if str(value).startswith("file-"):
            settings.note(theirs, f"{shown(value)} is a file at OpenAI: write the path of your own copy")
            data[ours] = [{"path": f"{UNKNOWN}/{value}.jsonl"}]
        else:
            data[ours] = [{"path": value}]
    if isinstance(model := data.get("model"), str) and "/" not in model:
        settings.note("model", f"{shown(model)} is not an open model: write the directory or hub id of one")
        data["model"] = f"{UNKNOWN}/model"
    integrations = data.get("integrations")
    for integration in integrations if isinstance(integrations, list) else ():
        for key in _mapping(_mapping(integration).get("wandb")):
            settings.note(f"integrations.wandb.{key}", "honed chooses where a tracker writes")


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


#: The directory in the paths that have to be filled in.
UNKNOWN = "/path/to"


# --- Unsloth ----------------------------------------------------------------------------------------------------------

_MODELS = ("FastLanguageModel", "FastVisionModel", "FastModel", "FastTextModel")
_CONFIGS = ("SFTConfig", "TrainingArguments", "UnslothTrainingArguments")
_TRAINERS = ("SFTTrainer", "UnslothTrainer")
#: Arguments that hold objects of the script rather than settings.
_OBJECTS = ("model", "tokenizer", "processing_class", "train_dataset", "eval_dataset", "args", "data_collator")
_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _script(path: Path) -> Foreign:
    """Read the calls of a script or notebook. None of its code runs."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(_cells(text) if path.suffix == ".ipynb" else text)
    except (OSError, ValueError, SyntaxError, RecursionError, KeyError, TypeError) as error:
        raise SpecError(f"{path}: cannot be read as Python: {error}") from error
    return _Script(tree).read()


def _cells(text: str) -> str:
    cells = [load["source"] for load in json.loads(text)["cells"] if load["cell_type"] == "code"]
    code = "\n".join("".join(cell) if isinstance(cell, list) else cell for cell in cells)
    return "\n".join("" if re.match(r"\s*[%!]", line) else line for line in code.splitlines())


class _Script:
    """The settings in the calls of a script."""

    def __init__(self, tree: ast.Module) -> None:
        self._foreign = Foreign("unsloth", {})
        self._calls = [*_calls(tree)]
        self._named: dict[str, ast.expr] = {}  #: what a name was assigned first
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self._named.setdefault(target.id, node.value)

    def read(self) -> Foreign:
        settings, training = self._foreign, dict[str, Any]()
        is_of_unsloth = False
        for call in self._calls:
            owner, name = _called(call)
            if name.endswith("Trainer") and name not in (*_TRAINERS, "Trainer"):
                why = synonym.not_supported(name.removesuffix("Trainer"))
                raise SpecError(f"{name}: {why or 'honed does supervised fine-tuning'}")
            if owner in _MODELS and name == "from_pretrained":
                is_of_unsloth = True
                settings.data |= {"load_in_4bit": True} | self._settings(call, first="model_name")
            elif owner in _MODELS and name == "get_peft_model":
                settings.data |= self._adapter(call)
            elif name in _CONFIGS:
                training |= self._settings(call)
            elif name in _TRAINERS:
                training |= {key: setting for key, setting in self._settings(call).items() if key not in _OBJECTS}
            else:
                self._note(name)
        if not is_of_unsloth:
            raise SpecError("no call of FastLanguageModel.from_pretrained: this is not a script of Unsloth")
        if settings.data.get("full_finetuning"):
            settings.data.pop("load_in_4bit", None)
        self._place(training)
        self._read_data()
        if training:
            settings.data["training"] = training
        return settings

    def _place(self, training: dict[str, Any]) -> None:
        """Settle what two calls may say: the length, which the trainer's own arguments decide."""
        data = self._foreign.data
        length = data.pop("max_seq_length", 2048)
        for key in ("max_seq_length", "max_length"):
            length = training.pop(key, None) or length
        training["max_length"] = length
        if text := training.pop("dataset_text_field", None):
            data["dataset_text_field"] = text

    def _adapter(self, call: ast.Call) -> dict[str, Any]:
        given = {"r": 16, "lora_alpha": 16, "target_modules": _LINEAR} | self._settings(call)
        top = ("use_gradient_checkpointing", "random_state")
        lora = {key: item for key, item in given.items() if key not in top and item is not None}
        return {"lora": lora} | {key: given[key] for key in top if key in given}

    def _settings(self, call: ast.Call, *, first: str | None = None) -> dict[str, Any]:
        """Return the literal arguments of a call; the others are noted."""
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        if first is not None and call.args:
            given.setdefault(first, call.args[0])
        made: dict[str, Any] = {}
        for key, node in given.items():
            if key in _OBJECTS and not isinstance(node, ast.Constant):
                continue
            try:
                made[key] = self._value(node)
            except ValueError:
                is_precision = key in ("bf16", "fp16", "dtype")
                why = "honed plans the precision itself" if is_precision else "write its value"
                words = f"computed in the script ({ast.unparse(node)[:60]}): {why}"
                self._foreign.note(key, words, is_lost=not is_precision)
        return made

    def _value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return a literal, also one behind a name; raises ValueError for anything that would have to run."""
        if isinstance(node, ast.Name) and node.id in self._named and depth < 5:
            return self._value(self._named[node.id], depth + 1)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            return ast.unparse(node)
        return ast.literal_eval(node)

    def _note(self, name: str) -> None:
        is_lost = False
        match name:
            case "get_chat_template":
                why = "the base model's own template is used; chat_template: names a file, if it has none"
            case "train_on_responses_only":
                why = "honed always trains on the answers alone, without markers"
            case "map" | "standardize_sharegpt" | "standardize_data_formats" | "to_sharegpt":
                why = "honed reads and renders the rows itself; write the mapped rows to a file, if they differ"
            case "save_pretrained_merged" | "push_to_hub_merged":
                why = "write save_merged: bfloat16 for a merged checkpoint beside the adapter"
            case "save_pretrained_gguf" | "push_to_hub_gguf":
                why, is_lost = "GGUF files are not supported yet", True
            case _:
                return
        if all(note.key != f"{name}()" for note in self._foreign.notes):
            self._foreign.note(f"{name}()", why, is_lost=is_lost)

    def _read_data(self) -> None:
        loads = [call for call in self._calls if _called(call)[1] == "load_dataset"]
        trainer = next((call for call in self._calls if _called(call)[1] in _TRAINERS), None)
        wanted = {keyword.arg: keyword.value for keyword in trainer.keywords} if trainer is not None else {}
        sets: dict[str, list[ast.Call]] = {"datasets": [], "eval_datasets": []}
        for call in loads:
            names = [name for name, node in self._named.items() if any(item is call for item in ast.walk(node))]
            held_out = wanted.get("eval_dataset")
            is_held_out = isinstance(held_out, ast.Name) and held_out.id in names
            sets["eval_datasets" if is_held_out else "datasets"].append(call)
        for key, calls in sets.items():
            if made := [self._data_set(call) for call in calls]:
                self._foreign.data[key] = made
        if not self._foreign.data.get("datasets"):
            self._foreign.note("train_dataset", "the script makes its rows itself: write them to a file")

    def _data_set(self, call: ast.Call) -> dict[str, Any]:
        given = self._settings(call, first="path")
        if len(call.args) > 1:
            given |= self._settings(ast.Call(call.func, [], [ast.keyword("name", call.args[1])]))
        made = {key: item for key, item in given.items() if key in ("path", "name", "split", "revision", "data_files")}
        if match := re.fullmatch(r"(\w+)\[:(\d+)\]", str(made.get("split"))):
            made |= {"split": match[1], "max_rows": int(match[2])}
        elif "[" in str(made.get("split")):
            self._foreign.note("split", f"{shown(made.pop('split'))}: honed reads whole splits, or max_rows")
        if isinstance(files := made.pop("data_files", None), dict):
            files = files.get("train", next(iter(files.values()), None))
        if files is not None and made.get("path") in ("json", "csv", "parquet", "text"):
            made["path"] = files[0] if isinstance(files, list) and len(files) == 1 else files
            made.pop("split", None)  # all rows of a file are of one split
        elif files is not None:
            made["data_files"] = files
        for key in given.keys() - {"path", "name", "split", "revision", "data_files"}:
            self._foreign.note(f"load_dataset.{key}", "honed reads the files itself")
        if not isinstance(made.get("path"), str):
            made["path"] = f"{UNKNOWN}/rows.jsonl"
        if made["path"].startswith(UNKNOWN):
            self._foreign.note("load_dataset", "the path is computed in the script: write it")
        return made


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that would run, in their order: those below `if False:` would not."""
    for item in ast.iter_child_nodes(node):
        if isinstance(item, ast.If) and isinstance(item.test, ast.Constant) and not item.test.value:
            for other in item.orelse:
                yield from _calls(other)
            continue
        yield from _calls(item)
    if isinstance(node, ast.Call):
        yield node


def _called(call: ast.Call) -> tuple[str, str]:
    """Return the name of a called function, and of what it belongs to."""
    match call.func:
        case ast.Name(id=name):
            return "", name
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return owner, name
        case ast.Attribute(attr=name):
            return "", name
    return "", ""


_PREPARED: Mapping[str, Callable[[Foreign, Path], None]] = {
    "axolotl": _axolotl,
    "llamafactory": _llamafactory,
    "trl": _trl,
    "openai": _openai,
}
