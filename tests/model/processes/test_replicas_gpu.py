"""Two processes of torchrun with a GPU each: they answer, calibrate and train as one does, and none outlives another.

The same commands as in ``test_replicas``, started as users start them.
"""

import json
import time
from pathlib import Path

import pytest
import torch
from support.launched_ranks import LIMIT_S, command
from support.replica_cases import CALIBRATE, INFER, TRAIN, answers_of, copied, left_over, on, write_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("without_interpreter"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
DEVICE = "cuda"
#: More images than calibration has in a batch, so that both processes have one.
PER_CLASS = 150
RANKS = 2


@pytest.fixture(scope="module")
def case(tmp_path_factory, without_interpreter):
    return write_case(tmp_path_factory.mktemp("replicas") / "case", per_class=PER_CLASS)


def done(folder, arguments, ranks=None):
    """What a command says that comes to its end."""
    ran = command(folder, on(DEVICE, arguments), ranks=ranks)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_answers_for_files(case):
    """The last batch has fewer images than the others, and its number is odd: one process has none in the last turn."""
    options = [*INFER, "--batch", 20, "--json"]
    for name, ranks in (("one", None), ("two", RANKS)):
        said = done(case, [*options, f"{name}.jsonl"], ranks)
        assert said.count("Saved in ") == 1 and said.startswith(f"{2 * PER_CLASS} images in ")
    one, two = answers_of(case / "one.jsonl"), answers_of(case / "two.jsonl")
    for name in ("image", "class", "class_index", "exit", "exit_index"):
        assert [line[name] for line in two] == [line[name] for line in one], name
    assert [line["confidence"] for line in two] == pytest.approx([line["confidence"] for line in one], rel=1e-3)
    assert {line["exit_index"] for line in two} == {0, 1} and not left_over(case)


def test_a_calibration(case):
    for name, ranks in (("one", None), ("two", RANKS)):
        said = done(case, [*CALIBRATE, "--max-accuracy-drop", 0.2, "--out", name], ranks)
        assert said.count(f"Saved in {name}") == 1
    one, two = (json.loads((case / name / "report.json").read_text()) for name in ("one", "two"))
    assert two["samples"] == one["samples"] and two["accuracy"] == one["accuracy"]
    for of_two, of_one in zip(two["exits"], one["exits"], strict=True):
        for name in ("threshold", "temperature", "share"):
            assert of_two[name] == of_one[name], (of_one["name"], name)
    rules = [json.loads((case / name / "model.json").read_text())["heads"] for name in ("one", "two")]
    assert rules[0] == rules[1] and not left_over(case)


def test_a_training(case):
    """Rank 0 writes, once, a checkpoint that tells horizontal stripes from vertical ones."""
    said = done(case, [*TRAIN, "--epochs", 3, "--batch-size", 16, "--out", "trained"], RANKS)
    assert said.count("Saved in trained") == 1
    assert (case / "trained" / "model.json").exists() and not left_over(case)
    done(case, [INFER[0], "trained", *INFER[2:], "--batch", 64, "--json", "trained.jsonl"])
    found = answers_of(case / "trained.jsonl")
    right = [Path(line["image"]).parent.name == line["class"] for line in found]
    assert len(right) == 2 * PER_CLASS and sum(right) > 0.8 * len(right)


@pytest.mark.parametrize(
    "fault, arguments",
    [
        ("dies", [*INFER, "--json", "answers.jsonl"]),
        ("dies_in_training", [*TRAIN, "--epochs", 2, "--batch-size", 4]),
    ],
    ids=["infer", "train"],
)
def test_a_process_that_dies(case, fault, arguments, tmp_path):
    """While the other waits for a message of it, or on its device for a gradient."""
    folder = copied(case, tmp_path.name)
    ran = command(folder, [fault, *on(DEVICE, arguments)], ranks=RANKS, module="support.rank_faults")
    ended_after = time.time() - (folder / "died").stat().st_mtime
    assert ran.returncode != 0 and ended_after < LIMIT_S
    assert "Error: rank 1 of 2 has died or hangs" in ran.stderr, ran.stderr
    assert not left_over(folder) and not (folder / "answers.jsonl").exists()
    assert not (folder / "auxhead-train" / "model.json").exists()
