"""The processor of a vision or audio model: from a rendered row and its media to token ids and tensors.

Nothing here depends on a family. The text that a processor writes instead of an image is taken from its call of its
tokenizer, which a stand-in records.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import PIL.Image

from honed.inputs import basemodel
from honed.inputs import media as medias
from honed.inputs.media import Media
from honed.spec.media import Kind, MediaLimits
from honed.system.error import DatasetError, EnvironmentInvalidError, HonedError, ModelError, said
from honed.text.chat import MediaCutError
from honed.text.expansion import Expanded
from honed.worker.assignment import Assignment

#: Frames per second assumed for a video whose file does not say: most processors sample videos at this rate.
FRAME_RATE = 2.0

#: Attributes of a processor per kind; without them, most processors silently ignore such an argument.
_PARTS: dict[Kind, tuple[str, ...]] = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}

#: A text that no processor adds.
_MARK = "Qx7"

#: Seconds at a sound's end that are replaced to see whether they matter.
_TAIL_SEC = 0.1

#: A fast tokenizer cannot be used in two threads at once.
_TOKENIZER_LOCK = threading.Lock()


@dataclass(frozen=True)
class Processed:
    """One row, ready for the model."""

    expanded: Expanded
    tensors: dict[str, Any]  #: of a batch of one


class Processor:
    """A processor, with the tokenizer that the job trains with."""

    def __init__(self, processor: Any, tokenizer: Any, limits: MediaLimits) -> None:
        self.processor = processor
        self._tokenizer = copy.deepcopy(tokenizer)
        self._limits = limits
        self._is_by_token: dict[str, bool] = {}
        self._num_heard = 0  # samples: sounds up to this length are known to be used in full

    @property
    def names_by_token(self) -> list[str]:
        """The tensors that have a number per token, as far as rows have been processed."""
        return [name for name, is_by_token in self._is_by_token.items() if is_by_token]

    @functools.cached_property
    def prompt_end(self) -> str:
        """The text that the processor writes after every text, as the end of a prompt: PaliGemma's a newline."""
        placeholder = getattr(self.processor, "image_token", None)
        if not isinstance(placeholder, str) or not hasattr(self.processor, "image_processor"):
            return ""
        heard = _Listener(self._tokenizer)
        try:
            self._call(placeholder + _MARK, {"images": [PIL.Image.new("RGB", (64, 64))]}, heard)
        except HonedError:  # its images have other placeholders
            return ""
        _, mark, end = heard.tokenized[-1][0].rpartition(_MARK) if heard.tokenized else ("", "", "")
        return end if mark else ""  # another text may come last

    def expand(self, text: str, media: Sequence[Media]) -> Expanded:
        return self.process(text, media).expanded

    def process(self, text: str, media: Sequence[Media]) -> Processed:
        """Decode the media and process the row. Raises DatasetError for a row that the processor refuses.

        The text ends as it is: `prompt_end` is not added to it.
        """
        heard = _Listener(self._tokenizer, self.prompt_end)
        options = self._options(media)
        tensors = self._call(text, options, heard)
        self._check_sounds(text, media, options, tensors)
        ids = tensors["input_ids"][0].tolist()
        expanded = next((said for said, tokens in reversed(heard.tokenized) if tokens == ids), None)
        if expanded is None:
            raise ModelError(
                f"{type(self.processor).__name__} does not insert an image's tokens before it tokenizes a row, so "
                "trained and masked tokens cannot be distinguished",
                hint="train this model only on text rows, or use a transformers 5 processor",
            )
        for name, value in tensors.items():
            is_by_token = getattr(value, "shape", None) == (1, len(ids)) and not value.is_floating_point()
            self._is_by_token[name] = is_by_token and self._is_by_token.get(name, True)
        return Processed(Expanded(expanded, ids, _grids(tensors)), tensors)

    def _call(self, text: str, options: Mapping[str, Any], heard: _Listener) -> dict[str, Any]:
        processor = copy.copy(self.processor)
        processor.tokenizer = heard
        try:
            tensors = dict(processor(text=[text], add_special_tokens=False, return_tensors="pt", **options))
        except (MemoryError, HonedError):
            raise
        except Exception as error:  # its own classes, and whatever it stumbles over
            words = f"{type(error).__name__}: {said(error)}" if str(error) else type(error).__name__
            raise DatasetError(f"the processor rejects the row: {words}") from error
        tensors.pop("labels", None)  # of a processor that knows no answer
        return tensors

    def _check_sounds(
        self, text: str, media: Sequence[Media], options: Mapping[str, Any], tensors: Mapping[str, Any]
    ) -> None:
        """Raise MediaCutError for a sound whose end the processor ignores, as Whisper's does after 30 seconds.

        Processors do not report this, and their limits have many names. So a longer sound than any before is processed
        again with another end, which must make a difference.
        """
        import numpy as np

        rate = self._sampling_rate
        sounds, files = options.get("audio", []), [item for item in media if item.kind == "audio"]
        for n, (sound, file) in enumerate(zip(sounds, files, strict=True)):
            if len(sound) <= max(self._num_heard, rate):
                continue
            other = sound.copy()
            other[-int(_TAIL_SEC * rate) :] = np.random.default_rng(0).uniform(-0.5, 0.5, int(_TAIL_SEC * rate))
            again = {**options, "audio": [*sounds[:n], other, *sounds[n + 1 :]]}
            if _are_equal(tensors, self._call(text, again, _Listener(self._tokenizer, self.prompt_end))):
                limit = getattr(getattr(self.processor, "feature_extractor", None), "chunk_length", None)
                raise MediaCutError(
                    f"{file.named}: {len(sound) / rate:.1f} seconds of sound, but the processor "
                    + (f"reads only the first {limit}" if limit else "ignores the end"),
                    hint="split long sounds into several rows",
                )
            self._num_heard = max(self._num_heard, len(sound))

    def _options(self, media: Sequence[Media]) -> dict[str, Any]:
        """Return the decoded media as arguments for the processor. Raises MediaError, which names the file."""
        for kind in dict.fromkeys(item.kind for item in media):
            if not any(hasattr(self.processor, part) for part in _PARTS[kind]):
                raise DatasetError(
                    f"{type(self.processor).__name__} does not support {kind}: it has no {_PARTS[kind][0]}"
                )
        options: dict[str, Any] = {}
        images = [medias.image(item, self._limits) for item in media if item.kind == "image"]
        videos = [_video(item, self._limits) for item in media if item.kind == "video"]
        rate = self._sampling_rate
        sounds = [medias.audio(item, rate) for item in media if item.kind == "audio"]
        if images:
            options["images"] = images
        if videos:
            options["videos"] = [frames for frames, _ in videos]
            facts = [video for _, video in videos]
            options["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": facts, "fps": _rate(facts)}
        if sounds:
            options |= {"audio": sounds, "sampling_rate": rate}
        return options

    @property
    def _sampling_rate(self) -> int:
        ears = getattr(self.processor, "feature_extractor", None) or getattr(self.processor, "audio_processor", None)
        return int(getattr(ears, "sampling_rate", 16000))


