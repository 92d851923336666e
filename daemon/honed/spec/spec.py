"""The job spec as types; jobfile.py reads a job file into a `JobSpec`.

Keys keep the spelling of the library that owns them (transformers, trl, peft). docs/job-spec.md is generated from here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)

from honed.spec import kind as kinds
from honed.spec import synonym, variant
from honed.spec.advice import Advice
from honed.spec.config import MAIL_ADDRESS, WEBHOOK_NAME
from honed.spec.data_form import form_of
from honed.spec.field import (
    MEMBER,
    RELATIVE,
    AbsolutePath,
    Count,
    Expected,
    Flag,
    NotEmpty,
    NotEmptyList,
    Place,
    Seconds,
    Section,
    Share,
    ShareOrZero,
    Texts,
    absolute,
    any_of,
    form,
    is_texts,
    refuse,
)
from honed.spec.media import KINDS, Kind, MediaLimits, Part
from honed.spec.metric_names import TAG
from honed.spec.problem import InvalidSpecError, Problem, shown
from honed.spec.training import TrainingSpec
from honed.system import quote

__all__ = [
    "BatchSpec",
    "DatasetSpec",
    "DivergenceSpec",
    "GroupSpec",
    "GuardSpec",
    "InvalidSpecError",
    "JobSpec",
    "LoraSpec",
    "MediaDirSpec",
    "MediaSpec",
    "NotifySpec",
    "PartsSpec",
    "PredictionSpec",
    "Problem",
    "ResourceSpec",
    "RetrySpec",
    "SampleSpec",
    "TrainingSpec",
    "references",
]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_JOB = re.compile(r"job:\S.*")


def _name(value: str) -> str:
    if not value.isprintable() or "/" in value or value != value.strip() or not 1 <= len(value) <= 100:
        raise ValueError
    if value.isdecimal():
        refuse(f"a name of only digits would be read as a job number, got {shown(value)}", "add a letter")
    return value


#: The URL of a model's page on the hub, which people copy in place of its id.
_HUB_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/)(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)"
    r"(?:/tree/main)?/?"
)


def _base_model(value: str) -> str:
    if value.startswith(("./", "../")):
        refuse(f"paths must be absolute, got {shown(value)}", RELATIVE)
    if value.startswith(("~", "$")):
        absolute(value)
    if match := _HUB_PAGE.fullmatch(value):
        refuse(
            f"expected a hub id (org/name) instead of its URL, got {shown(value)}",
            f"write {match['id']}",
            write=match["id"],
        )
    if value.startswith("/"):
        absolute(value)  # rejects line breaks
    elif not (_HUB_ID.fullmatch(value) or _JOB.fullmatch(value)):
        raise ValueError
    return value


def _advised(key: str, expected: str, advise: Callable[[str], Advice | None]) -> BeforeValidator:
    """Refuse a text for which there is advice, such as another tool's word."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and (advice := advise(value)) is not None:
            fix = None if advice.fix is None else {key: None, **advice.fix}
            refuse(f"expected {expected} {shown(value)}", advice.hint, fix=fix)
        return value

    return BeforeValidator(check, json_schema_input_type=str)


#: The URL of a data set on the hub, which people copy in place of its id.
_HUB_DATASET = re.compile(
    r"(?:hf://datasets/|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/datasets/)"
    r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?P<rest>[/@].*)?"
)


def is_hub_dataset(value: str) -> bool:
    """Tell whether a data set's path is a hub id rather than a file's path."""
    return _HUB_ID.fullmatch(value) is not None and ".." not in value and form_of(Path(value)) is None


def _dataset_path(value: str) -> str:
    if match := _HUB_DATASET.fullmatch(value):
        is_whole = (match["rest"] or "/").rstrip("/") in ("", "/tree/main", "/viewer", "@main")
        within = (
            ""
            if is_whole
            else ", and below it revision, name or split if you need one of them; or download the file and use its path"
        )
        refuse(
            f"expected a hub id (org/name) instead of its URL, got {shown(value)}",
            f"write {match['id']}{within}",
            write=match["id"] if is_whole else None,
        )
    return value if is_hub_dataset(value) else absolute(value)


def _adapter_place(value: str) -> str:
    if _JOB.fullmatch(value):
        return value
    if value.startswith("job:"):
        raise ValueError
    return absolute(value)


