"""Two processes of torchrun that share batches: files equal those of one process, byte by byte."""

import json
import multiprocessing
import socket

import pytest
import torch.distributed as dist
from support.checkpoint_files import weights_of
from support.launched_ranks import launch
from support.replica_cases import CALIBRATE, INFER, TRAIN, calibrate_in_a_group, copied, left_over, serve, write_case
from support.several_hosts import launch_hosts

pytestmark = [
    pytest.mark.usefixtures("without_interpreter"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
]


@pytest.fixture(scope="module")
def case(tmp_path_factory, without_interpreter):
    serve()
    return write_case(tmp_path_factory.mktemp("replicas") / "case", per_class=45)


def done(ended):
    for rank, one in enumerate(ended):
        assert one.status == 0 and not one.errors, f"rank {rank}: {one}"
    assert not any(one.output for one in ended[1:])
    return ended[0].output


@pytest.mark.parametrize("batch", [7, 100])
def test_answers_for_files(case, batch):
    """Of 90 images; the last batch is smaller, or the only one, with nothing for rank 1."""
    options = [*INFER, "--batch", batch, "--json"]
    said = done(launch([case], [*options, "one.jsonl"], alone=True))
    assert done(launch([case] * 2, [*options, "two.jsonl"])).startswith("90 images in ") and "left at" in said
    assert (case / "one.jsonl").read_bytes() == (case / "two.jsonl").read_bytes()
    exits = {json.loads(line)["exit_index"] for line in (case / "two.jsonl").read_text().splitlines()}
    assert exits == {0, 1} and not left_over(case)


def test_answers_of_two_hosts(case):
    """Each with a directory of its own, where that of rank 0 alone is written to."""
    hosts = [copied(case, f"host{host}") for host in range(2)]
    before = sorted(hosts[1].rglob("*"))
    done(launch([case], [*INFER, "--json", "here.jsonl"], alone=True))
    ended = launch_hosts(hosts, [*INFER, "--json", "answers.jsonl"])
    assert [one.status for one in ended] == [0, 0], ended
    assert (hosts[0] / "answers.jsonl").read_bytes() == (case / "here.jsonl").read_bytes()
    assert [path for path in sorted(hosts[1].rglob("*")) if path not in before] == [
        hosts[1] / "1.pid", hosts[1] / "host.err", hosts[1] / "host.out",
    ]  # fmt: skip


def test_a_training_on_two_hosts_goes_on(case):
    """From what rank 0 has written, which the other host lacks."""
    hosts = [copied(case, f"trains{host}") for host in range(2)]
    options = [*TRAIN, "--epochs", 1, "--batch-size", 8, "--out", "trained"]
    done(launch(hosts, options))
    assert not (hosts[1] / "trained").exists()
    weights = weights_of(hosts[0] / "trained")
    first = weights.read_bytes()
    weights.unlink()
    done(launch(hosts, [*options, "--resume"]))
    assert weights.read_bytes() == first
    assert not (hosts[1] / "trained").exists()


def test_rank_0_may_hold_the_store(case):
    """As where torchrun leaves it to rank 0. It may be gone before rank 1 is, and PyTorch logs that."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port}
    ended = launch([case] * 2, [*INFER, "--json", "held.jsonl"], variables=dict.fromkeys(range(2), variables))
    assert [one.status for one in ended] == [0, 0] and "Error: " not in ended[1].errors
    assert len((case / "held.jsonl").read_text().splitlines()) == 90


def test_a_calibration(case):
    """Splits, temperatures, thresholds, bound and curve, without latencies, which nobody measures twice alike."""
    options = [*CALIBRATE, "--max-accuracy-drop", 0.2, "--out"]
    done(launch([case], [*options, "one"], alone=True))
    said = done(launch([case] * 2, [*options, "two"]))
    names = ["calibration.json", "calibration.png", "model.json", weights_of(case / "one").name, "report.json"]
    for name in names:
        assert (case / "one" / name).read_bytes() == (case / "two" / name).read_bytes(), name
    report = json.loads((case / "two" / "report.json").read_text())
    assert report["samples"] == {"temperature": 18, "thresholds": 45, "test": 27}
    assert "Saved in two" in said and not left_over(case)


def test_rank_0_alone_measures_latencies(case):
    done(launch([case] * 2, [*CALIBRATE, "--max-work", 0.9, "--batch", 2, "--out", "timed"]))
    latencies = json.loads((case / "timed" / "report.json").read_text())["latencies"]
    assert latencies["batch_size"] == 2 and len(latencies["milliseconds"]) == 2


def test_calibrate_network_in_a_process_group_of_ones_own(case):
    """Each process gets the report and the rules of one; a loader that is sharded already is refused."""
    for count in (1, 2):
        context = multiprocessing.get_context("forkserver")
        given = [(rank, count, str(case)) for rank in range(count)]
        processes = [context.Process(target=calibrate_in_a_group, args=one) for one in given]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
    alone, *both = (json.loads((case / f"{name}.json").read_text()) for name in ("0-of-1", "0-of-2", "1-of-2"))
    for report, rules, refused in both:
        assert [report, rules] == alone[:2]
        assert refused.startswith("data: rank 1 has other ones than rank 0"), refused
