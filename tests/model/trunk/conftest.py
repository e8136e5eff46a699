"""What tests of trunks share."""

import pytest
import torch


@pytest.fixture
def uncompiled_on_the_cpu(request, monkeypatch):
    """The parts of a trunk run as they were traced: C++ takes ten seconds a part, and one part is enough of it."""
    if "device" not in request.fixturenames or request.getfixturevalue("device").type == "cpu":
        compiles = torch.compile
        monkeypatch.setattr(torch, "compile", lambda f, *, options, **rest: compiles(f, backend="eager", **rest))
        monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