def _training_template(value: Any) -> Any:
    if value is True or (isinstance(value, str) and value.lower() in ("true", "yes", "on", "training", "auto", "trl")):
        if value != variant.ASKED:
            refuse(f"expected trl, or an absolute path, got {shown(value)}", "write trl", write="trl")
    elif isinstance(value, str) and "/" not in value and not Path(value).suffix:
        refuse(f"expected trl, or an absolute path, got {shown(value)}")
    return value


def _lora(value: Any) -> Any:
    if (advice := synonym.lora_value(value)) is not None:
        refuse(f"expected a mapping, or null, got {shown(value)}", advice.hint, fix=advice.fix)
    return value


def _quantization(value: Any) -> Any:
    if (advice := synonym.quantization_value(value)) is not None:
        refuse(f"expected one of none, 4bit, 8bit, got {shown(value)}", advice.hint, fix=advice.fix)
    return value


def _splits(value: Any) -> Any:
    if (advice := synonym.named_splits(value)) is not None:
        fix = {"datasets": None} | dict(advice.fix or {})
        refuse("expected a list of data sets, got a mapping of splits", advice.hint, fix=fix)
    return value


def _target_modules(value: str | list[str]) -> str | list[str]:
    if isinstance(value, str) and "," in value:
        refuse(
            f"expected a list of modules, got {shown(value)}",
            "write [q_proj, v_proj]",
            write=[part.strip() for part in value.split(",") if part.strip()],
        )
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error:
            refuse(f"expected all-linear, a list of words or a regular expression, got {shown(value)}")
    return value


def _distinct(value: list[int]) -> list[int]:
    if len(once := list(dict.fromkeys(value))) < len(value):
        twice = next(item for item in once if value.count(item) > 1)
        refuse(f"expected each token id once, got {twice} more than once", "remove the others", write=once)
    return value


def _listed(value: Any) -> Any:
    """Accept `tensorboard` for `[tensorboard]`, and `none` and null for an empty list, as in SFTConfig."""
    if value is None:
        return []
    if isinstance(value, str):
        return [] if value == "none" else [value]
    return value


def _metric_names(value: Any) -> Any:
    """Accept a metric's name for a list of one; auto stays as it is."""
    return [value] if isinstance(value, str) and value != "auto" else value


def _job_ids(value: Any) -> Any:
    if value is None:
        return []
    if isinstance(value, list):
        return [str(item) if isinstance(item, int) and not isinstance(item, bool) else item for item in value]
    return value


def _webhook(value: str) -> str:
    if WEBHOOK_NAME.fullmatch(value):
        return value
    if re.match(r"https?://[^/]*@", value):
        refuse("the URL contains a password", "a job file must not contain secrets")
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
        raise ValueError
    return value


#: GPUs of one node, and nodes of one job, at most.
MAX_GPUS, MAX_NODES = 64, 1024
_LORA_INIT = re.compile(r"gaussian|olora|orthogonal|pissa(_niter_[0-9]+)?")
_MODULES = Expected("all-linear, a regular expression, or a list of words")
Pixels = Annotated[int, Ge(64)]
_METRIC = re.compile(r"[A-Za-z][\w./-]*")
Metric = Annotated[str, form(_METRIC.pattern), Expected("the name of a metric")]
GroupMetric = Annotated[
    str,
    form(rf"{_METRIC.pattern}(/{TAG}[^\n]+)?"),
    Expected(f"the name of a metric, or METRIC/DATASET, or METRIC/{TAG}TAG"),
]


def is_metrics(value: Any) -> bool:
    return bool(value) and all(isinstance(item, str) and _METRIC.fullmatch(item) for item in value)


Ending = Literal["succeeded", "failed", "cancelled"]
Text = Annotated[str, form(r"[\s\S]*\S[\s\S]*"), Expected("text")]


TokenIds = Annotated[
    list[Annotated[int, Ge(0)]],
    MinLen(1),
    AfterValidator(_distinct),
    Expected("a list of token ids, at least one"),
]
TrainableTokens = Annotated[
    Annotated[TokenIds, Tag(f"{MEMBER}ids")] | Annotated[dict[NotEmpty, TokenIds], MinLen(1), Tag(f"{MEMBER}modules")],
    Discriminator(lambda value: f"{MEMBER}{'modules' if isinstance(value, dict) else 'ids'}"),
    Expected("a list of token ids, or a mapping of modules to such lists"),
]


