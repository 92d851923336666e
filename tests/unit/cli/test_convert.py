"""Settings of other tools as job files: what honed supports can be trained, and nothing is left out in silence."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from honed.check import preflight
from honed.check.checklist import Asked
from honed.cli import convert, foreign, launch
from honed.spec import jobfile, problem
from honed.spec.config import Config
from honed.system.device import Device
from honed.system.error import HonedError, SpecError, UsageError
from honed.system.layout import Layout
from zoo import plain, settings
from zoo.settings import FILES

CPU = Device("cpu", "a processor", total_bytes=24 * 2**30, free_bytes=20 * 2**30)
#: A file of OpenAI names a model and data that only OpenAI has.
TO_FILL_IN = {"openai_hyperparameters.json": {"base_model", "datasets.0.path"}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus beside the model and the data that it names."""
    made = settings.write(tmp_path_factory.mktemp("convert"))
    plain.write_base_model(made / "model")
    return made


@pytest.mark.parametrize("name", FILES)
def test_a_converted_file_passes_the_check_after_at_most_two_of_its_corrections(
    name: str, place: Path, tmp_path: Path
) -> None:
    made = convert.converted(place / name)
    assert made.missing.keys() == TO_FILL_IN.get(name, set())
    if made.missing:
        return
    layout = Layout(tmp_path / "root")
    layout.jobs_dir.mkdir(parents=True)
    job = tmp_path / "job.yaml"
    job.write_text(convert.rendered(made, place / name))
    for _ in range(2):
        try:
            preflight.check(job, Asked(layout, config=Config(), device=CPU))
        except HonedError as error:
            assert error.fix, error
            job.write_text(convert.yaml_of(problem.mended(made.data, error.fix)))
    preflight.check(job, Asked(layout, config=Config(), device=CPU))


#: Keys that say what would be so without them.
SAID_ANYWAY = {
    "finetuning_type": "lora",  # LLaMA-Factory's default
    "adapter": None,  # lora_r and load_in_4bit say so too
    "use_peft": True,
    "num_epochs": 1,  # axolotl's defaults
    "micro_batch_size": 1,
    "lr_scheduler": "cosine",
    "load_in_4bit": True,  # so does adapter: qlora
    "dtype": "bfloat16",  # so does bf16
    "bf16": True,
    "dataset_dir": "data",
    "datasets": None,  # without it there is no job
}


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith((".yml", ".yaml", ".json"))])
def test_no_key_is_left_out_in_silence(name: str, place: Path) -> None:
    """A key is named in a comment, or the job is another one without it."""
    data = yaml.safe_load((place / name).read_text())
    whole = convert.converted(place / name)
    comments = [line for line in convert.rendered(whole, place / name).splitlines() if line.startswith("#")]
    silent = []
    for key, value in data.items():
        if any(key in line for line in comments) or SAID_ANYWAY.get(key, ...) in (value, None):
            continue
        rest = place / f"rest-{name}"
        rest.write_text(json.dumps({other: each for other, each in data.items() if other != key}))
        try:
            if convert.converted(rest, whole.tool).data == whole.data:
                silent.append(key)
        except HonedError:
            pass  # required
    assert silent == []


def test_a_converted_file_says_the_same_as_the_original(place: Path) -> None:
    made = jobfile.validate(convert.converted(place / "axolotl_lora.yml").data)
    assert made.lora is not None
    assert (made.lora.r, made.lora.lora_alpha, made.lora.lora_dropout) == (4, 8, 0.1)
    assert (made.training.max_length, made.training.per_device_train_batch_size) == (256, 1)
    assert (made.training.optim, made.training.eval_steps, made.quantization) == ("adamw_bnb_8bit", 0.25, "8bit")
    made = jobfile.validate(convert.converted(place / "axolotl_full.yaml").data)
    assert (made.training.gradient_accumulation_steps, made.lora) == (4, None)  # batch_size 8 of micro_batch_size 2
    made = jobfile.validate(convert.converted(place / "llamafactory_mix.json").data)
    assert [each.fraction for each in made.datasets] == [0.7, 0.3]
    assert made.lora is not None
    assert (made.lora.r, made.lora.lora_alpha, made.lora.target_modules) == (8, 16, ["q_proj", "v_proj"])
    made = jobfile.validate(convert.converted(place / "unsloth_alpaca.ipynb").data)
    assert (made.quantization, made.datasets[0].max_rows, made.training.seed) == ("4bit", 40, 3407)


