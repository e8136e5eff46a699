"""``parallelize`` without GPUs: arguments, parts on the CPU, and networks that are read part by part.

See test_split_order.py for streams, and test_parallelize_gpu.py.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from auxhead.model import EagerRunner, EarlyExitNetwork, FusedAuxHead, load_checkpoint, parallelize, save_checkpoint
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.parallel import cut as cutting
from auxhead.model.parallel import parallelize as front_module
from support import pipeline_ranks

pytestmark = pytest.mark.usefixtures("without_interpreter")


def example():
    return pipeline_ranks.batch_of("plain", 16)


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
@pytest.mark.parametrize("balance", ["auto", ["2"]])
def test_parts_on_the_cpu_answer_as_the_network(trunk, balance):
    network, x = pipeline_ranks.plain(), example()
    with torch.no_grad():
        sure = [logits.softmax(1).amax(1).median().item() for logits in network.logits(x)]
    network.set_rules(dict(zip(network.taps, sure, strict=False)))
    batches = [x, x[:1], torch.cat([x, x])[:19]]
    wanted = [network(batch) for batch in batches]
    assert len(torch.cat([each.exit_index for each in wanted]).unique()) > 2
    runner = parallelize(network, x, devices=["cpu", "cpu"], balance=balance, exits="polled", trunk=trunk)
    with runner:
        assert isinstance(runner, EagerRunner) and runner.describe().startswith("Part 0 on cpu, from the input: ")
        assert len([line for line in runner.describe().splitlines() if line.startswith("Part ")]) == 2
        for batch, one in zip(batches, wanted, strict=True):
            pipeline_ranks.assert_same(runner(batch), one, rtol=1e-3, atol=1e-5)


def test_parts_are_read_one_by_one(tmp_path, monkeypatch):
    """Of a network on ``meta``: each part's tensors when it is placed, and none before."""
    network, x = pipeline_ranks.plain(), example()
    network.set_rules(0.4)
    wanted = network(x)
    save_checkpoint(tmp_path, network)
    there = load_checkpoint(tmp_path, pipeline_ranks.plain().backbone.to("meta")).network
    assert all(each.is_meta for each in there.backbone.parameters())
    read, order = cutting.read_tensor, []
    monkeypatch.setattr(
        cutting, "read_tensor", lambda path, name, device: order.append(name) or read(path, name, device)
    )
    runner = parallelize(there, x, devices=["cpu", "cpu"], balance=["2"])
    pipeline_ranks.assert_same(runner(x), wanted)
    assert order == [f"backbone.{name}" for name, _ in network.backbone.named_parameters()]
    assert not any(each.is_meta for each in there.backbone.parameters()) and there.unread is None


def test_a_network_on_meta_that_nobody_has_saved():
    network = pipeline_ranks.plain()
    network.backbone.to("meta")
    with pytest.raises(BadInput, match="its '0.0.weight' is on meta, wants a network that load_checkpoint made there"):
        parallelize(network, example(), devices=["cpu", "cpu"], balance=["2"])


def test_a_network_of_which_a_part_is_on_meta():
    network = pipeline_ranks.plain()
    network.backbone[3].to("meta")
    with pytest.raises(
        ValueError, match="its backbone's '3.0.weight' is on meta, its first parameter on cpu; wants all"
    ):
        parallelize(network, example(), devices=["cpu", "cpu"])


ARGUMENTS = [
    (dict(network=torch.nn.Linear(1, 1)), TypeError, "network: got Linear, wants an EarlyExitNetwork"),
    (dict(network=pipeline_ranks.plain().train()), ValueError, "network: in training mode"),
    (dict(devices=[]), ValueError, r"devices: got \[\], wants a list of one device or more"),
    (dict(devices="cpu"), ValueError, "devices: got 'cpu', wants a list"),
    (dict(devices=["cpu", "gpu"]), ValueError, "devices: got 'gpu', wants 'cuda:0' and the like"),
    (dict(devices=["meta", "meta"]), ValueError, "devices: got meta, wants CUDA devices or the CPU"),
    (dict(devices=["cuda:99"]), ValueError, r"devices: got cuda:99, but torch sees \d+ CUDA devices here"),
    (dict(devices=["cpu"] * 5), ValueError, r"devices: got 5, wants at most 4, as parts can end at \['0', '2', '3'\]"),
    (
        dict(max_memory={0: "1GiB"}),
        ValueError,
        "max_memory: got .*, wants None where the devices are CPUs",
    ),
    (dict(balance="even"), ValueError, "balance: got 'even', wants 'auto' or a list of taps"),
    (dict(balance=["1"]), ValueError, r"balance: got \['1'\], wants 1 of \['0', '2', '3'\], in this order"),
    (dict(balance=["0", "2"]), ValueError, "wants 1 of .* for 2 devices"),
    (dict(devices=["cpu"] * 3, balance=["2", "0"]), ValueError, r"balance: got \['2', '0'\], wants 2 of"),
    (dict(exits="gated"), ValueError, r"exits: got 'gated', wants one of \['overlapped', 'polled'\]"),
    (dict(batch_sizes=[0]), ValueError, r"batch_sizes: got \[0\], wants positive ints"),
    (dict(batch_sizes="on_demand"), ValueError, "batch_sizes: got 'on_demand', wants positive ints"),
    (dict(example_input=None, batch_sizes=[2]), TypeError, "example_input: got NoneType, wants"),
    (dict(example_input=torch.zeros(2, 3, 16, 16, device="meta")), ValueError, "example_input: on meta"),
]


