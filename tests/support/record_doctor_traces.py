"""Records the traces that the doctor's findings are tested with where there is no GPU.

``PYTHONPATH=tests python -m support.record_doctor_traces OUT [NAME ...]`` writes ``NAME.json.gz`` for the programs of
``doctor_programs``, for all of them if none is named. It needs a GPU; one program needs two, and is left out elsewhere.
"""

import argparse
import gc
import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from auxhead.autotune.doctor.profile_live import profile_live
from auxhead.autotune.doctor.watching.operators import noting_captures
from auxhead.model import Runner
from torch import nn

from .doctor_programs.all_programs import PROGRAMS
from .doctor_programs.program import Program
from .slim_trace import write_slim

REQUESTS = 2


def profile_program(program: Program, file: Path) -> None:
    """Make a program and profile it as the doctor does for a TARGET."""
    gc.collect()
    torch.cuda.empty_cache()  # of the program before this one
    torch.manual_seed(0)
    with noting_captures():
        call, x = program.make()
    with torch.no_grad():
        module = call if isinstance(call, nn.Module) else None
        profile_live(lambda: call(x), file, requests=REQUESTS, module=module)
    if isinstance(call, Runner):
        call.close()


def main(out: Path, names: Sequence[str]) -> int:
    """Record the programs; returns how many could not be."""
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names or PROGRAMS:
        program = PROGRAMS[name]
        if torch.cuda.device_count() < program.devices:
            print(f"{name}: left out, GPUs that it takes: {program.devices}")
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                whole = Path(folder, "trace.json")
                profile_program(program, whole)
                size = write_slim(json.loads(whole.read_text()), out / f"{name}.json.gz")
            print(f"{name}: {size:,} bytes")
        except Exception:  # the others can be recorded all the same
            failed += 1
            print(f"{name}: failed\n{traceback.format_exc()}")
    print(f"{sum(file.stat().st_size for file in out.glob('*.json.gz')):,} bytes in all, {failed} failed")
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    sys.exit(min(main(arguments.out, arguments.names), 1))
