"""Jobs whose keys are valid, but which cannot do what was meant: `check` rejects them, or warns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from honed.check import modelcheck, preflight
from honed.check.checklist import Asked, Verdict
from honed.inputs import basemodel
from honed.spec.config import Config
from honed.system import installed
from honed.system.device import Device
from honed.system.error import HonedError, ModelError
from honed.system.layout import Layout
from zoo import family, plain

CPU = Device("cpu", "a processor", total_bytes=24 * 2**30, free_bytes=20 * 2**30)

pytestmark = pytest.mark.skipif(installed.version("transformers") is None, reason="goes by transformers' source")


class Desk:
    """A place for models, rows and the job files that name them."""

    def __init__(self, path: Path) -> None:
        self.path, self.layout = path, Layout(path / "root")
        self.layout.jobs_dir.mkdir(parents=True)
        self.rows = plain.write_dataset(path / "data" / "rows.jsonl")

    def model(self, name: str = "llama", **config: Any) -> Path:
        return family.write(self.path / name, name, **config)

    def check(self, **keys: Any) -> Verdict:
        spec = {"base_model": str(self.path / "llama"), "lora": {"r": 4}, "datasets": [{"path": str(self.rows)}]}
        path = self.path / "job.json"
        path.write_text(json.dumps(spec | keys, indent=1))
        return preflight.check(path, Asked(self.layout, config=Config(), device=CPU))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "data").mkdir()
    made = Desk(tmp_path)
    made.model()
    return made


# --- Models that do not continue text ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "predicts masked words"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "bert is a bidirectional encoder"),
        ({"model_type": "roberta"}, "roberta is a bidirectional encoder"),
        ({"model_type": "electra", "architectures": ["ElectraForPreTraining"]}, "predicts masked words"),
        (
            {"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": False},
            "bert is a bidirectional encoder",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "classifies"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForTokenClassification"]}, "classifies"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForRewardModel"]}, "scores text"),
        ({"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}, "encoder-decoder"),
        ({"model_type": "pegasus", "is_encoder_decoder": True, "architectures": []}, "encoder-decoder"),
    ],
)
def test_a_model_that_does_not_continue_text_is_refused(desk: Desk, config: dict[str, Any], said: str) -> None:
    desk.model(**config)
    with pytest.raises(ModelError, match=said) as refused:
        desk.check()
    assert refused.value.message.startswith("line 2: base_model: ")
    assert "causal language models" in refused.value.hint


def test_no_model_that_transformers_maps_to_causal_ones_is_refused(tmp_path: Path) -> None:
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    model = basemodel.inspect(plain.write_base_model(tmp_path / "base"))
    for model_type, name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        config = {"model_type": model_type, "architectures": [name]}
        config |= {"is_decoder": True} if model_type in modelcheck.ENCODERS else {}
        config |= {"is_encoder_decoder": False} if model_type in modelcheck.ENCODER_DECODERS else {}
        modelcheck._check_writes(
            basemodel.BaseModelInfo(
                **{**vars(model), "model_type": model_type, "architectures": (name,), "config": config}
            )
        )


def test_encoders_are_those_that_transformers_warns_of() -> None:
    """The source of each says that it must be a decoder to be used alone."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    folder = Path(auto.__file__).parents[1]
    modules = dict(installed._module_names())
    both = set(modelcheck.ENCODER_DECODERS)
    found = set()
    for model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        name = modules.get(model_type, model_type).replace("-", "_")
        texts = [path.read_text() for path in (folder / name).glob("modeling_*.py")]
        if any("not config.is_decoder" in text and "is_decoder=True" in text for text in texts):
            found.add(model_type)
    assert found - both <= modelcheck.ENCODERS
    assert {"bert", "roberta", "electra", "xlm-roberta"} <= found


def test_an_encoder_that_was_made_a_decoder_is_taken(desk: Desk) -> None:
    desk.model(model_type="bert", architectures=["BertLMHeadModel"], is_decoder=True)
    assert desk.check().plan is not None


def test_a_model_for_embeddings_is_told(desk: Desk) -> None:
    (desk.path / "llama" / "config_sentence_transformers.json").write_text("{}")
    assert any("an embedding model" in told for told in desk.check().warnings)


# --- Adapters ---------------------------------------------------------------------------------------------------------


def _other_rank(path: Path) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 8}))


def _half(path: Path) -> None:
    plain.write_safetensors(
        path / "adapter_model.safetensors",
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": ("F32", [4, 8])},
    )


def _wide(path: Path) -> None:
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    plain.write_safetensors(
        path / "adapter_model.safetensors",
        {f"{module}.lora_A.weight": ("F32", [4, 8]), f"{module}.lora_B.weight": ("F32", [24, 4])},
    )


