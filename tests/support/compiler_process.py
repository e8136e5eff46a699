"""Runs scripts of this folder in processes of their own, which have Triton's compiler, not its interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def printed(script, folder, *arguments):
    """Run a script of this folder with an empty Triton cache in ``folder``; return the JSON that it prints."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    path = Path(__file__).parent / script
    done = subprocess.run(
        [sys.executable, path, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
