"""Runners under the other allocators of torch: the same answers, or one error that names the allocator."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.every_runner import EVERY
from support.example_models import needs_gpu

pytestmark = needs_gpu
TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("conf", "backend"),
    [
        ("", "native"),
        ("expandable_segments:True", "native"),
        ("backend:cudaMallocAsync", "cudaMallocAsync"),
    ],
    ids=["native", "expandable_segments", "cudaMallocAsync"],
)
def test_every_runner_answers_or_names_the_allocator(conf: str, backend: str) -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, "-m", "support.every_runner"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("allocator") == backend and list(found) == list(EVERY)
    assert found["eager"] == "same"
    for name, outcome in found.items():
        names_it = "PYTORCH_CUDA_ALLOC_CONF" in outcome and (conf.partition(":")[2] in outcome or conf in outcome)
        assert outcome == "same" or (conf and names_it), f"{name}: {outcome}"