class LoraSpec(Section):
    """`lora:` section, with peft's own names. Without it and without `adapter`, the job is full fine-tuning."""

    r: Annotated[int, Ge(1), Le(4096)] = 16
    """Rank of the adapter's matrices."""
    lora_alpha: Count = 32
    """The adapter's output is scaled by `lora_alpha / r`."""
    lora_dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout on the adapter's input."""
    target_modules: Annotated[
        str | list[str],
        any_of(lambda value: isinstance(value, str) or is_texts(value), str, list, schema=str | NotEmptyList),
        AfterValidator(_target_modules),
        _MODULES,
    ] = "all-linear"
    """Modules that get an adapter."""
    exclude_modules: (
        Annotated[
            str | list[str],
            any_of(lambda value: isinstance(value, str) or is_texts(value), str, list, schema=str | NotEmptyList),
            AfterValidator(_target_modules),
            Expected("a regular expression, or a list of words"),
        ]
        | None
    ) = None
    """Modules that get no adapter."""
    modules_to_save: Texts | None = None
    """Modules that are fully trained, beside the adapter."""
    target_parameters: Texts | None = None
    """Parameters that get an adapter though they are no module, by the ends of their names once the model is loaded:
    `[mlp.experts.gate_up_proj]`. `exclude_modules` and `layers_to_transform` apply to them too."""
    trainable_token_indices: TrainableTokens | None = None
    """Tokens whose own vectors are trained beside the adapter, by their ids: a list for the input embedding, or lists
    by module (`{embed_tokens: [128011], lm_head: [128011]}`). A head that shares the embedding's weights follows it.
    All other vectors stay as they are."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases that are trained."""
    use_rslora: Flag = False
    """Scale the adapter's output by `lora_alpha / sqrt(r)`."""
    use_dora: Flag = False
    """Split weights into magnitude and direction."""
    init_lora_weights: Annotated[
        bool | str,
        any_of(
            lambda value: isinstance(value, bool) or bool(_LORA_INIT.fullmatch(value)),
            bool,
            str,
            schema=bool | Annotated[str, Field(pattern=f"^({_LORA_INIT.pattern})$")],
        ),
        Expected("true, false, gaussian, olora, orthogonal, pissa or pissa_niter_<number>"),
    ] = True
    """Initialization of the adapter."""
    layers_to_transform: list[Annotated[int, Ge(0)]] | None = None
    """Numbers of the layers that get an adapter; null means all."""
    rank_pattern: dict[str, Count] | None = None
    """Ranks by module, in place of `r`."""
    alpha_pattern: dict[str, Count] | None = None
    """Alphas by module, in place of `lora_alpha`."""
    finetune_language_layers: Flag = True
    """Put adapters on the language model's layers."""
    finetune_vision_layers: Flag = False
    """Put adapters on the vision encoder's layers too."""
    finetune_projector: Flag = False
    """Put adapters on the projector too, which passes images and sound to the language model."""
    finetune_audio_layers: Flag = False
    """Put adapters on the audio encoder's layers too."""


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        refuse(f"expected a regular expression, got {shown(value)}: {quote.mark(str(error))}")
    return value


Pattern = Annotated[Text, AfterValidator(_pattern)]


class PartsSpec(Section):
    """`parts:` of a model whose module names honed does not know: for each part a regular expression, searched for in
    the names of modules as the checkpoint stores them. Modules below a match belong to its part.
    """

    vision: Pattern | None = None
    """Modules of the vision encoder."""
    audio: Pattern | None = None
    """Modules of the audio encoder."""
    projector: Pattern | None = None
    """Modules that project the encoders' outputs into the language model."""
    language: Pattern | None = None
    """Modules of the language model whose names suggest another part."""

    @property
    def patterns(self) -> dict[Part, str]:
        kinds: tuple[Part, ...] = ("language", "vision", "audio", "projector")
        return {kind: value for kind in kinds if (value := getattr(self, kind)) is not None}


class MediaDirSpec(Section):
    """`media_dir:` with a directory for each kind; null means the data file's directory."""

    image: AbsolutePath | None = None
    """Directory of images."""
    video: AbsolutePath | None = None
    """Directory of videos and of directories of frames."""
    audio: AbsolutePath | None = None
    """Directory of sound."""


