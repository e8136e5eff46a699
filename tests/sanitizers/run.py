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
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).resolve().parent
LIMIT_S = 200.0
#: Processes that share the kernels, for each tool.
PARTS = 4
#: Of the output of a command that fails, shown.
LAST_LINES = 12
KERNELS = ("fused_head_kernel", "exit_kernel", "gather_kernel", "collect_kernel", "max_pool_kernel")
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


class Check(NamedTuple):
    """A tool over some work."""

    name: str
    work: str
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
    waits: bool = False
    """Until the kernels are compiled."""


class Verdict(NamedTuple):
    """What a check has come to."""

    passed: bool
    line: str
    output: str = ""
    """Of the command that failed, if it is no report of a tool that says why."""


def finished(command: Sequence[str], environment: dict[str, str]) -> Finished:
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
        if not line.startswith("========= ") or says_nothing:
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


def last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("===")]
    return next((line for line in lines if line.startswith("failed: ")), lines[-1] if lines else "no output")


def fault_is_caught(check: Check, done: Finished) -> Verdict:
    """Judge the command with the planted fault."""
    found = [one for one in (*tool_reports(done.output), *race_reports(done.output)) if re.search(check.finds, one)]
    if found:
        return Verdict(True, "planted fault caught")
    return Verdict(False, f"PLANTED FAULT NOT CAUGHT, the tool sees nothing here: {_end(done)}", done.output)


def nothing_is_found(check: Check, done: Sequence[Finished]) -> Verdict:
    """Judge the commands without one."""
    reports = [one for part in done for one in check.reports(part.output)]
    if reports:
        return Verdict(False, f"FOUND {len(reports)}, the first: {shortened(reports[0])}")
    for part in done:
        if part.code not in (0, FOUND):
            return Verdict(False, f"FAILED: {_end(part)}", part.output)
        if not re.search(check.closes, part.output, re.S):
            return Verdict(False, f"NOT ENDED: {_end(part)}", part.output)
    others = sum(len(tool_reports(part.output)) for part in done)
    return Verdict(True, "nothing found" + (f" ({others} reports of kernels that are not ours)" if others else ""))


def _end(done: Finished) -> str:
    how = f"longer than {LIMIT_S:.0f} s" if done.code is None else f"exit code {done.code}"
    return f"{how}; {shortened(last_line(done.output))}"


def compute_sanitizer() -> str | None:
    """Find the tool."""
    home = os.environ.get("CUDA_HOME")
    places = [*([f"{home}/bin", f"{home}/compute-sanitizer"] if home else []), *PLACES]
    return shutil.which(COMPUTE_SANITIZER) or shutil.which(COMPUTE_SANITIZER, path=os.pathsep.join(places))


def driver(part: int) -> list[str]:
    return [sys.executable, str(HERE / "launches.py"), str(part), str(PARTS)]


def kernel_checks(program: str) -> list[Check]:
    """The checks of compute-sanitizer, whose programs listen at ports of their own."""
    finds = {
        "memcheck": "Invalid __global__ write.*writes_past_the_end",
        "initcheck": "Uninitialized __global__ memory read.*reads_what_nobody_wrote",
        "synccheck": "Barrier error.*waits_for_half_a_warp",
    }
    # 64 bytes behind each allocation that are nobody's; calls of CUDA that fail are Python's to report
    options = {"memcheck": ["--padding", "64", "--report-api-errors", "no"]}
    checks = []
    for number, (tool, pattern) in enumerate(finds.items()):

        def under(command: list[str], place: int, tool: str = tool, number: int = number) -> list[str]:
            port = 49152 + 32 * ((PARTS + 1) * number + place)
            return [
                program, "--tool", tool, *options.get(tool, []), "--error-exitcode", str(FOUND),
                "--print-limit", "1000", "--show-backtrace", "no", "--target-processes", "application-only",
                "--require-cuda-init", "yes", "--launch-timeout", "120", "--port", str(port), *command,
            ]  # fmt: skip

        planted = under([sys.executable, str(HERE / "planted.py"), tool], PARTS)
        parts = [under(driver(part), part) for part in range(PARTS)]
        work = "all kernels, operator and exits"
        closes = "(?=.*launched:).* SUMMARY: "
        checks.append(Check(tool, work, planted, parts, UNCACHED, pattern, closes, our_reports, True))
    return checks


