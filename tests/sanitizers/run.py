"""Sanitizers over kernels and eager passes, on a GPU: ``python tests/sanitizers/run.py``.

Each tool first has to find a fault that was planted for it, then nothing in our own work: compute-sanitizer's memcheck,
initcheck and synccheck over all kernels (``launches.py``), and PyTorch's CUDA sanitizer over eager requests
(``streams.py``). The run fails, with 1, if a fault passes, if one is found that was not planted, or if a tool is
missing; without a GPU it ends with 2. racecheck is left out: where threads of Triton's kernels hold the same number
they write it to the same place of shared memory, which it takes for a race.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).resolve().parent
LIMIT_S = 200.0
#: Processes that share the kernels, for each tool.
PARTS = 4
#: Of the output of a command that fails, shown.
LAST_LINES = 12
KERNELS = (
    "exit_kernel", "pack_kernel", "gather_kernel", "collect_kernel", "max_pool_kernel", "depthwise_kernel",
    "convolution_kernel", "attention_kernel",
)  # fmt: skip
COMPUTE_SANITIZER = "compute-sanitizer"
#: Its exit code if the program has worked, and it has something to report.
FOUND = 86
#: Where it is if PATH has it not.
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
#: Uncached, each tensor is an allocation of its own, and no pool's.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


class Finished(NamedTuple):
    """What a process has left."""

    code: int | None
    """None if it took longer than ``LIMIT_S``."""
    output: str

    def end(self) -> str:
        """How it ended, in a line, and its last lines."""
        how = f"longer than {LIMIT_S:.0f} s" if self.code is None else f"exit code {self.code}"
        lines = [line for line in self.output.splitlines() if line.strip() and not line.startswith("===")]
        says = next((line for line in lines if line.startswith("failed: ")), (lines or ["no output"])[-1])
        last = "\n".join(self.output.splitlines()[-LAST_LINES:])
        return f"{how}; {shortened(says)}\n{textwrap.indent(last, ' ' * 10)}"


class Check(NamedTuple):
    """A tool over some work."""

    name: str
    planted: Sequence[str]
    """The command that has a fault."""
    commands: Sequence[Sequence[str]]
    """Those that must have none; run at the same time."""
    environment: dict[str, str]
    finds: str
    """Pattern of the report of the planted fault."""
    closes: str
    """Pattern that is in the output of a command that has done its work, and of its tool."""
    reports: Callable[[str], list[str]]
    """Returns the tool's reports in an output, those of others' kernels excepted."""

    def problems(self, planted: Finished, done: Sequence[Finished]) -> Iterator[str]:
        """Say what is wrong with the command with the planted fault, and with those without one."""
        if not any(re.search(self.finds, one) for read in (tool_reports, race_reports) for one in read(planted.output)):
            yield f"PLANTED FAULT NOT CAUGHT, the tool sees nothing here: {planted.end()}"
        if reports := [one for part in done for one in self.reports(part.output)]:
            yield f"FOUND {len(reports)}, the first: {shortened(reports[0])}"
        for part in done:
            if part.code not in (0, FOUND):
                yield f"FAILED: {part.end()}"
            elif not re.search(self.closes, part.output, re.S):
                yield f"NOT ENDED: {part.end()}"


def finished(environment: dict[str, str], command: Sequence[str]) -> Finished:
    """Run a command with all its children, which end with it."""
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables = {**inherited, "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": path}
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        output = process.communicate(timeout=LIMIT_S)[0]
        return Finished(process.returncode, output)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return Finished(None, process.communicate()[0])


def tool_reports(output: str) -> list[str]:
    """Return compute-sanitizer's reports: its lines but for those that say nothing of faults, joined by report."""
    blocks: list[str] = []
    for line in output.splitlines():
        says_nothing = re.match(r"=+ (COMPUTE-SANITIZER|\w+ SUMMARY:)", line) and "not printed" not in line
        if not line.startswith("========= ") or not line.strip("= ") or says_nothing:
            continue
        text = line.lstrip("=")
        if text.startswith("  ") and blocks:
            blocks[-1] += "; " + text.strip()
        else:
            blocks.append(text.strip())
    return blocks


def our_reports(output: str) -> list[str]:
    """Return those reports of compute-sanitizer that name no kernel, or one of ours."""
    reports = tool_reports(output)
    return [one for one in reports if not re.search(r"\bat [^;]*\+0x", one) or any(name in one for name in KERNELS)]