MediaDir = Annotated[
    Annotated[AbsolutePath, Tag(f"{MEMBER}path")] | Annotated[MediaDirSpec, Tag(f"{MEMBER}kinds")],
    # So that an error is reported for the member that was meant.
    Discriminator(lambda value: f"{MEMBER}{'kinds' if isinstance(value, dict | MediaDirSpec) else 'path'}"),
    Expected("an absolute path, or a section of image, video, audio"),
]


class MediaSpec(Section):
    """`media:` conversion of images, videos and sound to tokens, and handling of rows where it fails."""

    max_pixels: Pixels | None = None
    """Maximum pixels (width × height) of an image or frame; larger ones are scaled down in proportion. null leaves that
    to the model's processor."""
    min_pixels: Pixels | None = None
    """Minimum pixels of an image or frame; smaller ones are enlarged."""
    max_image_size: Annotated[int, Ge(8)] | None = None
    """Maximum pixels of the longer side; larger images and frames are scaled down."""
    num_frames: Annotated[int, Ge(1), Le(10_000)] | None = None
    """Frames of a video that the model sees, evenly spaced; null takes 8, and all of a list of frames."""
    broken: Literal["drop", "refuse"] = "drop"
    """Action for a file that is missing or cannot be read: skip its row, count and report it (`drop`), or reject the
    job (`refuse`)."""
    too_long: Literal["drop", "refuse"] = "drop"
    """Action for a row where `max_length` would cut through an image, video or sound, or whose sound is longer than the
    model's processor accepts: `drop` or `refuse`, as for `broken`."""

    @property
    def limits(self) -> MediaLimits:
        return MediaLimits(self.max_pixels, self.min_pixels, self.max_image_size, self.num_frames)


class DatasetSpec(Section):
    """One entry of `datasets:` or `eval_datasets:`."""

    path: Annotated[str, AfterValidator(_dataset_path), Place(), Expected("an absolute path, or a hub id (org/name)")]
    """A .jsonl, .json, .csv, .parquet or .arrow file, or a directory of them, also one written by `save_to_disk` or
    with the files in `data/`. The first three formats may be compressed (.gz, .zst, .bz2, .xz). Or the hub id of a data
    set with such files, which is fetched as a base model is."""
    name: Text | None = None
    """Configuration of a hub data set that has several."""
    label: Annotated[str, form(r"[\w.-]{1,64}"), Expected("a word of letters, digits, `.`, `_` and `-`")] | None = None
    """Name of the data set in metrics (`eval_loss/LABEL`), where several are held out; null takes its file's name."""
    revision: Annotated[str, form(r"\w[\w./-]*"), Expected("a branch, tag or commit")] | None = None
    """Branch, tag or commit of a hub data set."""
    format: kinds.Format = "auto"
    """Format of the rows; `auto` chooses by their columns."""
    fraction: Annotated[float, Gt(0)] | None = None
    """Share of the mixture, as in TRL: normalised, no row drawn twice. Set it for all data sets or for none."""
    split: Text | None = None
    """Split to read from a directory with several: a subdirectory, or a word at the beginning or end of file names.
    Required where some names contain `test` or the like; `train` takes files whose names contain no split, if none
    contains `train`."""
    max_rows: Count | None = None
    """Maximum number of rows to read."""
    media_dir: MediaDir | None = None
    """Directory that relative paths of images, audio and video in the rows start from; null takes the data file's. A
    section has one for each kind."""
    columns: dict[str, Text] | None = None
    """Column names that differ, as `our name: their column`."""
    _place: Path | None = PrivateAttr(None)  # the snapshot of a hub data set, and its files
    _files: tuple[str, ...] = PrivateAttr(())
    _form: str = PrivateAttr("text")  # set by the job

    @property
    def row_form(self) -> str:
        """The form of its rows, by the kind of its job."""
        return self._form

    @property
    def is_of_hub(self) -> bool:
        return is_hub_dataset(self.path)

    @property
    def is_missing(self) -> bool:
        """True for a hub data set that was not found in the cache."""
        return self.is_of_hub and self._place is None

    @property
    def place(self) -> Path:
        """The file or directory; undefined while a hub data set is missing."""
        assert not self.is_missing
        return self._place or Path(self.path)

    @property
    def hub_files(self) -> list[Path]:
        """The data files of a hub data set that was found in the cache."""
        return [self.place / name for name in self._files]

    def placed(self, place: Path, files: Sequence[str]) -> DatasetSpec:
        """Return a hub data set with its location in the cache."""
        made = self.model_copy()
        made._place, made._files = place, tuple(files)
        return made

    def media_dirs(self, data_dir: Path) -> dict[Kind, Path]:
        """Return the directories that relative paths of each kind refer to, for a data file in `data_dir`."""
        match self.media_dir:
            case None:
                given: dict[str, str | None] = {}
            case MediaDirSpec() as section:
                given = {kind: getattr(section, kind) for kind in KINDS}
            case path:
                given = dict.fromkeys(KINDS, path)
        return {kind: Path(given.get(kind) or data_dir) for kind in KINDS}


