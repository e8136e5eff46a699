"""The measurer of heads of a small network, for tests without a GPU."""

import torch
from auxhead.autotune.measuring.head_timing import HeadTiming
from auxhead.autotune.measuring.subject import subject_of
from auxhead.model import EarlyExitNetwork
from support.example_models import SmallNet, plain_heads


def measurer(trunk="as_is"):
    torch.manual_seed(0)
    heads, example = plain_heads(), torch.randn(1, 3, 8, 8)
    del heads["block0"]  # what is interpreted takes its time
    network = EarlyExitNetwork(SmallNet(), heads, example_input=example).eval()
    return HeadTiming(subject_of("tests:small", network, example), trunk)
