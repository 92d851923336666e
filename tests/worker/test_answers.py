"""Rows with several answers: each is encoded, truncated, collated and checked as a row of its own."""

from __future__ import annotations

import dataclasses

import pytest

from honed.inputs import census
from honed.inputs.row import Example
from honed.system.error import DatasetError
from honed.text.chat import ChatFormat
from honed.worker.rows import mask, record
from honed.worker.rows.collator import AnswerCollator
from honed.worker.rows.record import Builder, Fate
from zoo.tokenizer import build_tokenizer

CHAT = ChatFormat(build_tokenizer("chatml"))
ROW = Example("prompt_completion", prompt="2+2? ", completion="4", others=({"completion": "more than three"},))


def test_each_answer_is_the_row_with_that_answer_alone() -> None:
    alone = [Example("prompt_completion", prompt="2+2? ", completion=text) for text in ("4", "more than three")]
    encoded, parts = CHAT.encode(ROW), [CHAT.encode(example) for example in alone]
    assert ROW.answers == tuple(alone)
    assert [answer.input_ids for answer in encoded.answers] == [part.input_ids for part in parts]
    assert encoded.input_ids == parts[0].input_ids + parts[1].input_ids
    assert encoded.segments() == parts[0].segments() + parts[1].segments()
    assert encoded.num_predicted == sum(part.num_predicted for part in parts)
    assert census.digest(ROW) != census.digest(alone[0])


def test_truncation_cuts_each_answer_and_skips_the_row_if_nothing_of_one_is_left() -> None:
    whole = CHAT.encode(ROW)
    short, long = (len(answer.input_ids) for answer in whole.answers)
    assert short < long == whole.longest < len(whole.input_ids)
    assert whole.truncate(long) is whole
    cut = whole.truncate(short)
    assert [len(answer.input_ids) for answer in cut.answers] == [short, short]
    assert cut.num_predicted > 0
    asked = len(CHAT.tokens.ids(ROW.prompt))
    assert Builder(short).add(ROW, whole) is Fate.KEPT
    assert Builder(asked).add(ROW, whole) is Fate.CUT_OFF


def test_a_batch_has_the_answers_of_a_row_one_after_the_other() -> None:
    other = dataclasses.replace(ROW, prompt="3+3? ")
    builder = Builder(None)
    for row in (ROW, other):
        builder.add(row, CHAT.encode(row))
    batch = builder.batch()
    encoded = [CHAT.encode(row) for row in (ROW, other)]
    assert batch.answers == [[len(answer.input_ids) for answer in row.answers] for row in encoded]
    assert batch.numbers["longest"].tolist() == [row.longest for row in encoded]
    rows = [
        {"input_ids": row.input_ids, "labels": row.labels, "answers": answers}
        for row, answers in zip(encoded, batch.answers, strict=True)
    ]
    collated = AnswerCollator(pad_token_id=0)(rows)
    assert list(mask.examples(collated)) == [
        (answer.input_ids, answer.labels) for row in encoded for answer in row.answers
    ]


def test_a_row_with_several_answers_survives_its_file() -> None:
    assert record.unpacked(record.packed(ROW)) == ROW


def test_an_answer_without_a_text_makes_the_row_unusable() -> None:
    with pytest.raises(DatasetError, match="nothing to train on"):
        CHAT.encode(dataclasses.replace(ROW, others=({"completion": " "},)))
