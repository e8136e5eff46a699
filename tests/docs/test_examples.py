"""The ``Example:`` in the docstring of each front door does what it says, on the CPU."""

import doctest
from pathlib import Path

import auxhead.model
import pytest
import torch
import torchvision
from torch import nn

FRONT_DOORS = (
    "attach", "attach_exits", "accelerate", "make_runner", "train", "calibrate_network", "save_checkpoint",
    "load_checkpoint", "fuse_aux_heads", "FusedAuxHead", "EarlyExitNetwork",
)  # fmt: skip


@pytest.mark.usefixtures("without_interpreter")
@pytest.mark.filterwarnings("ignore:The classifier is no better than chance")
def test_the_example_of_every_front_door(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each sees the public names of ``auxhead.model``, torch, torchvision, nn, and a ``folder`` of its own."""
    public = {name: getattr(auxhead.model, name) for name in auxhead.model.__all__}
    runner = doctest.DocTestRunner()
    for name in FRONT_DOORS:
        text = public[name].__doc__
        scope = {**public, "torch": torch, "torchvision": torchvision, "nn": nn, "folder": tmp_path / name}
        examples = doctest.DocTestParser().get_doctest(text, scope, name, None, 0)
        assert "\n    Example:\n" in text and examples.examples, f"{name} has no example"
        torch.manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            failed = runner.run(examples).failed
        assert not failed, capsys.readouterr().out
