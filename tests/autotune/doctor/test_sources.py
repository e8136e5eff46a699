"""Whose code a line is, by one rule for frames and for a profiler's events; and places of findings in words."""

import os
import sys
from pathlib import Path

import auxhead.kernels
import pytest
import torch
from auxhead.autotune.doctor.user_code import innermost_line, place_in_words, profiled_line
from auxhead.model.basics.whose_code import Owner, owner

OWN = Path(auxhead.kernels.__file__).parents[1]
TORCH = Path(torch.__file__).parent


@pytest.mark.parametrize(
    ("file", "whose"),
    [
        ("/home/me/net.py", Owner.USER),
        ("my/net.py", Owner.USER),
        ("<ipython-input-3-a1b2>", Owner.USER),
        ("<string>", Owner.STANDARD),
        (os.__file__, Owner.STANDARD),
        ("threading.py", Owner.STANDARD),
        (str(TORCH / "nn" / "modules" / "module.py"), Owner.TORCH),
        ("torch/nn/modules/module.py", Owner.TORCH),
        ("/opt/lib/python3.11/site-packages/triton/runtime/jit.py", Owner.TORCH),
        ("/opt/lib/python3.11/site-packages/timm/models/resnet.py", Owner.PACKAGE),
        ("timm/models/resnet.py", Owner.PACKAGE),
        (str(OWN / "kernels" / "fused_head.py"), Owner.AUXHEAD),
        ("model/listening/taps.py", Owner.AUXHEAD),
        ("model/net_of_mine.py", Owner.USER),
        (str(OWN / "autotune" / "doctor" / "run.py"), Owner.TOOLS),
        (str(OWN / "model" / "guides" / "targets.py"), Owner.USER),
        ("auxhead/model/guides/targets.py", Owner.USER),
        ("/other/machine/auxhead/model/taps.py", Owner.AUXHEAD),
    ],
)
def test_whose_code_a_file_holds_is_one_rule_for_frames_and_events(file, whose):
    assert owner(file) is whose
    assert profiled_line(f"{file}(12): forward") == (f"{file}:12 in forward" if whose is Owner.USER else None)


def test_the_users_own_line_goes_before_one_of_a_package_that_it_calls(tmp_path):
    packaged = tmp_path / "site-packages" / "package.py"
    exec(compile("def within(function):\n    return function()\n", packaged, "exec"), names := {})
    frame = names["within"](sys._getframe)
    assert owner(str(packaged)) is Owner.PACKAGE
    assert innermost_line(frame, frame.f_back).startswith("test_sources.py:")
    assert innermost_line(frame, frame) == "package.py:2"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("steps.py:65", "at steps.py:65"),
        ("steps.py:57 in forward", "in forward, which begins at steps.py:57"),
        ("my folder in use/steps.py:57 in forward", "in forward, which begins at my folder in use/steps.py:57"),
        ("train.py in <module>", "in train.py"),
    ],
)
def test_a_place_is_part_of_a_sentence(line, words):
    assert place_in_words(line) == words