def race_reports(output: str) -> list[str]:
    """Return the reports of PyTorch's sanitizer, without stack traces, a line each."""
    traced = r"(CSAN detected a possible data race.*?)With stack trace.*?(Previous access.*?)With stack trace"
    return [" ".join(" ".join(both).split()) for both in re.findall(traced, output, re.S)]


def shortened(text: str, length: int = 300) -> str:
    return text if len(text) <= length else text[: length - 4] + " ..."


def compute_sanitizer() -> str | None:
    """Find the tool."""
    home = os.environ.get("CUDA_HOME")
    places = [*([f"{home}/bin", f"{home}/compute-sanitizer"] if home else []), *PLACES]
    return shutil.which(COMPUTE_SANITIZER) or shutil.which(COMPUTE_SANITIZER, path=os.pathsep.join(places))


def driver(part: int) -> list[str]:
    return [sys.executable, str(HERE / "launches.py"), str(part), str(PARTS)]


def kernel_checks(program: str) -> list[Check]:
    """The checks of compute-sanitizer, whose programs listen at ports of their own."""
    # 64 bytes behind each allocation that are nobody's; calls of CUDA that fail are Python's to report
    padded = ["--padding", "64", "--report-api-errors", "no"]
    checks = []
    for number, (tool, finds, options) in enumerate(
        (
            ("memcheck", "Invalid __global__ write.*writes_past_the_end", padded),
            ("initcheck", "Uninitialized __global__ memory read.*reads_what_nobody_wrote", []),
            ("synccheck", "Barrier error.*waits_for_half_a_warp", []),
        )
    ):
        planted, *parts = (
            [
                program, "--tool", tool, *options, "--error-exitcode", str(FOUND), "--print-limit", "1000",
                "--show-backtrace", "no", "--target-processes", "application-only", "--require-cuda-init", "yes",
                "--launch-timeout", "120", "--port", str(49152 + 32 * ((PARTS + 1) * number + place)), *command,
            ]
            for place, command in enumerate(
                [[sys.executable, str(HERE / "planted.py"), tool], *(driver(part) for part in range(PARTS))]
            )
        )  # fmt: skip
        checks.append(Check(tool, planted, parts, UNCACHED, finds, "(?=.*launched:).* SUMMARY: ", our_reports))
    return checks


def stream_check() -> Check:
    command = [sys.executable, str(HERE / "streams.py")]
    finds, variables = "possible data race.*auxhead::fused_head", {"TORCH_CUDA_SANITIZER": "1"}
    name = "torch's CUDA sanitizer"
    return Check(name, [*command, "planted"], [command], variables, finds, "asked: ", race_reports)


def not_launched(done: Sequence[Finished]) -> Iterator[str]:
    """Say what is wrong with the drivers as they ran by themselves: they work, and launch every kernel."""
    yield from (f"FAILED without a tool: {part.end()}" for part in done if part.code != 0)
    text = " ".join(part.output for part in done)
    yield from (f"NOT LAUNCHED: {name}" for name in KERNELS if not re.search(rf"\b{name} [1-9]", text))


def run(checks: Sequence[Check], jobs: int, drivers: Sequence[Sequence[str]] = ()) -> bool:
    """Run the drivers, which compile the kernels, then checks; say what is wrong, and return whether nothing is."""
    began, passed = time.monotonic(), True

    def say(name: str, problems: Iterator[str]) -> None:
        nonlocal passed
        found = list(problems)
        passed &= not found
        says = "\n".join(found) or "nothing found"
        print(f"{'FAILED' if found else 'ok':7} {name} ({time.monotonic() - began:.0f} s): {says}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        if drivers:
            say("kernels without a tool", not_launched(list(pool.map(partial(finished, UNCACHED), drivers))))
        begun = [pool.map(partial(finished, check.environment), [check.planted, *check.commands]) for check in checks]
        for check, (planted, *done) in zip(checks, begun, strict=True):
            say(check.name, check.problems(planted, done))
    return passed


def main() -> int:
    """Run what there is, and say what is missing."""
    if not torch.cuda.is_available():
        print("Sanitizers need a CUDA device, and there is none.")
        return 2
    program = compute_sanitizer()
    if program is None:
        print(
            f"FAILED  {COMPUTE_SANITIZER}: MISSING, neither on PATH nor in {', '.join(PLACES)}: install a CUDA toolkit"
        )
    checks = [*(kernel_checks(program) if program else []), stream_check()]
    passed = run(checks, max(os.cpu_count() or 1, 2), [driver(part) for part in range(PARTS)] if program else [])
    passed &= program is not None
    print("passed" if passed else "FAILED")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
