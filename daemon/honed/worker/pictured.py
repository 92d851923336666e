"""A row with an image for a rehearsal: encoded as the job's rows are, by the base model's own tokenizer, chat template
and processor, with the token ids of the small model.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from honed.inputs.media import Media
from honed.inputs.row import Example
from honed.text.chat import ChatFormat
from honed.worker.assignment import Assignment

#: Width and height of the image. Processors bring it to the size that their models take.
SIZE = (64, 48)


@dataclass(frozen=True)
class Pictured:
    """A batch of one row with an image, and its labels."""

    tensors: Mapping[str, Any]
    words: Mapping[int, int]  #: the tokens that the model's config names → those of the small config

    def of(self, model: Any) -> dict[str, Any]:
        """Return the batch for a small model: tokens that no config names become any others of its words."""
        from honed.worker.rows import prefix

        number = model.config.get_text_config().vocab_size
        first = number // 2  # those of configs are the first ones

        def smaller(token: int) -> int:
            return token if token < 0 else self.words.get(token, first + token % (number - first))

        small = {name: self.tensors[name].clone().apply_(smaller) for name in ("input_ids", "labels")}
        return prefix.trained(model, {**self.tensors, **small})


def load(job: Assignment) -> Pictured:
    """Make the row. Raises whatever the tokenizer, the template and the processor raise."""
    from honed.worker.model import load as loads
    from honed.worker.model import shrink, tokenizer
    from honed.worker.model.config import load_config
    from honed.worker.rows.collator import Collator, Source

    job = replace(job, spec=job.spec.model_copy(update={"trust_remote_code": False}))  # a check runs no code of models
    chat = ChatFormat.of(job.spec, tokenizer.load(job), date=job.date)
    processor = loads.load_processor(job, chat.tokenizer)
    chat.places.expand_with(processor.expand, prompt_end=processor.prompt_end)
    row = _row()
    encoded = chat.encode(row)
    source = Source("a row", encoded.rendered, row.media, len(encoded.input_ids))
    pad_id, dtype = chat.tokenizer.pad_token_id, job.precision.load_dtype
    collator = Collator(processor, [source], dtype=dtype, pad_token_id=pad_id)
    tensors = collator([{"input_ids": encoded.input_ids, "labels": encoded.labels, "source": 0}])
    return Pictured(tensors, shrink.words(load_config(job)))


def _row() -> Example:
    import PIL.Image

    image = io.BytesIO()
    PIL.Image.new("RGB", SIZE, "red").save(image, "png")
    asked = [{"type": "image"}, {"type": "text", "text": "Which color is this?"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "It is red."},
    ]
    return Example("messages", messages=messages, media=(Media("image", data=image.getvalue()),))