class _Listener:
    """Stand-in for a processor's tokenizer: it calls the tokenizer, and keeps the texts and their ids.

    A text is tokenized without `ending`, which the processor has added to it.
    """

    def __init__(self, tokenizer: Any, ending: str = "") -> None:
        self._tokenizer, self._ending = tokenizer, ending
        self.tokenized: list[tuple[str, list[int]]] = []

    def __call__(self, text: Any = None, *arguments: Any, **options: Any) -> Any:
        if self._ending:
            is_one = isinstance(text, str)
            text = text.removesuffix(self._ending) if is_one else [item.removesuffix(self._ending) for item in text]
        with _TOKENIZER_LOCK:
            batch = self._tokenizer(text, *arguments, **options)
        texts = [text] if isinstance(text, str) else text
        ids = batch["input_ids"]
        rows = ids.tolist() if hasattr(ids, "tolist") else ids
        if isinstance(texts, Sequence) and len(texts) == 1:
            self.tokenized.append((texts[0], list(rows[0]) if rows and not isinstance(rows[0], int) else list(rows)))
        return batch

    def __getattr__(self, name: str) -> Any:
        if name in ("_tokenizer", "_ending"):  # copy reads it before it is set
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def load(assignment: Assignment, tokenizer: Any, limits: MediaLimits) -> Processor:
    """Load the base model's processor. Raises DatasetError if it has none: then the rows do not suit the model."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    path, spec = assignment.base_model_path, assignment.spec
    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=spec.trust_remote_code)
    except ImportError as error:  # most video processors, and with them all of Qwen's, want torchvision
        raise EnvironmentInvalidError(
            f"{path}: its processor cannot be loaded: {str(error).strip().splitlines()[0]}",
            hint="install the packages it names, for this torch; honectl doctor lists the installed ones",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        is_there = basemodel.has_processor(path)
        why = f"{type(error).__name__}: {said(error)}" if is_there else f"it has {basemodel.NO_PROCESSOR}"
        raise ModelError(
            f"{path}: its processor cannot be loaded: {why}",
            hint="copy preprocessor_config.json and processor_config.json from the model's source",
        ) from error
    if isinstance(processor, PreTrainedTokenizerBase) or not hasattr(processor, "tokenizer"):
        raise DatasetError(
            f"the rows have images, videos or sounds, but the base model ({path}) has no processor for them",
            hint="use a vision or audio model, with its processor's files",
        )
    return Processor(processor, tokenizer, limits)


def _are_equal(tensors: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    import torch

    return tensors.keys() == others.keys() and all(
        torch.equal(value, others[name]) for name, value in tensors.items() if torch.is_tensor(value)
    )


def _video(media: Media, limits: MediaLimits) -> tuple[Any, dict[str, Any]]:
    """Return a video's frames as one array, and metadata by which processors know that they are sampled already."""
    import numpy as np

    frames, rate = medias.frames(media, limits)
    width, height = frames[0].size
    same = [frame if frame.size == (width, height) else frame.resize((width, height)) for frame in frames]
    number = len(frames)
    facts = {
        "total_num_frames": number,
        "fps": rate or FRAME_RATE,
        "frames_indices": list(range(number)),
        "width": width,
        "height": height,
        "duration": number / (rate or FRAME_RATE),
    }
    return np.stack([np.asarray(frame) for frame in same]), facts


def _rate(facts: Sequence[Mapping[str, Any]]) -> float:
    """Return the frames per second of a row's videos, for processors that do not read `video_metadata`.

    Omni's has one rate for all of them, and assumes two if it is given none.
    """
    return sum(float(fact["fps"]) for fact in facts) / len(facts)


def _grids(tensors: Mapping[str, Any]) -> dict[Kind, list[tuple[int, ...]]]:
    """Return the numbers of patches of each of the media (frames, rows, columns), in families that report them."""
    kinds: tuple[Kind, ...] = ("image", "video")
    return {
        kind: [tuple(row) for row in tensors[f"{kind}_grid_thw"].tolist()]
        for kind in kinds
        if f"{kind}_grid_thw" in tensors
    }
