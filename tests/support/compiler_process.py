"""Runs scripts of this folder in processes of their own, which have Triton's compiler, not its interpreter."""

import json
from pathlib import Path

from support.launched_ranks import launch
from support.replica_cases import serve

#: Seconds that a script may take: those that compile dozens of kernels take half a minute on a quiet machine.
LIMIT_S = 600.0


def printed(script, folder, *arguments):
    """Run a script of this folder with an empty Triton cache in ``folder``; return the JSON that it prints.

    It is forked from the server, which has imported PyTorch already.
    """
    serve()
    variables = {0: {"TRITON_CACHE_DIR": str(folder / "cache")}}
    given, main = [Path(__file__).parent / script, *arguments], "support.launched_ranks:run_script"
    (ended,) = launch([folder], given, alone=True, main=main, variables=variables, limit_s=LIMIT_S)
    assert ended.status == 0, ended.errors
    return json.loads(ended.output)