class SampleSpec(Section):
    """`predictions.sample:` settings for predictions that are sampled instead of greedy."""

    temperature: Annotated[float, Gt(0), Le(100)] = 1.0
    """Temperature: above 1 answers vary more, below 1 less."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    """Seed for sampling, the same in each round, so that a change comes from the model."""


class PredictionSpec(Section):
    """`predictions:` on held-out examples, before, during and after training."""

    sample_frequency: Annotated[
        Literal["eval", "epoch", "off"] | int,
        any_of(
            lambda value: value in ("eval", "epoch", "off") if isinstance(value, str) else value >= 1,
            int,
            str,
            schema=Literal["eval", "epoch", "off"] | Count,
        ),
        Expected("one of eval, epoch, off, or an integer number of steps"),
    ] = "eval"
    """Interval of predictions, in addition to those at the start and the end; `off` makes none at all."""
    num_samples: Count = 5
    """Number of held-out examples to predict."""
    max_new_tokens: Count = 64
    """Maximum number of tokens per answer."""
    batch_size: Count | None = None
    """Prompts per batch; null takes 16, and 4 with images, videos or sounds."""
    prompts: Texts | None = None
    """Prompts to use in place of held-out examples."""
    metrics: Annotated[
        Literal["auto"] | list[Metric],
        any_of(lambda value: value == "auto" or is_metrics(value), str, list),
        BeforeValidator(_metric_names, json_schema_input_type=NotEmpty | NotEmptyList),
        Expected("auto, or a list of metric names"),
    ] = "auto"
    """Metrics on predictions; `auto` chooses by the expected answers. docs/data.md lists all of them."""
    sample: SampleSpec | None = None
    """Sampling settings; null takes the likeliest token each time."""
    settings: Literal["greedy", "base"] = "greedy"
    """Further generation settings: `greedy` uses none, `base` uses those of the base model's generation_config.json
    (penalties, n-grams, suppressed and forced tokens, and, without `sample`, sampling and beams). Answers end at the
    same tokens in both, and the output keeps the base's file."""
    autocast: Literal["off", "match"] = "off"
    """Autocast in predictions: `match` uses the trainer's, for a model that fails without it. Where parameters trained
    beside LoRA's own have another dtype than the loaded model, `off` is autocast in the model's dtype: predictions
    would fail without it."""
    max_share: Share | None = 0.1
    """Maximum share of a run of more than ten minutes that predictions may take; those at evaluations are skipped where
    they would take more. null sets no limit, and is the default where `num_samples` is given."""

    @model_validator(mode="before")
    @classmethod
    def _as_many_as_asked(cls, data: Any) -> Any:
        if isinstance(data, dict) and "num_samples" in data and "max_share" not in data:
            return {**data, "max_share": None}
        return data


class ResourceSpec(Section):
    """`resources:` that the job needs."""

    gpus: Annotated[int, Ge(0), Le(MAX_GPUS), Expected(f"a number of GPUs, at most {MAX_GPUS}")] = 1
    """Number of GPUs, on each node; 0 trains on the CPU."""
    nodes: Annotated[int, Ge(1), Le(MAX_NODES), Expected(f"a number of nodes, at most {MAX_NODES}")] = 1
    """Number of machines; more than one needs a cluster."""
    profile: Annotated[str, form(r"[A-Za-z0-9_-]{1,64}"), Expected("the name of a profile")] | None = None
    """Profile of the cluster's `[slurm.profiles]`; by default the one that the administrator has made the default."""

    @property
    def num_ranks(self) -> int:
        """The number of processes that train: one on each GPU, or one on the CPU."""
        return max(1, self.gpus) * self.nodes


class BatchSpec(Section):
    """`batch:` as the optimizer sees it, over all GPUs."""

    effective: Count | None = None
    """Rows of one optimizer step on all GPUs together. `training.gradient_accumulation_steps` is then derived, so that
    the result does not depend on the number of GPUs; null multiplies per_device_train_batch_size,
    gradient_accumulation_steps and the number of GPUs."""


