"""What live requests are profiled with, as far as no GPU is needed: numbers of streams, heads, files."""

import gzip
import json

import pytest
import torch
from auxhead.autotune.doctor import profile_live as live
from auxhead.autotune.doctor.profile_live import find_target
from auxhead.autotune.doctor.trace import KEY, StreamUse, Watched
from auxhead.model.basics.bad_input import BadInput
from torch import nn


def event(category, name, ts, dur=5.0, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}


def test_streams_get_the_numbers_of_their_marks():
    streams = [StreamUse(0, 0, 0, 5), StreamUse(4096, 0, -1, 2), StreamUse(8192, 1, 0, 1)]
    events = [
        event("user_annotation", "auxhead stream 0 0", 10.0),
        event("cuda_runtime", "cudaMemsetAsync", 11.0, 1.0, correlation=1),
        event("user_annotation", "auxhead stream 0 4096", 20.0),
        event("cuda_runtime", "cudaLaunchKernel", 21.0, 1.0, correlation=2),
        event("gpu_memset", "Memset", 30.0, correlation=1, stream=7),
        event("kernel", "fill", 31.0, correlation=2, stream=18),
        event("kernel", "other", 32.0, correlation=3, stream=9),
    ]
    assert [one.number for one in live.with_numbers(streams, events)] == [7, 18, None]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_trace_is_read_before_streams_are_marked_and_has_what_was_watched(name, tmp_path, monkeypatch):
    told = []

    class Profiler:
        def export_chrome_trace(self, file):
            told.append("exported")
            with open(file, "w") as out:
                json.dump({"traceEvents": [1]}, out)

    def marked(streams):
        told.append("marked")
        return []

    monkeypatch.setattr(live, "_marked", marked)
    monkeypatch.setattr(live, "environment", lambda device: {"gpu": "some"})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    file = tmp_path / name
    live.write_trace(Profiler(), Watched(2, host_us=3.0), file)
    assert told == ["exported", "marked"] and [one.name for one in tmp_path.iterdir()] == [name]
    with (gzip.open if name.endswith("gz") else open)(file, "rt") as opened:
        content = json.load(opened)
    assert content["traceEvents"] == [1]
    watched = Watched.from_json(content[KEY])
    assert (watched.requests, watched.host_us, watched.environment) == (2, 3.0, {"gpu": "some"})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.fc = nn.Conv2d(3, 4, 1), nn.Linear(4, 5)
        self.heads = nn.ModuleList(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)) for _ in "ab")
        self.unused = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))

    def forward(self, x):
        x = self.block(x)
        return [*(head(x) for head in self.heads), self.fc(x.mean((2, 3)))]


def test_heads_that_run_are_noted_but_for_the_classifier():
    net, x = Net(), torch.ones(1, 3, 2, 2)
    with live._noting(net, live.find_aux_heads(net)) as ran:
        net(x)
        net(x)
    assert ran == ["heads.0", "heads.1"]
    with live._noting(net.heads, live.find_aux_heads(net.heads)) as ran:
        net.heads[0](x.repeat(1, 2, 1, 1)[:, :4])
    assert ran == []  # it has the last Linear
    assert not any(layer._forward_hooks for layer in net.modules())


def test_a_target_is_a_module_or_a_function_with_an_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "doctors_target.py").write_text(
        "import torch\n"
        "def module(): return torch.nn.Linear(2, 3).train(), torch.ones(1, 2)\n"
        "def function(): return (lambda a, b: a + b), {'a': torch.ones(1), 'b': torch.ones(1)}\n"
        "def wrong(): return torch.ones(1)\n"
    )
    device = torch.device("cpu")
    made = find_target("doctors_target:module")(device)
    assert not made.module.training and not made.request().requires_grad
    made = find_target("doctors_target:function")(device)
    assert made.module is None and made.request().item() == 2.0
    with pytest.raises(BadInput, match=r"TARGET: doctors_target:wrong returned \(Tensor\), wants \(an nn.Module or a"):
        find_target("doctors_target:wrong")(device)


def test_which_products_may_not_be_computed_in_tf32():
    before = torch.get_float32_matmul_precision()
    try:
        for precision, wanted in (("highest", {"matmul"}), ("high", set())):
            torch.set_float32_matmul_precision(precision)
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
                assert set(live.without_tf32()) == wanted
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                assert set(live.without_tf32()) == wanted | {"convolution"}
    finally:
        torch.set_float32_matmul_precision(before)