def test_check_names_convert_for_a_file_of_another_tool(place: Path) -> None:
    for name, tool in (("axolotl_qlora.yml", "axolotl"), ("llamafactory_lora.yaml", "llamafactory")):
        for verb in ("check", "submit", "plan"):
            done = honectl(place, verb, str(place / name))
            assert f"settings of {tool}: `honectl convert {place / name}`" in done, verb
    (place / "train.sh").write_text("trl sft --model_name_or_path model\n")
    assert "honectl convert" in honectl(place, "check", str(place / "train.sh"))
    ours = place / "ours.yaml"
    ours.write_text("base_model: /a\ndatasets: [{path: /b.jsonl}]\nlearning_rat: 1\n")
    assert "honectl convert" not in honectl(place, "check", str(ours))


def honectl(place: Path, *words: str) -> str:
    """Return all that honectl prints, in one line."""
    command = [sys.executable, "-m", "honed.cli.honectl", "--root", str(place / "root"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "1000"})
    return " ".join((done.stdout + done.stderr).split())


def words_of(value: Any) -> list[str]:
    return (
        [str(each) for each in value]
        if isinstance(value, list)
        else [json.dumps(value) if isinstance(value, dict) else str(value)]
    )


@pytest.mark.parametrize(
    "name", ["trl_minimal.yaml", "trl_peft.yaml", "llamafactory_lora.yaml", "llamafactory_full.yaml"]
)
def test_a_command_line_says_the_same_as_a_file_of_its_settings(name: str, place: Path) -> None:
    keys = yaml.safe_load((place / name).read_text())
    words = ["CUDA_VISIBLE_DEVICES=0", *("trl sft" if "trl" in name else "llamafactory-cli train").split()]
    for key, value in keys.items():
        words += (
            [f"--{key}"] if value is True else [f"--no_{key}"] if value is False else [f"--{key}", *words_of(value)]
        )
    script = place / f"{name}.sh"
    script.write_text("#!/bin/bash\nset -e\n" + " \\\n  ".join(map(shlex.quote, words)) + " 2>&1 | tee log\n")
    assert convert.converted(script).data == convert.converted(place / name).data


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (
            "axolotl train axolotl_lora.yml --micro-batch-size 4 --launcher accelerate",
            {"training.per_device_train_batch_size": 4},
        ),
        (
            "accelerate launch --num_processes 1 -m axolotl.cli.train axolotl_lora.yml --learning-rate=1e-5",
            {"training.learning_rate": 1e-5},
        ),
        (
            "cd . && llamafactory-cli train llamafactory_lora.yaml learning_rate=3e-6 cutoff_len=99 >log 2>&1",
            {"training.learning_rate": 3e-6, "training.max_length": 99},
        ),
        (
            "python -m torch.distributed.run trl/scripts/sft.py --config trl_minimal.yaml --learning_rate 7e-6",
            {"training.learning_rate": 7e-6},
        ),
        (
            'M=./model; D=rows\ntrl sft --model $M --dataset "${D}.jsonl" --use_peft --lora_r ${R:-8} # so',
            {"lora.r": 8, "training.learning_rate": None},
        ),
    ],
)
def test_what_a_command_line_says_overrides_the_file_that_it_names(
    text: str, keys: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    made = convert.converted(text)
    assert not made.missing
    assert made.data["base_model"] == str(place / "model")
    assert jobfile.validate(made.data)
    for key, value in keys.items():
        assert problem.at(made.data, problem.as_path(key)) == value
    assert "Converted from the command line" in convert.rendered(made, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trl dpo --model_name_or_path a/b", "trl dpo: DPO is not supported yet"),
        ("python train.py --lr 1", "it starts train.py"),
        ("echo trl", "no command in it"),
        ("axolotl train", "without its settings file"),
        ("axolotl train absent.yml", "absent.yml: no such file"),
    ],
)
def test_a_command_line_that_trains_nothing_here_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises((SpecError, UsageError)) as refused:
        convert.converted(text)
    assert words in refused.value.message
    assert refused.value.hint or "not supported" in words