class RetrySpec(Section):
    """`retry:` after a crash or an out-of-memory error."""

    max_attempts: Annotated[int, Ge(1), Le(100)] = 3
    """Maximum number of attempts, each from the last checkpoint. Clean stops and steps of `adjust` do not count."""
    on_out_of_memory: Literal["adjust", "retry", "fail"] = "adjust"
    """Action after an out-of-memory error: `adjust` takes the next attempt one step down a ladder that keeps what is
    learned (smaller batches with more accumulation, gradient checkpointing, smaller batches of evaluations and of
    predictions), until it fits or no step is left; `retry` tries again unchanged; `fail` ends the job."""
    may_shrink_media: Flag = False
    """Let the ladder continue to fewer frames of a video and fewer pixels of an image, which changes what is
    learned."""


class DivergenceSpec(Section):
    """`divergence:` detection of runs that cannot recover. Two losses in a row that are not numbers always count."""

    grad_norm_factor: Annotated[float, Gt(1)] | None = 20.0
    """Factor over the median of the last steps above which a gradient's norm is an explosion, if the loss has also more
    than doubled, to more than half of the loss of a guess among all tokens. null checks losses alone, for values far
    above such a guess."""
    num_steps: Count = 5
    """Consecutive steps with such a gradient or loss after which the run is stopped."""


class GuardSpec(Section):
    """`guard:` lets a job fail if its model ends worse than it began."""

    metric: GroupMetric
    """Metric on predictions to watch, such as exact_match, or `exact_match/tag:arithmetic` for the rows with a tag."""
    max_drop: Annotated[float, Ge(0)] = 0.0
    """Maximum fall of the metric below its value before training."""
    num_samples: Count = 100
    """Number of held-out examples to measure the metric on."""
    patience: Count | None = None
    """Consecutive evaluations with a fall of more than `max_drop` after which training ends; null measures the metric
    before and after training alone."""


class HalvingSpec(Section):
    """`halving:` of a sweep's job."""

    min_steps: Annotated[int, Ge(1)]
    """Steps of the first rung."""
    eta: Annotated[int, Ge(2)]
    """Reduction factor."""


class GroupSpec(Section):
    """`group:` of a sweep's job: honed writes it."""

    id: Annotated[int, Ge(1)]
    """Number of the group."""
    name: Text
    """Name of the group: that of the sweep."""
    file: Text
    """Job file of the sweep."""
    values: dict[str, Any] = Field(default_factory=dict)
    """Values of the keys that the sweep varies."""
    halving: HalvingSpec | None = None
    """Settings by which the sweep ends hopeless jobs early."""


class NotifySpec(Section):
    """`notify:` recipients of a notification when the job ends."""

    webhook: Annotated[str, AfterValidator(_webhook), Expected("an HTTP or HTTPS URL, or a webhook's name")] | None = (
        None
    )
    """URL that gets a POST, or its name in honed.toml; the administrator decides which ones a job may name."""
    mail: Annotated[str, form(MAIL_ADDRESS.pattern), Expected("an email address")] | None = None
    """Mail address, in a domain that the administrator allows."""
    states: list[Ending] = Field(default=["succeeded", "failed", "cancelled"])
    """Final states that are reported."""


