"""What compiles for a GPU compiles anywhere; so CI sees it without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: How often a head of each kind waits for what others send.
WAITS = {
    "one program a sample": 0,
    "split, the last to arrive adds up": 0,
    "split, the last one waits": 1,
    "tiles of a sample": 2,
    "tiles of 16 samples": 2,
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    pytest.importorskip("triton")
    script = Path(__file__).with_name("compiled_offline.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path_factory.mktemp("cubin"), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("way", WAITS)
def test_every_way_to_launch_a_head(kernels, way, heads):
    """Triton may repeat a wait for each layout that its numbers are used in: right, but several times as slow."""
    made = kernels[f"{way}, {heads} of them"]
    assert made["waits"] == heads * WAITS[way]
    assert made["REG"] <= 128 and made["STACK"] <= 64, "or two programs of 8 warps would not fit on a multiprocessor"


def test_every_way_is_compiled(kernels):
    assert kernels.keys() == {f"{way}, {heads} of them" for way in WAITS for heads in (1, 2)}
