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


def printed(script, folder):
    """What a script prints that has Triton's compiler, and an empty cache of it in ``folder``."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    path = Path(__file__).with_name(script)
    done = subprocess.run([sys.executable, path], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return printed("compiled_offline.py", tmp_path_factory.mktemp("cubin"))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("way", WAITS)
def test_every_way_to_launch_a_head(kernels, way, heads):
    """Triton may repeat a wait for each layout that its numbers are used in: right, but several times as slow."""
    made = kernels[f"{way}, {heads} of them"]
    assert made["waits"] == heads * WAITS[way]
    assert made["REG"] <= 128 and made["STACK"] <= 64, "or two programs of 8 warps would not fit on a multiprocessor"


def test_every_way_is_compiled(kernels):
    assert kernels.keys() == {f"{way}, {heads} of them" for way in WAITS for heads in (1, 2)}


def test_what_another_process_compiled_is_found(tmp_path):
    """Two configurations ahead, one of them begun twice; a third one is compiled where it is launched."""
    assert printed("compile_ahead_offline.py", tmp_path) == [0, 2, 2, 2, 3]