def stream_check() -> Check:
    command = [sys.executable, str(HERE / "streams.py")]
    variables = {"TORCH_CUDA_SANITIZER": "1"}
    finds, closes = "possible data race.*auxhead::fused_head", "asked: "
    work = "eager requests on three streams, two threads"
    return Check(
        "torch's CUDA sanitizer", work, [*command, "planted"], [command], variables, finds, closes, race_reports
    )


def compiled(done: Sequence[Finished]) -> Verdict:
    """Judge the drivers as they ran by themselves: they work, and launch every kernel."""
    for part in done:
        if part.code != 0:
            return Verdict(False, f"FAILED without a tool: {_end(part)}", part.output)
    text = " ".join(part.output for part in done)
    counts = {name: sum(map(int, re.findall(rf"\b{name} (\d+)", text))) for name in KERNELS}
    listing = ", ".join(f"{name} {count}" for name, count in counts.items())
    return Verdict(all(counts.values()), f"{'launches' if all(counts.values()) else 'NOT ALL LAUNCHED'}: {listing}")


def run(checks: Sequence[Check], jobs: int) -> bool:
    """Run checks, say what each has come to, and return whether all have passed."""
    began = time.monotonic()
    passed = True

    def say(name: str, verdict: Verdict) -> None:
        nonlocal passed
        passed &= verdict.passed
        print(f"{'ok' if verdict.passed else 'FAILED':7} {name}: {verdict.line}", flush=True)
        for line in verdict.output.splitlines()[-LAST_LINES:]:
            print(f"          {line}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:

        def begin(commands: Sequence[Sequence[str]], environment: dict[str, str]) -> list:
            return [pool.submit(timed, command, environment) for command in commands]

        planted = {check.name: begin([check.planted], check.environment)[0] for check in checks}
        others = {check.name: begin(check.commands, check.environment) for check in checks if not check.waits}
        if any(check.waits for check in checks):
            alone = [one.result()[0] for one in begin([driver(part) for part in range(PARTS)], UNCACHED)]
            say(f"kernels without a tool ({time.monotonic() - began:.0f} s)", compiled(alone))
        others |= {check.name: begin(check.commands, check.environment) for check in checks if check.waits}
        for check in checks:
            done, seconds = planted[check.name].result()
            say(f"{check.name} ({seconds:.0f} s)", fault_is_caught(check, done))
            ran = [one.result() for one in others[check.name]]
            verdict = nothing_is_found(check, [one for one, _ in ran])
            say(f"{check.name} over {check.work} ({max(seconds for _, seconds in ran):.0f} s)", verdict)
    return passed


def timed(command: Sequence[str], environment: dict[str, str]) -> tuple[Finished, float]:
    began = time.monotonic()
    return finished(command, environment), time.monotonic() - began


def main() -> int:
    """Run what there is, and say what is missing."""
    if not torch.cuda.is_available():
        print("Sanitizers need a CUDA device, and there is none.")
        return 2
    began = time.monotonic()
    program = compute_sanitizer()
    if program is None:
        print(
            f"FAILED  {COMPUTE_SANITIZER}: MISSING, neither on PATH nor in {', '.join(PLACES)}: install a CUDA toolkit"
        )
    checks = [*(kernel_checks(program) if program else []), stream_check()]
    passed = run(checks, max(os.cpu_count() or 1, 2)) and program is not None
    print(f"{'passed' if passed else 'FAILED'} in {time.monotonic() - began:.0f} s.")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
