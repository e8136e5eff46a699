"""Mutation run over what orders work and keeps memory: ``python tests/mutants/waits.py [PART OF A NAME ...]``.

``waits.toml`` lists waits, records, joins, kept references, barriers and resets, each with the change that takes it
away and the tests that have to notice. Mutants of the simulation run on the CPU, once: it finds every race by the order
of the work. Mutants of the GPU run up to 20 times, with the delays that their tests put on the streams; without a GPU
they are left out, and the run says so. What is "late" in a kernel comes after ``late_warps``. What is listed as
equivalent, with the reason, is not made. The run fails if a mutant survives, if tests fail without the change, or if a
change of the list fits the code no more. It needs Python 3.11 or newer.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tomllib
import torch
from repository_copy import ROOT, copy_of_repository

HERE = Path(__file__).resolve().parent
RUNS = 20
#: Seconds of one run; where a barrier is missing, programs may wait for good.
LIMIT_S = {"simulation": 600.0, "gpu": 120.0}
#: Processes at a time: kernels of several share a GPU, and delays stay as long as they are.
JOBS = {"simulation": os.cpu_count() or 1, "gpu": 8}


def mutated(mutant: dict[str, Any]) -> str:
    """Return the source of a mutant's file with its change."""
    source = (ROOT / mutant["file"]).read_text()
    places = source.count(mutant["old"])
    if places != mutant.get("places", 1):
        raise SystemExit(f"{mutant['name']}: {mutant['file']} has its code {places} times; mend waits.toml")
    return source.replace(mutant["old"], mutant.get("new", ""))


def delay(copy: Path, mutant: dict[str, Any]) -> None:
    """Let what is late in a mutant be late in a copy of the repository."""
    for file, line in mutant.get("late", ()):
        source = (copy / file).read_text()
        found = re.findall(rf"^( *){re.escape(line)}", source, re.MULTILINE)
        if len(found) != 1:
            raise SystemExit(f"{mutant['name']}: {file} has {line!r} {len(found)} times; mend waits.toml")
        source = source.replace(f"{found[0]}{line}", f"{found[0]}late_warps()\n{found[0]}{line}")
        imports = "import triton.language as tl\n"
        (copy / file).write_text(source.replace(imports, f"{imports}from .late_warps import late_warps\n", 1))
        shutil.copy(HERE / "late_warps.py", (copy / file).parent)


def passes(mutant: dict[str, Any], copy: Path) -> bool:
    """Run a mutant's tests in a copy of the repository."""
    simulated = {} if mutant["on"] == "gpu" else {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    environment = {**os.environ, **simulated, "PYTHONPATH": str(copy / "build")}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant["tests"]]
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=LIMIT_S[mutant["on"]])
    except subprocess.TimeoutExpired:
        return False
    said = done.stdout.decode()
    if done.returncode not in (0, 1):  # no test was found, say
        raise SystemExit(f"{mutant['name']}: pytest says {done.returncode}:\n{said[-2000:]}")
    if done.returncode == 1 and (says := mutant.get("says", "Race" if simulated else "")) not in said:
        raise SystemExit(f"{mutant['name']}: wants {says!r}, got\n{said[-2000:]}")
    return done.returncode == 0


def made(mutant: dict[str, Any], original: Path, folder: Path) -> Path:
    """Make a copy of the repository in which a mutant's delays are, and not yet its change."""
    copy = folder / "copy"
    shutil.copytree(original, copy, ignore=lambda *_: ["build"])
    (copy / "build" / "auxhead").mkdir(parents=True)
    for package in ("kernels", "model", "autotune", "plots"):
        (copy / "build" / "auxhead" / package).symlink_to(copy / package)
    delay(copy, mutant)
    return copy


def fails_unchanged(mutant: dict[str, Any], original: Path) -> bool:
    """Return whether a mutant's tests fail without its change, and would notice nothing."""
    with tempfile.TemporaryDirectory() as folder:
        return not passes(mutant, made(mutant, original, Path(folder)))


def survives(mutant: dict[str, Any], original: Path) -> bool:
    """Make a mutant in a copy of its own, and return whether its tests pass, as often as they are run."""
    with tempfile.TemporaryDirectory() as folder:
        copy = made(mutant, original, Path(folder))
        file = copy / mutant["file"]
        file.write_text(file.read_text().replace(mutant["old"], mutant.get("new", "")))
        return all(passes(mutant, copy) for _ in range(RUNS if mutant["on"] == "gpu" else 1))


def main() -> int:
    """Make the mutants whose names contain an argument, or all."""
    listed = tomllib.loads((HERE / "waits.toml").read_text())["mutant"]
    chosen = [one for one in listed if not sys.argv[1:] or any(part in one["name"] for part in sys.argv[1:])]
    for mutant in chosen:
        mutated(mutant)
    here = [one for one in chosen if "equivalent" not in one and (one["on"] != "gpu" or torch.cuda.is_available())]
    left_out = sum("equivalent" not in one for one in chosen) - len(here)
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        original = Path(folder) / "copy"
        copy_of_repository(original)
        for place, jobs in JOBS.items():
            mutants = [one for one in here if one["on"] == place]
            unchanged = {str((one["tests"], one.get("late"))): one for one in mutants}
            began = time.monotonic()
            with ThreadPoolExecutor(jobs) as pool:
                # In the simulation a mutant's failure is of a kind that says that it was noticed.
                controls = unchanged.values() if place == "gpu" else ()
                failing = {one["name"]: pool.submit(fails_unchanged, one, original) for one in controls}
                alive = {one["name"]: pool.submit(survives, one, original) for one in mutants}
                for name, future in alive.items():
                    verdict = "SURVIVED" if future.result() else "caught"
                    print(f"{verdict:9} {name} ({place}, {time.monotonic() - began:.0f} s)", flush=True)
                    wrong += [name] * future.result()
                for name in (name for name, future in failing.items() if future.result()):
                    print(f"FAILING   the tests of {name!r}, without the change", flush=True)
                    wrong.append(name)
    equivalent = sum("equivalent" in one for one in chosen)
    print(f"{len(here)} made, {len(set(wrong))} not caught or not tested; {equivalent} listed as equivalent.")
    if left_out:
        print(f"{left_out} need a GPU, and were not made.")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
