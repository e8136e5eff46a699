"""Commands tell wrong arguments before the missing GPU, in one line, and nothing is left behind."""

from pathlib import Path

import pytest
import torch
from support.command_line import assert_one_line_error, auxhead, tune

MODEL = "got nosuch, wants one of resnet18, resnet34, resnet50 or package.module:function"
MODULE = "no module 'no_such' in "
GZ = "x.jsonl.gz: compressed records are only read, wants a file that lines are added to: x.jsonl"
NO_GPU = "torch sees no CUDA device here"
OF_NETWORKS = ("sweep", "heads", "overlap")
TUNE = [
    *((f"{command} nosuch", f"MODEL: {MODEL}") for command in (*OF_NETWORKS, "plan")),
    *((f"{command} no_such:thing", f"MODEL: {MODULE}") for command in (*OF_NETWORKS, "plan")),
    *((f"{command} a:b --classes 10", "--classes: is that of the network which a:b ret") for command in OF_NETWORKS),
    *((f"{command} resnet18 --out x.jsonl.gz", GZ) for command in OF_NETWORKS),
    *((f"{command} resnet18 --out .", ".: is a folder, wants a file") for command in OF_NETWORKS),
    ("sweep broad --batch 8", "--batch: chooses networks, wants no value here"),
    ("heads", "MODEL: got none, wants a network; or --random 400"),
    ("heads resnet18 --random 3", "MODEL: got resnet18 with --random"),
    ("heads --random 3 --batch 1 --batch 8", "--batch: got 1, 8 with --random"),
    ("heads resnet18 --seed 4", "--seed: got 4 without --random, wants --random 400 beside it, or neither"),
    ("heads resnet18 --compiled-sample 0", "--compiled-sample: got 0 without --random"),
    ("everything --out file", "--out: got file, which is a file, wants a folder"),
    ("bench --model nosuch", f"--model: {MODEL}"),
    ("bench --model no_such:thing", f"--model: {MODULE}"),
    ("bench --model a:b --model resnet18", "--model: got 2 of them, wants a factory alone"),
    ("bench --model a:b --batch 8", "--batch: is that of the network which a:b returns"),
    ("bench --model a:b --quick", "--quick: chooses cells of the core matrix"),
    ("bench --variant poled@*", "--variant: got poled@*, wants names or globs of: eager-bare@as_is"),
    ("bench --exits layer5", "--exits: got layer5, wants names or globs of: never, layer1.0"),
    ("bench --out x.jsonl.gz", GZ),
    ("plan resnet18 --exits layer5", "--exits: got layer5, wants names or globs of: never, layer1"),
    ("plan resnet18 --trunk fast", "--trunk: got fast, wants one of as_is, cudnn, inductor, auto"),
    ("plan resnet18 --budget all", "--budget: got all, wants one of quick, standard, thorough"),
    ("profile", "CHECKPOINT, --model: got neither, wants exactly one of the two"),
    ("profile --model a:b x", "CHECKPOINT, --model: got both, wants exactly one of the two"),
    ("profile --model a:b --backbone c:d", "--backbone, --modules: belong to a checkpoint"),
    ("profile --model a", "--model: got 'a', wants package.module:function"),
    ("profile --model no_such:thing", f"--model: {MODULE}"),
    ("profile absent", "checkpoint: absent has no model.json"),
    ("profile --model a:b --out file", "--out: file is a file, wants a directory"),
    ("profile --model a:b --exits eager", "--exits: got eager, wants one of overlapped, polled, gated"),
    ("profile --model a:b --trunk x", "--trunk: got x, wants one of as_is, cudnn, inductor"),
    ("explain 512 --dtype int8", "--dtype: got int8, wants one of float16, bfloat16, float32"),
    ("explain 64x", "SHAPE: got 64x, wants sizes such as 64x56x56"),
    (f"explain {'9' * 5000}", "SHAPE: got 999"),
    ("explain 3x4x5 --pool first", "pool: got 'first' for x of shape"),
]
AUXHEAD = [
    ("demo --device cuda --data absent", "--data: absent does not exist, wants a directory"),
    ("demo --device cuda --out file", "--out: file is a file, wants a directory"),
    ("demo --device cuda --data absent --out file/in/it", "file is a file, wants a directory"),
    ("infer --device cuda absent x.png", "checkpoint: absent has no model.json"),
]
#: The same with nothing wrong but that.
NO_DEVICE = [
    *((f"{command} resnet18", f"{command}: {NO_GPU}, wants one") for command in (*OF_NETWORKS, "plan")),
    ("heads --random 3", f"heads --random: {NO_GPU}"),
    ("bench --quick", f"bench: {NO_GPU}"),
    ("explain 512", f"--device: {NO_GPU}, wants a name"),
]


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch, users_folder: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (users_folder / "file").touch()


@pytest.mark.parametrize(("arguments", "message"), [*TUNE, *NO_DEVICE, *AUXHEAD], ids=lambda value: value)
def test_what_is_wrong_is_told_before_the_missing_gpu(arguments: str, message: str, tmp_path: Path) -> None:
    run = auxhead if (arguments, message) in AUXHEAD else tune
    assert_one_line_error(run(*arguments.split()), message)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left behind"


def test_one_class_is_refused_before_anything_is_measured():
    for command in OF_NETWORKS:
        refused = tune(command, "resnet18", "--classes", 10, "--classes", 1)
        assert refused.exit_code == 2 and "--classes" in refused.stderr and "equal to 2" in refused.stderr
