"""Whose code a file or a frame holds: one rule for messages of the model, findings and a profiler's events."""

import contextlib
import os
import sys
from pathlib import Path

import auxhead.kernels
import pytest
import torch
from auxhead.autotune.doctor.user_code import innermost_line, profiled_line
from auxhead.model.basics.whose_code import Owner, owner, owner_of
from auxhead.model.listening.recorder import line_of_the_user

OWN = Path(auxhead.kernels.__file__).parents[1]
TORCH = Path(torch.__file__).parent
TIMM = "/opt/lib/python3.11/site-packages/timm/models/resnet.py"

FILES = {
    "/home/me/net.py": Owner.USER,
    "my/net.py": Owner.USER,
    "model/net_of_mine.py": Owner.USER,  # a folder of the user's, named as ours
    "<ipython-input-3-a1b2>": Owner.USER,
    "<string>": Owner.STANDARD,
    "<frozen os>": Owner.STANDARD,
    os.__file__: Owner.STANDARD,
    "threading.py": Owner.STANDARD,
    str(TORCH / "nn" / "modules" / "module.py"): Owner.TORCH,
    "torch/nn/modules/module.py": Owner.TORCH,
    "/opt/lib/python3.11/site-packages/triton/runtime/jit.py": Owner.TORCH,
    TIMM: Owner.PACKAGE,
    "timm/models/resnet.py": Owner.PACKAGE,
    str(OWN / "kernels" / "fused_head.py"): Owner.AUXHEAD,
    "model/make_runner.py": Owner.AUXHEAD,
    "/other/machine/auxhead/model/taps.py": Owner.AUXHEAD,
    str(OWN / "autotune" / "doctor" / "run.py"): Owner.TOOLS,
    str(OWN / "model" / "guides" / "targets.py"): Owner.USER,
    "auxhead/model/guides/targets.py": Owner.USER,
    "model/examples/swap_heads.py": Owner.USER,
}


def test_whose_code_a_file_holds():
    for file, whose in FILES.items():
        assert owner(file) is whose, file
        wanted = f"{file}:12 in forward" if whose is Owner.USER else None
        assert profiled_line(f"{file}(12): forward") == wanted, file


def called_in(file, call, name="f", module="net"):
    """Call a function from a frame of that file."""
    code = f"def {name}(call):\n    return call()\n"
    exec(compile(code, file, "exec"), scope := {"__name__": module})
    return scope[name](call)


@pytest.mark.parametrize(
    ("file", "more", "whose"),
    [
        # scripts that are run by a path as a profiler shortens those of others
        ("random.py", {}, Owner.USER),
        ("model/make_runner.py", {}, Owner.USER),
        ("timm/models.py", {}, Owner.USER),
        # of python -c, but not what dataclasses make
        ("<string>", {"module": "__main__"}, Owner.USER),
        ("<string>", {"module": "__main__", "name": "__init__"}, Owner.STANDARD),
        ("<string>", {}, Owner.STANDARD),
        # frames between the user's code and ours
        (contextlib.__file__, {}, Owner.STANDARD),
        (str(OWN / "kernels" / "fused_head.py"), {}, Owner.AUXHEAD),
        ("/opt/lib/python3.11/site-packages/triton/runtime/jit.py", {}, Owner.TORCH),
    ],
)
def test_frames_on_which_rules_disagreed(file, more, whose, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = called_in(file, lambda: sys._getframe(1), **more)
    assert owner_of(frame) is whose
    here = Path(__file__).name
    for line in (called_in(file, line_of_the_user, **more), innermost_line(frame)):
        assert line == f"{Path(file).name}:2" if whose is Owner.USER else line.startswith(here)


def test_the_model_names_a_packages_line_and_the_doctor_that_of_its_caller():
    frame = called_in(TIMM, lambda: sys._getframe(1))
    assert called_in(TIMM, line_of_the_user) == "resnet.py:2"
    assert innermost_line(frame).startswith(Path(__file__).name) and innermost_line(frame, frame) == "resnet.py:2"
    assert innermost_line(frame, frame.f_back).startswith(Path(__file__).name)