def _of_gpt2(path: Path) -> None:
    module = "base_model.model.transformer.h.0.attn.c_attn"
    plain.write_safetensors(
        path / "adapter_model.safetensors",
        {f"{module}.lora_A.weight": ("F32", [4, 8]), f"{module}.lora_B.weight": ("F32", [24, 4])},
    )


def _of_a_classifier(path: Path) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"task_type": "SEQ_CLS"}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_other_rank, "has rank 4, but adapter_config.json says 8"),
        (_half, "has lora_A but no lora_B"),
        (_wide, "gives 24 outputs"),
        (_of_gpt2, "it changes c_attn, which"),
        (_of_a_classifier, "task_type SEQ_CLS"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(desk: Desk, spoil: Callable[[Path], None], said: str) -> None:
    path = plain.write_adapter(desk.path / "adapter")
    assert desk.check(lora=None, adapter=str(path)).plan is not None
    spoil(path)
    with pytest.raises(ModelError, match=said) as refused:
        desk.check(lora=None, adapter=str(path))
    assert "adapter: " in refused.value.message


def test_ranks_of_single_modules_are_those_of_the_pattern(desk: Desk) -> None:
    path = plain.write_adapter(desk.path / "adapter")
    file = path / "adapter_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"r": 8, "rank_pattern": {r".*\.0\.self_attn\.q_proj": 4}})
    )
    assert desk.check(lora=None, adapter=str(path)).plan is not None


# --- What evaluations make --------------------------------------------------------------------------------------------


BEST = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}


@pytest.mark.parametrize(
    ("training", "keys", "key", "hint"),
    [
        ({"metric_for_best_model": "eval_accuracy"}, {}, "metric_for_best_model", "eval_loss"),
        ({"metric_for_best_model": "eval_mean_token_accuracy"}, {}, "metric_for_best_model", "backend: transformers"),
        ({"metric_for_best_model": "eval_los"}, {}, "metric_for_best_model", "did you mean eval_loss?"),
        ({"metric_for_best_model": "exact_match"}, {}, "metric_for_best_model", "predictions/exact_match"),
        (
            {"metric_for_best_model": "accuracy", "load_best_model_at_end": False},
            {"early_stopping_patience": 2},
            "metric_for_best_model",
            "eval_loss",
        ),
        ({"greater_is_better": True, "metric_for_best_model": "eval_loss"}, {}, "greater_is_better", "false"),
        ({"greater_is_better": False, "metric_for_best_model": "predictions/exact_match"}, {}, "greater_is_better", ""),
    ],
)
def test_a_best_model_that_nothing_can_tell_is_refused(
    desk: Desk, training: dict[str, Any], keys: dict[str, Any], key: str, hint: str
) -> None:
    with pytest.raises(HonedError) as refused:
        desk.check(eval_split=0.2, training=BEST | training, **keys)
    assert f"training.{key}: " in refused.value.message
    assert hint in refused.value.message


@pytest.mark.parametrize(
    "training",
    [
        {"metric_for_best_model": "eval_loss"},
        {"metric_for_best_model": "loss", "greater_is_better": False},
        {"metric_for_best_model": "predictions/exact_match"},
        {"metric_for_best_model": "eval_predictions/exact_match_parsable", "greater_is_better": True},
    ],
)
def test_a_best_model_that_an_evaluation_tells_is_taken(desk: Desk, training: dict[str, Any]) -> None:
    assert desk.check(eval_split=0.2, training=BEST | training).plan is not None


# --- Places and names -------------------------------------------------------------------------------------------------


def test_an_output_among_the_data_is_refused(desk: Desk) -> None:
    data = str(desk.path / "data")
    for keys in (
        {"datasets": [{"path": data}], "output_dir": f"{data}/out"},
        {"datasets": [{"path": str(desk.rows)}], "eval_datasets": [{"path": data}], "output_dir": f"{data}/a/out"},
    ):
        with pytest.raises(HonedError, match=r"output_dir: .* is in .*, which (eval_)?datasets\.0 reads"):
            desk.check(**keys)
    assert desk.check(output_dir=f"{data}/out").warnings == []  # beside the file that is read


def test_an_output_in_the_base_models_directory_is_told(desk: Desk) -> None:
    told = desk.check(output_dir=str(desk.path / "llama" / "out")).warnings
    assert any("is inside base_model" in each for each in told)


def test_a_job_that_names_itself_is_told(desk: Desk) -> None:
    told = desk.check(name="again", depends_on=["again"]).warnings
    assert any(each.startswith("depends_on: again is also this job's name") for each in told)
    told = desk.check(name="again", base_model="job:again").warnings
    assert any(each.startswith("base_model: again is also this job's name") for each in told)
