"""The zoo on a GPU: a small network of one's own through the command, in processes of its own."""

from pathlib import Path

import pytest
import torch
from auxhead.autotune.records.record import read_records
from auxhead.autotune.records.zoo import AGAIN, COMPILED, DEFAULT
from auxhead.autotune.zoo.run import EAGER_VARIANTS, VARIANTS
from auxhead.model.basics.energy import energy_counter
from support.command_line import tune
from support.example_models import needs_gpu

pytestmark = needs_gpu

FACTORY = """
import torch
from torch import nn
from auxhead.model import EarlyExitNetwork, FusedAuxHead

def small():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    backbone = nn.Sequential(*layers, nn.Linear(32, 5)).cuda()
    example = torch.randn(4, 3, 16, 16, device="cuda")
    return EarlyExitNetwork(backbone, {"1": FusedAuxHead(16, 5)}, 0.9).cuda().eval(), example
"""


def test_a_network_of_ones_own_is_measured_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "factory_of_the_zoo.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    done = tune("zoo", "factory_of_the_zoo:small", "--out", "zoo.jsonl")
    assert done.exit_code == 0, done.output
    records = {one.variant: one for one in read_records(tmp_path / "zoo.jsonl")}
    assert {*records} == {*VARIANTS, *EAGER_VARIANTS, AGAIN} and not [
        one.error for one in records.values() if one.error
    ]
    for name in (DEFAULT, COMPILED, AGAIN):
        assert records[name].measured["first_answer_s"][0] > 0.0
    if energy_counter(torch.device("cuda", torch.cuda.current_device())) is not None:
        assert all(0.0 < records[name].measured["joules"] < 10.0 for name in (*VARIANTS, *EAGER_VARIANTS))
    assert "measured on" in records[AGAIN].notes[0], "the plan of the first process is found"
