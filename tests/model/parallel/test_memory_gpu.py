"""Networks of 1.6 times what each of two GPUs has room for: they run, and neither has more than its part, ever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import beyond_a_gpu
from support.beyond_a_gpu import CAP, MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
#: Of graphs and kernels, outside of PyTorch's memory, beyond those of a smaller network.
MORE = 64 * MIB


@pytest.mark.parametrize("kind", ["wide", "residual"])
@pytest.mark.parametrize("way, ends", [("overlapped", "auto"), ("polled", "middle"), ("pipelined", "auto")])
def test_a_network_that_no_gpu_has_room_for(tmp_path, kind, way, ends):
    pytest.importorskip("pynvml", reason="what the driver counts")
    ranks = 2 if way == "pipelined" else 1
    command = [
        sys.executable, *(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] * (ranks - 1)),
        str(Path(beyond_a_gpu.__file__)), kind, way, ends,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "PYTHONPATH": ":".join(entry for entry in sys.path if entry)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    each = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    (label, confidence, probs, exit_index), wanted, held, *_ = each[0]
    assert held > 1.55 * CAP and wanted[3].unique().numel() > 2
    assert torch.equal(label, wanted[0]) and torch.equal(exit_index, wanted[3])
    torch.testing.assert_close(confidence, wanted[1], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(probs, wanted[2], rtol=1e-3, atol=1e-4)
    by_pytorch, by_driver = (sum((one[place] for one in each), []) for place in (3, 4))
    assert max(by_pytorch) < CAP and sum(by_pytorch) < 1.15 * held
    assert min(by_driver) > 0.4 * held, "the driver tells nothing of processes"
    assert max(by_driver) < CAP + MORE, [one / MIB for one in by_driver]