def test_a_value_that_only_the_shell_knows_is_named_and_nothing_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        f"trl sft --model_name_or_path a/b --dataset_name c/d --seed $(touch {tmp_path}/ran) --max_steps $N\n"
    )
    made = convert.converted(script)
    assert "the shell computes it ($N)" in made.lost["max_steps"]
    assert "max_steps" not in made.data.get("training", {})
    assert "seed" in made.lost
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("before", "notes"),
    [
        ("deepspeed --num_gpus 4", {"--num_gpus": "{gpus: 4}"}),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3", {"CUDA_VISIBLE_DEVICES": "{gpus: 4}"}),
        ("export CUDA_VISIBLE_DEVICES=0,1\n", {"CUDA_VISIBLE_DEVICES": "{gpus: 2}"}),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 1 -m", {}),
        ("FORCE_TORCHRUN=1 NNODES=2", {"NNODES": "{nodes: 2}", "FORCE_TORCHRUN": "{gpus: N}"}),
        ("torchrun --nnodes 2 --nproc-per-node=gpu -m", {"--nnodes": "{nodes: 2}", "--nproc_per_node": "{gpus: N}"}),
        ("torchrun --nproc_per_node $SLURM_GPUS -m", {"--nproc_per_node": "{gpus: N}"}),
        (
            "accelerate launch --num_processes 8 --num_machines 2 -m",
            {"--num_processes": "{gpus: 4}", "--num_machines": "{nodes: 2}"},
        ),
        ("CUDA_VISIBLE_DEVICES=0 accelerate launch --num_processes 1 -m", {}),
        ("accelerate launch --config_file it.yaml -m", {"--config_file": "{gpus: N}"}),
    ],
)
def test_the_number_of_devices_and_machines_is_never_dropped_in_silence(before: str, notes: dict[str, str]) -> None:
    started = launch.find(f"{before} trl sft --model_name_or_path a/b --dataset_name c/d", Path("/"), "it")
    assert [key for key, _ in started.notes] == [*notes]
    assert all(f"resources: {notes[key]}" in why for key, why in started.notes)


@pytest.mark.parametrize(
    "text",
    [
        "cat <<< hello\n{}",
        "x=$((1<<3))\n{}",
        "# see <<EOF, don't\n{}",
        'ARGS="--model_name_or_path a/b --max_length 8"; trl sft $ARGS',
        'export M=a/b L=8\ntrl sft --model_name_or_path "$M" \\\n  --max_length $L  # so\n',
        'N=\'it\'\'s #1\'; cd "$(dirname "$0")" && srun -n 1 {} 2>&1 | tee "$N.log"',
        'ARGS="--model_name_or_path a/b"; ARGS+=" --max_length 8"; trl sft $ARGS',
        "A=a; B=$A/b; trl sft --model_name_or_path ${{B}} --max_length=${{L:-8}}",
    ],
)
def test_an_ordinary_script_is_read_as_the_shell_would(text: str) -> None:
    started = launch.find(text.format("trl sft --model_name_or_path a/b --max_length 8"), Path("/"), "it")
    assert (started.data, started.notes) == ({"model_name_or_path": "a/b", "max_length": 8}, [])


@pytest.mark.parametrize(
    "text",
    [
        'M=a\n[ -n "$1" ] && M=b\n{} "$M"',
        "read M\n{} $M",
        "M=a\nunset M\n{} $M",
        "M+=a\n{} $M",
        "M=a\n{} '$M'",
        "X='eval $X'; eval $X; {} $M",
    ],
)
def test_a_value_that_depends_on_what_runs_is_named(text: str) -> None:
    started = launch.find(text.format("trl sft --model_name_or_path"), Path("/"), "it")
    assert started.data == {}
    assert started.notes == [("model_name_or_path", "the shell computes it ($M): write its value")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("M=a\nif [ $1 ]; then M=b; fi\n{}", "line 2 has a branch"),
        ("M=a\ncase $1 in x) M=b;; esac\n{}", "line 2 has a branch"),
        ("for M in a b; do {}; done", "line 1 has a loop"),
        ("while true; do {}; done", "line 1 has a loop"),
        ("set -e\nmain() {{ {}; }}; main", "line 2 has a function or a subshell"),
        ("{{ {}; }} | tee log", "line 1 has a function or a group of commands"),
        ("\n\nARGS=( --seed 1 )\n{}", "line 3 has an array"),
        ("cat <<EOF >it.yaml\na\nEOF\n{}", "line 1 has a here-document"),
        ("echo 'it is\n{}", "line 1 has a quote that never ends"),
        ("{} \\ \n  --seed 1", "line 1 has a space after the backslash"),
        ("srun bash -c '{}'", "what srun is given as one word is not read"),
    ],
)
def test_a_script_that_has_to_be_run_to_be_known_is_rejected_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(SpecError) as rejected:
        launch.find(text.format("trl sft --model_name_or_path a/b"), Path("/"), "it")
    assert words in rejected.value.message
    assert "in quotes" in rejected.value.hint


def test_the_arguments_of_a_script_are_named(tmp_path: Path) -> None:
    started = launch.find('trl sft --model_name_or_path a/b --seed 1 "$@"', tmp_path, "it")
    assert started.data == {"model_name_or_path": "a/b", "seed": 1}
    assert started.notes == [("$@", "the shell computes it: write what it stands for")]