def test_arguments_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(cutting, "make_trunk", lambda *_: pytest.fail("something was made"))
    good = dict(network=pipeline_ranks.plain(), example_input=example(), devices=["cpu", "cpu"])
    for changes, error, message in ARGUMENTS:
        arguments = good | changes
        network, x = arguments.pop("network"), arguments.pop("example_input")
        with pytest.raises(error, match=message):
            parallelize(network, x, **arguments)


def test_requests_of_several_threads():
    network, x = pipeline_ranks.plain(), example()
    batches = [torch.randn(7, 3, 16, 16) for _ in range(3)]
    wanted = [network(batch).confidence for batch in batches]
    runner = parallelize(network, x, devices=["cpu", "cpu"], balance=["2"])

    def asked(turn):
        return all(torch.allclose(runner(batches[turn]).confidence, wanted[turn], atol=1e-5) for _ in range(30))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(asked, range(3)))


def test_samples_of_another_size_are_refused():
    runner = parallelize(pipeline_ranks.plain(), example(), devices=["cpu", "cpu"], balance=["2"])
    with pytest.raises(ValueError, match=r"x: got shape \[2, 3, 32, 32\], wants \[N, 3, 16, 16\]"):
        runner(torch.randn(2, 3, 32, 32))


def test_a_failure_leaves_the_network_where_it_was(tmp_path, monkeypatch):
    """Of a network that was read: what is on ``meta`` is there again, and the heads are on the CPU."""
    network = pipeline_ranks.plain()
    wanted = network(example())
    save_checkpoint(tmp_path, network)
    there = load_checkpoint(tmp_path, pipeline_ranks.plain().backbone.to("meta")).network
    tensors = {name: id(each) for name, each in there.named_parameters()}
    with monkeypatch.context() as patch:
        patch.setattr(front_module, "SplitTrunk", lambda *_: (_ for _ in ()).throw(RuntimeError("no room")))
        with pytest.raises(RuntimeError, match="no room"):
            parallelize(there, example(), devices=["cpu", "cpu"], balance=["2"])
    assert all(each.is_meta for each in there.backbone.parameters())
    assert {name: id(each) for name, each in there.named_parameters()} == tensors
    runner = parallelize(there, example(), devices=["cpu", "cpu"], balance=["2"])
    pipeline_ranks.assert_same(runner(example()), wanted)


class Split(torch.nn.Module):
    """Splits the batch itself, and goes to devices, as the classes of PyTorch's tutorial do."""

    def __init__(self, size):
        super().__init__()
        self.size, self.seq1, self.seq2 = size, torch.nn.Linear(6, 8), torch.nn.Linear(8, 5)

    def forward(self, x):
        return torch.cat([self.seq2(torch.relu(self.seq1(each)).to("cpu")) for each in x.split(self.size)])


def test_forwards_that_name_devices_stay_where_they_are_placed():
    network, x = (
        EarlyExitNetwork(Split(20), {"seq1": FusedAuxHead(8, 5, pool="none")}, rules=1.0).eval(),
        torch.randn(7, 6),
    )
    network.check_taps(x)
    wanted = network(x)
    runner = parallelize(network, x, devices=["cpu", "cpu"])
    pipeline_ranks.assert_same(runner(x), wanted)
    with pytest.raises(RuntimeError, match="answers for 20 of 50 samples in parts, .* splits the batch itself"):
        runner(torch.randn(50, 6))


@pytest.mark.parametrize("said", ["Expected all tensors to be on the same device", "CUDA out of memory"])
def test_a_network_in_parts_says_what_to_call_where_devices_are_the_reason(said, monkeypatch):
    network, x = pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 4)
    network.backbone[6].to("meta")

    def forward(_x):
        raise RuntimeError(said)

    monkeypatch.setattr(network.backbone[6], "forward", forward)
    wanted = "its parameters are on cpu, meta, as parallelize" if "same device" in said else said
    with pytest.raises((BadInput, RuntimeError), match=wanted):
        network(x)