Quantization = Literal["none", "4bit", "8bit"]
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class JobSpec(Section):
    """A job. Only `base_model` and `datasets` are required; for a merge, `base_model` and `adapter`; for an evaluation,
    `base_model` and `eval_datasets`."""

    name: (
        Annotated[str, AfterValidator(_name), Expected("a name of at most 100 characters, without a slash")] | None
    ) = None
    """Name for people; honectl accepts it where it is unambiguous."""
    kind: kinds.Name = "sft"
    """Task: supervised fine-tuning; the merge of an adapter into its base model, on the CPU; or the evaluation of a
    model, with an adapter or without, on `eval_datasets`, which trains and writes nothing."""
    job_class: Annotated[str, form(r"[A-Za-z0-9_-]{1,64}"), Expected("the name of a class")] | None = Field(
        default=None, alias="class"
    )
    """Class of the administrator's `[classes]`, such as one whose jobs start before all others; by default the class
    that the administrator has made the default."""
    priority: Annotated[int, Ge(-1_000_000), Le(1_000_000)] = 0
    """Jobs with a higher value start before the same user's others, equal ones in order of arrival. Between users
    their classes decide, then the use of devices so far, then the order of arrival."""
    base_model: Annotated[
        str, AfterValidator(_base_model), Expected("an absolute directory, a hub id (org/name), or job:NAME"), Place()
    ]
    """Model that training starts from: a directory, a hub id, or another job's output (`job:NAME`)."""
    model_type: (
        Annotated[
            str,
            _advised("model_type", "a model type such as qwen3, got the class", synonym.model_class),
            form(r"[A-Za-z0-9_-]+"),
            Expected("a model type such as qwen3"),
        ]
        | None
    ) = None
    """Model type, only where the checkpoint's config.json lacks it or has an alias."""
    revision: Annotated[str, form(r"\w[\w./-]*"), Expected("a branch, tag or commit")] | None = None
    """Branch, tag or commit of a hub id."""
    trust_remote_code: Flag = False
    """Run code that comes with the model; only where the administrator allows it."""
    chat_template: (
        Annotated[AbsolutePath, _advised("chat_template", "a file with a Jinja template, got", synonym.template_word)]
        | None
    ) = None
    """File with a chat template, for a base model without one."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, in training and predictions; a row's own `chat_template_kwargs` override them."""
    training_chat_template: (
        Annotated[
            str,
            BeforeValidator(_training_template, json_schema_input_type=str),
            AfterValidator(lambda value: value if value == variant.ASKED else absolute(value)),
            Expected("trl, or an absolute path"),
            Place(),
        ]
        | None
    ) = None
    """Template for rendering rows, where the base model's leaves out parts of them: `trl` uses the training variant
    that TRL ships for it; any other value is a file. Predictions and the exported model use the base's template."""
    adapter: (
        Annotated[
            str,
            _advised("adapter", "the directory of an adapter to continue from, got", synonym.adapter_word),
            AfterValidator(_adapter_place),
            Expected("an absolute directory, or job:NAME"),
            Place(),
        ]
        | None
    ) = None
    """Directory of an adapter, or the job that makes it (`job:NAME`), to continue training from, to merge or to
    evaluate."""
    backend: Literal["auto", "unsloth", "transformers"] = "auto"
    """Library that loads the model; `auto` falls back to transformers, a backend set by name does not."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of computation; `auto` takes the checkpoint's, if the device supports it. Full fine-tuning then has
    float32 weights, under autocast, as far as memory allows: see `master_weights`. float32 computes in float32, without
    autocast. For a merge: precision of the weights, except those that the family or the base keeps in a wider one.
    """
    adapter_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights trained beside a frozen base; `auto` is float32, also for QLoRA. bfloat16 takes half the
    memory and loses small updates."""
    master_weights: Literal["auto", "float32", "compensated", "none"] = "auto"
    """Storage of the weights in full fine-tuning: `float32`, computed under autocast; `compensated`, bfloat16 with a
    remainder that completes each weight to float32, updated by honed's own AdamW; `none`, bfloat16 alone, which loses
    small updates. `auto` takes the first that fits into the device's memory, with an 8-bit AdamW where that helps and
    `training.optim` names no other optimizer."""
    save_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of a full fine-tuning's output; `auto` takes the base checkpoint's, `float32` keeps the trained
    values."""
    quantization: Annotated[Quantization, BeforeValidator(_quantization, json_schema_input_type=Quantization)] = "none"
    """Quantization of the base model, under an adapter."""
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Implementation of attention."""
    lora: Annotated[LoraSpec | None, BeforeValidator(_lora, json_schema_input_type=LoraSpec | None)] = None
    """Train an adapter. Left out: full fine-tuning; in a multimodal model, of its language model."""
    parts: PartsSpec = PartsSpec()
    """Modules of the vision encoder, the audio encoder and the projector, where honed does not know their names."""
    train_parts: Annotated[
        list[Literal["language", "vision", "audio", "projector"]],
        Expected("a list of language, vision, audio, projector"),
    ] = Field(default=["language"], min_length=1)
    """Parts of the model that full fine-tuning trains; the others stay frozen."""
    datasets: Annotated[list[DatasetSpec], BeforeValidator(_splits, json_schema_input_type=list[DatasetSpec])] = Field(
        default_factory=list
    )
    """Training data."""
    eval_datasets: Annotated[
        list[DatasetSpec],
        BeforeValidator(lambda value: [] if value is None else value, json_schema_input_type=list[DatasetSpec] | None),
    ] = Field(default_factory=list)
    """Held-out data; or use `eval_split`."""
    eval_split: ShareOrZero | None = None
    """Share of the training data to hold out; 0 and null hold nothing out. Rows with the same content stay on the same
    side."""
    media: MediaSpec = MediaSpec()
    """Conversion of the rows' images, videos and sound to tokens."""
    training: TrainingSpec = TrainingSpec()
    """Trainer settings, under SFTConfig's own names."""
    predictions: PredictionSpec = PredictionSpec()
    """Predictions for held-out examples."""
    output_dir: AbsolutePath | None = None
    """Directory for the result; by default `jobs/<id>/output`."""
    save_merged: Literal["none", "bfloat16", "float16"] = "none"
    """Precision of a merged checkpoint beside the adapter; `none` saves none."""
    resources: ResourceSpec = ResourceSpec()
    """Resources that the job needs."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """Division of the work between several GPUs: `ddp` keeps the whole model on each GPU and divides the rows; `fsdp`
    divides the model too. `auto` takes `fsdp` where the model does not fit on one GPU."""
    batch: BatchSpec = BatchSpec()
    """Size of a batch over all GPUs."""
    retry: RetrySpec = RetrySpec()
    """Retries after a crash or an out-of-memory error."""
    divergence: DivergenceSpec = DivergenceSpec()
    """Detection of runs that cannot recover."""
    depends_on: Annotated[
        list[Text],
        BeforeValidator(_job_ids, json_schema_input_type=list[NotEmpty | int] | None),
        Expected("a list of job names or numbers"),
    ] = Field(default_factory=list)
    """Jobs that must succeed before this one starts."""
    time_limit_sec: Seconds | None = None
    """Maximum run time in seconds, all attempts together."""
    save_interval_sec: Seconds | None = 600.0
    """Seconds between checkpoints, in addition to `save_steps`; null saves by steps alone."""
    early_stopping_patience: Count | None = None
    """Evaluations without improvement after which training ends."""
    guard: GuardSpec | None = None
    """Metric that must not fall."""
    report_to: Annotated[
        list[Tracker],
        BeforeValidator(_listed, json_schema_input_type=list[Tracker] | Tracker | Literal["none"] | None),
        Expected("a list of tensorboard, wandb, mlflow, trackio"),
    ] = Field(default_factory=list)
    """Trackers that receive the metrics."""
    sweep: dict[str, Any] | None = None
    """Values to try, as `key: [value, …]` with dotted keys: one job for each combination. `random: N` takes N of them,
    drawn by `seed` (0). `halving: {min_steps: N, eta: 2}` ends hopeless jobs early, by their evaluation loss."""
    group: GroupSpec | None = None
    """Group of a sweep's job; honed writes it."""
    pin: Flag = False
    """Keep the finished job: nothing removes it until `honectl unpin`."""
    notify: NotifySpec | None = None
    """Recipients of a notification when the job ends."""
    trial: Annotated[
        bool | str,
        any_of(lambda value: value in (True, False, "only"), bool, str, schema=bool | Literal["only"]),
        Expected("true, false or only"),
    ] = False
    """Try eight rows for a few steps first and report the findings; `only` does nothing else."""

    def model_post_init(self, _context: Any) -> None:
        for _, dataset in self.each_dataset():
            dataset._form = kinds.of(self).form

    def each_dataset(self) -> Iterator[tuple[str, DatasetSpec]]:
        """Yield the data sets to train and to evaluate on, each with its key: datasets.0, …, eval_datasets.0, …"""
        for key in ("datasets", "eval_datasets"):
            yield from ((f"{key}.{number}", item) for number, item in enumerate(getattr(self, key)))

    @property
    def eval_strategy(self) -> str:
        """The strategy for evaluating held-out rows: as the job says, else by its eval_steps, else each epoch."""
        if "eval_strategy" in self.training.model_fields_set or not (self.eval_datasets or self.eval_split is not None):
            return self.training.eval_strategy
        return "steps" if self.training.eval_steps is not None else "epoch"


def references(spec: JobSpec) -> dict[str, str]:
    """Return {key: job name or number} for the keys that refer to another job's output."""
    values = {"base_model": spec.base_model, "adapter": spec.adapter or ""}
    return {key: value.removeprefix("job:") for key, value in values.items() if _JOB.fullmatch(value)}