def test_a_command_line_without_quotes_is_told_of_them(place: Path) -> None:
    assert "in quotes: honectl convert 'trl sft" in honectl(place, "convert", "trl", "sft", "--model_name_or_path", "a")


def test_a_typo_is_taken_as_the_nearest_key_and_said(place: Path) -> None:
    right, typed = (convert.converted(place / name) for name in ("axolotl_lora.yml", "typo_axolotl.yml"))
    assert typed.data == right.data
    assert typed.notes["lora_aplha"] == "taken as lora.lora_alpha: 8"


@pytest.mark.parametrize(
    ("keys", "tool", "word"),
    [
        ({"base_model": "a/b", "rl": "dpo", "datasets": [{"path": "c/d"}], "sequence_len": 9}, "axolotl", "DPO"),
        ({"base_model": "a/b", "datasets": [{"path": "c/d", "type": "chatml.argilla"}]}, "axolotl", "preference"),
        ({"model_name_or_path": "a/b", "stage": "rm", "dataset": "facts"}, "llamafactory", "reward"),
        ({"model_name_or_path": "a/b", "stage": "sft", "dataset": "preferences"}, "llamafactory", "preferences"),
        ({"model": "a/b", "training_file": "x.jsonl", "method": {"type": "dpo"}}, "openai", "DPO"),
    ],
    ids=str,
)
def test_training_of_another_kind_is_refused_rather_than_turned_into_this_one(
    keys: dict[str, Any], tool: str, word: str, place: Path
) -> None:
    path = place / "other.yaml"
    path.write_text(json.dumps(keys))
    with pytest.raises(SpecError) as refused:
        convert.converted(path, tool)
    assert word in refused.value.shown


@pytest.mark.parametrize(
    "keys",
    [
        {"training_file": None, "model": "a/b", "hyperparameters": 5, "integrations": 3},
        {"training_file": 7, "model": [], "method": {"type": "supervised", "supervised": [1]}, "suffix": {"a": 1}},
        {"model_name_or_path": 1, "stage": "sft", "dataset": [{"x": 1}], "interleave_probs": {}, "lora_rank": "x"},
        {"base_model": None, "sequence_len": [], "micro_batch_size": 0, "batch_size": 4, "datasets": [5, {"path": 1}]},
        {"model_name_or_path": "a/b", "dataset_name": 5, "use_peft": "maybe", "max_length": True},
    ],
    ids=str,
)
def test_values_of_the_wrong_type_are_named_and_never_a_traceback(keys: dict[str, Any], place: Path) -> None:
    path = place / "odd.yaml"
    path.write_text(json.dumps(keys))
    made = convert.converted(path)
    jobfile.loads(convert.rendered(made, path).encode(), ".yaml")
    assert made.missing


def test_a_data_set_of_the_hub_and_an_unknown_one(place: Path) -> None:
    path = place / "sets.yaml"
    path.write_text("model_name_or_path: a/b\nstage: sft\ndataset: hub, nowhere\n")
    made = convert.converted(path)
    assert made.data["datasets"] == [
        {"path": "org/rows", "name": "main", "split": "train", "max_rows": 5},
        {"path": "/path/to/nowhere"},
    ]
    assert made.missing.keys() == {"datasets.1.path"}


def test_a_script_is_read_and_never_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "open(__file__ + '.ran', 'w')\nfrom unsloth import FastLanguageModel\n"
        "model, tokenizer = FastLanguageModel.from_pretrained('a/b', token=open('/etc/shadow').read())\n"
    )
    made = convert.converted(script)
    assert not script.with_name("train.py.ran").exists()
    assert (made.data["base_model"], made.data["quantization"]) == ("a/b", "4bit")
    assert "train_dataset" in made.lost


@pytest.mark.parametrize("text", ["", "[1]", "a: b: c", "colour: red\nsize: 3\n"])
def test_a_file_of_no_known_tool_is_refused_in_words(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as refused:
        foreign.read(path)
    assert str(path) in refused.value.shown


def test_the_verb_writes_a_new_file_and_tells_what_is_to_be_filled_in(place: Path) -> None:
    command = [sys.executable, "-m", "honed.cli.honectl", "convert", "openai_hyperparameters.json", "-o", "job.yaml"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "base_model: write the path" in done.stderr
    assert jobfile.load(place / "job.yaml").training.per_device_train_batch_size == 4
    again = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert again.returncode != 0
    assert "exists already" in again.stderr
