"""Two processes of torchrun that share batches: files equal those of one process, byte by byte.

One that fails, dies, hangs or is unlike the other: all end in seconds, and say what it was.
"""

import json
import multiprocessing
import shutil
import signal
import socket
import time

import pytest
import torch.distributed as dist
from support.checkpoint_files import weights_of
from support.launched_ranks import launch
from support.replica_cases import (
    CALIBRATE,
    INFER,
    TRAIN,
    break_picture,
    calibrate_in_a_group,
    copied,
    left_over,
    serve,
    write_case,
    write_other_picture,
)
from support.several_hosts import launch_hosts

pytestmark = [
    pytest.mark.usefixtures("without_interpreter"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
]
ANSWERS = [*INFER, "--json", "answers.jsonl"]


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


# What fails.


@pytest.fixture
def own(case, tmp_path):
    folder = copied(case, tmp_path.name)
    (folder / "answers.jsonl").write_text("of before\n")
    return folder


def assert_all_end(ended, *messages):
    """Each process, by rank, ends with a line on stderr that says so; None stands for one that cannot."""
    for rank, (one, message) in enumerate(zip(ended, messages, strict=True)):
        assert one.status != 0, f"rank {rank}: {one}"
        if message is None:
            assert one.status < 0
            continue
        last = one.errors.strip().splitlines()[-1]
        assert message in last and one.status in (1, 2), f"rank {rank}: {one}"


def assert_nothing_written(*folders):
    for folder in folders:
        assert (folder / "answers.jsonl").read_text() == "of before\n"
        assert not left_over(folder)
        assert not (folder / "auxhead-calibrated").exists() and not (folder / "auxhead-train" / "model.json").exists()


#: By what one does the command, faults, and what each says; within 15 s, as long as others wait for one that hangs.
ENDED = {
    "raises": (ANSWERS, {1: "raises"}, ["Error: rank 1 failed: ZeroDivisionError", "ZeroDivisionError"]),
    "raises in training": (
        [*TRAIN, "--epochs", 2, "--batch-size", 4], {1: "raises_in_training"},
        ["Error: rank 1 failed: ZeroDivisionError: in a step", "ZeroDivisionError: in a step"],
    ),
    "hangs": (ANSWERS, {0: "looks_out_for_2_seconds", 1: "stops"}, ["Error: rank 1 of 2 has died or hangs", None]),
    "has another version": (ANSWERS, {1: "other_version"}, ["version of auxhead: rank 0 has "] * 2),
    "has other arguments": (ANSWERS, {1: "other_arguments"}, ["arguments: rank 0 has infer net pictures "] * 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDED)
def test_one_of_them(own, kind):
    command, faults, messages = ENDED[kind]
    began = time.monotonic()
    ended = launch([own] * 2, command, faults=faults)
    assert_all_end(ended, *messages)
    assert kind != "hangs" or time.monotonic() - began < 15
    assert ["Traceback" in one.errors for one in ended] == [False, kind.startswith("raises")]
    assert_nothing_written(own)


def test_rank_0_dies(own):
    """What it had written stays hidden; nobody is left to remove it."""
    ended = launch([own] * 2, ANSWERS, faults={0: "dies"})
    assert_all_end(ended, None, "Error: rank 0 of 2 has died or hangs")
    assert (own / "answers.jsonl").read_text() == "of before\n"


def test_a_picture_that_one_of_them_cannot_read(own):
    break_picture(own / "pictures" / "lying" / "4.png")
    ended = launch([own] * 2, [*ANSWERS, "--batch", 10])
    message = "pictures/lying/4.png: cannot be read as an image"
    texts = {one.errors.strip() for one in ended}
    assert all(message in text and text.startswith("Error: ") and "\n" not in text for text in texts)
    assert sum("failed: " in text for text in texts) == 1 and [one.status for one in ended] == [2, 2]
    assert_nothing_written(own)


def test_a_checkpoint_that_rank_0_cannot_write(own):
    """The others have nothing left to do but wait for it."""
    ended = launch([own] * 2, CALIBRATE, faults={0: "disk_is_full"})
    assert_all_end(
        ended, "Error: model.json: no space", "Error: rank 0 failed: OSError: [Errno 28] no space: 'model.json'"
    )
    assert not left_over(own)


def test_a_process_that_never_comes(own):
    three = {rank: {"WORLD_SIZE": "3"} for rank in range(2)}
    ended = launch([own] * 2, ANSWERS, faults=dict.fromkeys(range(2), "waits_2_seconds"), variables=three)
    assert_all_end(ended, *["rank 2 of 3 has not come within 2 s"] * 2)
    assert_nothing_written(own)


def test_a_device_that_is_not_there(own):
    cuda = [*ANSWERS, "--device", "cuda"]
    ended = launch([own] * 2, cuda, faults=dict.fromkeys(range(2), "one_gpu"))
    message = "--device: got cuda:1, but torch sees 1 CUDA devices here; wants at most as many"
    # Rank 0 may still be importing as rank 1 fails, and torchrun ends it then.
    assert_all_end(ended, None if ended[0].status == -signal.SIGTERM else message, message)
    assert_nothing_written(own)


def test_checkpoints_that_are_unlike(own):
    other = copied(own, f"{own.name}-other")
    description = (other / "net" / "model.json").read_text()
    (other / "net" / "model.json").write_text(description.replace("0.96", "0.97"))
    ended = launch([own, other], CALIBRATE)
    assert_all_end(ended, *["checkpoint: model.json: rank 0 has "] * 2)
    assert_nothing_written(own, other)


def test_a_host_without_the_checkpoint(own):
    """It says so before the processes connect; the other one need not wait until it has not come."""
    other = copied(own, f"{own.name}-other")
    shutil.rmtree(other / "net")
    message = "checkpoint: net has no model.json"
    assert_all_end(launch([own, other], ANSWERS), f"Error: rank 1 failed: {message}", f"Error: {message}")
    assert_nothing_written(own, other)


def test_processes_that_meet_and_cannot_connect(own):
    faults = {0: "connects_within_2_seconds", 1: "cannot_connect"}
    first, other = launch([own] * 2, ANSWERS, faults=faults)
    assert_all_end([first], "Error: torchrun: the processes have met, but cannot connect to each other; wants ports")
    assert other.status != 0, other
    assert_nothing_written(own)


def test_pictures_that_are_unlike(own):
    other = copied(own, f"{own.name}-other")
    write_other_picture(other / "pictures" / "lying" / "4.png")
    assert_all_end(launch([own, other], ANSWERS), *["images: rank 1 has other ones than rank 0; wants the same"] * 2)
    assert_all_end(launch([own, other], CALIBRATE), *["images: rank 0 has 90 images of pictures ("] * 2)
    assert_nothing_written(own, other)
