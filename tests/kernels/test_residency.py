"""residency.py: every program of a recorded launch is recorded, and answers stay the same."""

import threading
from dataclasses import replace

import pytest
import torch
from auxhead.autotune.overlap.replays import check_turns
from auxhead.kernels import ExitBuffers, ExitHead, ExitLaunch, LaunchConfig, fused_head
from auxhead.kernels.launch.choose_config import overriding
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.residency import recording

SAMPLES, CLASSES = 1, 10
#: Two programs a sample.
SPLIT = LaunchConfig(1, 16, 1, 16, 1, 16, 2, 16, 1, stages=1, num_warps=4)
WAYS = {
    "split": SPLIT,
    "split, the last one waits": replace(SPLIT, waits=True),
    "tiled": replace(SPLIT, block_f=16, block_s=1),
    "one program": replace(SPLIT, max_programs=1),
}
#: Pieces of work of a head.
WORK = {name: 4 if name == "tiled" else 2 for name in WAYS}


class Heads:
    """A head and its launches."""

    def __init__(self, device, config):
        torch.manual_seed(0)
        self.x = torch.randn(SAMPLES, 32, 4, 4, device=device)
        self.weight, self.bias = torch.randn(CLASSES, 32, device=device), torch.randn(CLASSES, device=device)
        view = head_view(tuple(self.x.shape), self.x.stride(), "avg", (1, 1))
        self.shape = HeadShape.of(view, CLASSES, pool_max=False, dtype=self.x.dtype)
        self.config = config
        one = torch.ones(1, device=device)
        self.heads = [ExitHead(self.weight, self.bias, one, 0.5 * one, "avg", (1, 1))]
        self.buffers = ExitBuffers.allocate(1, SAMPLES, CLASSES, with_probs=True, device=self.x.device)

    def launch(self):
        launch = ExitLaunch(self.buffers, 0, self.heads)
        with overriding({self.shape: self.config}):
            launch([self.x])
        return launch

    def answers(self):
        return [one.clone() for one in (self.buffers.label, self.buffers.confidence, self.buffers.packed_answer)]


def assert_all_recorded(launch, work, device):
    assert launch.turns.shape == (work, 3) and launch.turns.dtype == torch.int64
    if device.type == "cuda":
        check_turns(
            launch._replace(turns=launch.turns.cpu()), torch.cuda.get_device_properties(device).multi_processor_count
        )
    else:  # the interpreter has neither multiprocessors nor their clock
        assert not launch.turns.any()


@pytest.mark.parametrize("way", ["split", "one program"])
def test_every_program_of_a_launch_is_recorded_and_the_answers_stay(device, way):
    heads = Heads(device, WAYS[way])
    silent = heads.launch()
    answers = heads.answers()
    with recording() as recorded:
        launch = heads.launch()
        launch([heads.x])
    (found,) = recorded
    assert_all_recorded(found, WORK[way], device)
    assert found.programs == (WAYS[way].max_programs or WORK[way]) and found.num_warps == 4
    assert all(torch.equal(one, other) for one, other in zip(answers, heads.answers(), strict=True))
    found.turns.fill_(-1)
    launch([heads.x])  # recorded anew at every call, whether somebody asks for new launches or not
    assert_all_recorded(found, WORK[way], device)
    found.turns.fill_(-1)
    silent([heads.x])
    assert bool((found.turns == -1).all()) and len(recorded) == 1


@pytest.mark.parametrize("way", ["split, the last one waits", "tiled"])
def test_every_program_of_the_operator_is_recorded(device, way):
    heads = Heads(device, WAYS[way])
    with overriding({heads.shape: WAYS[way]}):
        usual = fused_head(heads.x, heads.weight, heads.bias)
        with recording() as recorded:
            out = [fused_head(heads.x, heads.weight, heads.bias) for _ in range(2)]
        again = fused_head(heads.x, heads.weight, heads.bias)
    assert len(recorded) == 2 and recorded[0].turns is not recorded[1].turns
    for launch in recorded:
        assert_all_recorded(launch, WORK[way], device)
    for one in (*out, again):
        assert torch.equal(one.probs, usual.probs) and torch.equal(one.label, usual.label)


def test_only_what_is_made_inside_records_and_only_in_this_thread(device):
    heads = Heads(device, SPLIT)
    before = heads.launch()
    with recording() as outer:
        before([heads.x])
        thread = threading.Thread(target=heads.launch)
        thread.start()
        thread.join()
        with recording() as inner:
            heads.launch()
        heads.launch()
    heads.launch()
    assert len(inner) == 1 and len(outer) == 1


@pytest.mark.gpu
def test_a_replay_records_anew(device):
    if device.type == "cpu":
        pytest.skip("needs a CUDA device")
    heads = Heads(device, SPLIT)
    with recording() as recorded:
        launch = heads.launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch([heads.x])
    ends = []
    for _ in range(2):
        recorded[0].turns.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert_all_recorded(recorded[0], 2, device)
        ends.append((int(recorded[0].turns[:, 1].min()), int(recorded[0].turns[:, 2].max())))
    assert ends[0][1] <= ends[1][0], "one clock, and the second replay ran after the first"
