"""sanitizers/run.py, without a tool: what fails a run, and what it reads in a tool's output."""

import re
import sys
import time
from pathlib import Path

import pytest
import torch
from sanitizers import run
from support.documents import ROOT

CLEAN = """========= COMPUTE-SANITIZER
launched: exit_kernel 4
========= ERROR SUMMARY: 0 errors
"""
FAULT = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at {kernel}+0x1a0 in planted.py:31
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f6510c00fa0 is out of bounds
=========
launched: exit_kernel 4
========= ERROR SUMMARY: 1 error
"""
API = """========= Host API uninitialized memory access at address 0x7f65 on access by cuMemcpyDtoH_v2 source
========= ERROR SUMMARY: 1 error
"""
RACE = """========= Error: Race reported between Write access at {kernel}(int *)+0x90 in planted.cu:13
=========     and Read access at {kernel}(int *)+0xa0 in planted.cu:14 [2048 hazards]
=========
launched: exit_kernel 4
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CSAN = """============================
CSAN detected a possible data race on tensor with data pointer 139719969079296
Access by stream 94646435460352 during kernel:
aten::fill_.Scalar(Tensor(a!) self, Scalar value) -> Tensor(a!)
writing to argument(s) self, and to the output
With stack trace:
  File "exit_rule.py", line 3
Previous access by stream 0 during kernel:
auxhead::fused_head(Tensor x, Tensor weight) -> (Tensor, Tensor, Tensor, Tensor)
reading from argument(s) threshold_tensor
With stack trace:
  File "streams.py", line 3
"""
DONE = "asked: 12 requests"


def says(output: str, code: int = 0) -> list[str]:
    return [sys.executable, "-S", "-c", f"import sys; print({output!r}); sys.exit({code})"]


def checked(capfd: pytest.CaptureFixture, planted: list[str], *commands: list[str], **fields) -> tuple[bool, str]:
    """Run made-up commands as memcheck's; returns whether the check has passed, and what is said."""
    memcheck = run.kernel_checks(run.COMPUTE_SANITIZER)[0]
    check = memcheck._replace(planted=planted, commands=commands, **fields)
    return run.run([check], 2), capfd.readouterr().out


PLANTED = says(FAULT.format(kernel="writes_past_the_end"), run.FOUND)


def test_a_fault_that_is_caught_and_nothing_else_pass(capfd):
    passed, said = checked(capfd, PLANTED, says(CLEAN), says(CLEAN))
    assert passed, said
    assert "nothing found" in said


@pytest.mark.parametrize("planted", [CLEAN, FAULT.format(kernel="another"), "", RACE.format(kernel="past_the_end")])
def test_a_planted_fault_that_passes_fails_the_run(capfd, planted):
    passed, said = checked(capfd, says(planted), says(CLEAN))
    assert not passed and "PLANTED FAULT NOT CAUGHT" in said


def test_what_was_not_planted_fails_the_run(capfd):
    for output, code, reason in (
        (FAULT.format(kernel="exit_kernel"), run.FOUND, "FOUND 1.*Invalid __global__ write of size 4 bytes; at exit_k"),
        (RACE.format(kernel="gather_kernel"), run.FOUND, "FOUND 1.*Race reported"),
        (API + CLEAN, run.FOUND, "FOUND 1.*cuMemcpyDtoH"),
        (CLEAN.replace("0 errors", "3 errors were not printed"), 0, "FOUND 1.*not printed"),
        ("========= Internal Sanitizer Error: did not track the launch\n" + CLEAN, 0, "FOUND 1.*Internal"),
        (CLEAN, 1, "FAILED: exit code 1"),
        ("Traceback\nfailed: a head: ValueError: x\n" + CLEAN, 1, "(?s)FAILED: .*failed: a head.*\n +Traceback"),
        (CLEAN.replace("launched", "began"), 0, "NOT ENDED"),
        ("launched: exit_kernel 4", 0, "NOT ENDED"),
    ):
        passed, said = checked(capfd, PLANTED, says(CLEAN), says(output, code))
        assert not passed and re.search(reason, said), said


def test_reports_of_others_kernels_are_not_ours(capfd):
    fill = FAULT.format(kernel="void at::native::vectorized_elementwise_kernel<4>(int)")
    for between in ("=========\n", "========= \n"):  # some versions write a space behind each report
        passed, said = checked(capfd, PLANTED, says(fill.replace("=========\n", between), run.FOUND))
        assert passed, said


def test_races_of_streams_are_found(capfd):
    check = run.stream_check()
    fields = {"finds": check.finds, "closes": check.closes, "reports": check.reports}
    assert checked(capfd, says(CSAN, 1), says(DONE), **fields)[0]
    assert not checked(capfd, says(DONE), says(DONE), **fields)[0]
    assert not checked(capfd, says(CSAN, 1), says(CSAN + DONE), **fields)[0]


def test_a_command_that_takes_too_long_fails_the_run_and_ends_with_its_children(capfd, monkeypatch):
    monkeypatch.setattr(run, "LIMIT_S", 0.2)
    sleeps = ["sh", "-c", "sleep 60 & sleep 60"]
    began = time.monotonic()
    passed, said = checked(capfd, sleeps, sleeps)
    assert time.monotonic() - began < 30
    assert not passed and said.count("longer than") == 2


@pytest.mark.parametrize("there", [False, True])
def test_a_missing_tool_fails_the_run_and_with_it_all_checks_are_made(there, monkeypatch, tmp_path, capsys):
    """On a machine with a GPU and nothing else on its PATH, on which every check passes."""
    names: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "PLACES", ())
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(run, "run", lambda checks, *_: names.extend(check.name for check in checks) or True)
    if there:
        (tmp_path / run.COMPUTE_SANITIZER).touch(mode=0o755)
    assert run.main() == int(not there)
    assert ("compute-sanitizer: MISSING" in capsys.readouterr().out) != there
    assert names == [*(("memcheck", "initcheck", "synccheck") if there else ()), "torch's CUDA sanitizer"]


def test_without_a_gpu_nothing_is_run(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main() == 2
    assert "CUDA device" in capsys.readouterr().out


def test_a_kernel_that_is_never_launched_fails_the_run():
    text = "launched: " + ", ".join(f"{name} 3" for name in run.KERNELS)
    both = [run.Finished(0, text), run.Finished(0, text.replace("exit_kernel 3", "other_kernel 3"))]
    assert list(run.not_launched(both)) == []
    assert list(run.not_launched(both[1:])) == ["NOT LAUNCHED: exit_kernel"]
    assert list(run.not_launched([both[0], run.Finished(1, text)]))


def test_every_kernel_of_the_package_is_listed():
    sources = [path.read_text() for path in Path(ROOT, "kernels", "jit").glob("*.py")]
    assert {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.M)} == set(run.KERNELS)
