"""Runs scripts of this folder in processes of their own, which have Triton's compiler, not its interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launched_ranks import launch
from support.replica_cases import serve

#: Seconds that a script may take: those that compile dozens of kernels take half a minute on a quiet machine.
LIMIT_S = 600.0


def printed(script, folder, *arguments, from_server=True):
    """Run a script of this folder with an empty Triton cache in ``folder``; return the JSON that it prints.

    It is forked from the server, which has imported PyTorch already; else it is started as a user does.
    """
    pytest.importorskip("triton")
    path = Path(__file__).parent / script
    cache = {"TRITON_CACHE_DIR": str(folder / "cache")}
    if from_server:
        serve()
        main = "support.launched_ranks:run_script"
        (ended,) = launch(
            [folder], [path, *arguments], alone=True, main=main, variables={0: cache}, limit_s=LIMIT_S
        )  # fmt: skip
        status, output, errors = ended.status, ended.output, ended.errors
    else:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | cache
        command = [sys.executable, path, *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        status, output, errors = done.returncode, done.stdout, done.stderr
    assert status == 0, errors
    return json.loads(output)
