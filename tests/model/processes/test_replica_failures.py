"""A process of several that fails, dies, hangs or is unlike the others: all end in seconds, and say what it was."""

import shutil
import signal
import time

import pytest
import torch.distributed as dist
from auxhead.model.processes.process_group import first_difference
from support.launched_ranks import launch
from support.replica_cases import (
    CALIBRATE,
    INFER,
    TRAIN,
    break_picture,
    copied,
    left_over,
    serve,
    write_case,
    write_other_picture,
)

pytestmark = [
    pytest.mark.usefixtures("without_interpreter"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
]
ANSWERS = [*INFER, "--json", "answers.jsonl"]


@pytest.fixture(scope="module")
def written(tmp_path_factory, without_interpreter):
    serve()
    return write_case(tmp_path_factory.mktemp("failures") / "case")


@pytest.fixture
def case(written, request, tmp_path):
    folder = copied(written, str(tmp_path.name))
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


def test_rank_0_dies(case):
    """What it had written stays hidden; nobody is left to remove it."""
    ended = launch([case] * 2, ANSWERS, faults={0: "dies"})
    assert_all_end(ended, None, "Error: rank 0 of 2 has died or hangs")
    assert (case / "answers.jsonl").read_text() == "of before\n"


def test_a_process_that_hangs(case):
    """All of it, its heartbeat included; the others wait 15 s, here two."""
    began = time.monotonic()
    ended = launch([case] * 2, ANSWERS, faults={0: "looks_out_for_2_seconds", 1: "stops"})
    assert_all_end(ended, "Error: rank 1 of 2 has died or hangs", None)
    assert time.monotonic() - began < 15
    assert_nothing_written(case)


def test_a_process_that_raises(case):
    ended = launch([case] * 2, ANSWERS, faults={1: "raises"})
    assert_all_end(ended, "Error: rank 1 failed: ZeroDivisionError", "ZeroDivisionError")
    assert "Traceback" in ended[1].errors and "Traceback" not in ended[0].errors
    assert_nothing_written(case)


def test_a_picture_that_one_of_them_cannot_read(case):
    break_picture(case / "pictures" / "lying" / "4.png")
    ended = launch([case] * 2, [*ANSWERS, "--batch", 10])
    message = "pictures/lying/4.png: cannot be read as an image"
    texts = {one.errors.strip() for one in ended}
    assert all(message in text and text.startswith("Error: ") and "\n" not in text for text in texts)
    assert sum("failed: " in text for text in texts) == 1 and [one.status for one in ended] == [2, 2]
    assert_nothing_written(case)


def test_a_training_in_which_one_raises(case):
    ended = launch([case] * 2, [*TRAIN, "--epochs", 2, "--batch-size", 4], faults={1: "raises_in_training"})
    assert_all_end(ended, "Error: rank 1 failed: ZeroDivisionError: in a step", "ZeroDivisionError: in a step")
    assert_nothing_written(case)


def test_a_checkpoint_that_rank_0_cannot_write(case):
    """The others have nothing left to do but wait for it."""
    ended = launch([case] * 2, CALIBRATE, faults={0: "disk_is_full"})
    assert_all_end(
        ended, "Error: model.json: no space", "Error: rank 0 failed: OSError: [Errno 28] no space: 'model.json'"
    )
    assert not left_over(case)


UNLIKE = {
    "version": ("other_version", "version of auxhead: rank 0 has "),
    "arguments": ("other_arguments", "arguments: rank 0 has infer pictures "),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_processes_that_are_unlike(case, kind):
    fault, message = UNLIKE[kind]
    assert_all_end(launch([case] * 2, ANSWERS, faults={1: fault}), *[message] * 2)
    assert_nothing_written(case)


def test_a_process_that_never_comes(case):
    three = {rank: {"WORLD_SIZE": "3"} for rank in range(2)}
    ended = launch([case] * 2, ANSWERS, faults=dict.fromkeys(range(2), "waits_2_seconds"), variables=three)
    assert_all_end(ended, *["rank 2 of 3 has not come within 2 s"] * 2)
    assert_nothing_written(case)


def test_a_device_that_is_not_there(case):
    cuda = [*ANSWERS, "--device", "cuda"]
    ended = launch([case] * 2, cuda, faults=dict.fromkeys(range(2), "one_gpu"))
    message = "--device: got cuda:1, but torch sees 1 CUDA devices here; wants at most as many"
    # Rank 0 may still be importing as rank 1 fails, and torchrun ends it then.
    assert_all_end(ended, None if ended[0].status == -signal.SIGTERM else message, message)
    assert_nothing_written(case)


def test_checkpoints_that_are_unlike(case):
    other = copied(case, f"{case.name}-other")
    description = (other / "net" / "model.json").read_text()
    (other / "net" / "model.json").write_text(description.replace("0.96", "0.97"))
    ended = launch([case, other], CALIBRATE)
    assert_all_end(ended, *["checkpoint: model.json: rank 0 has "] * 2)
    assert_nothing_written(case, other)


def test_a_host_without_the_checkpoint(case):
    """It says so before the processes connect; the other one need not wait until it has not come."""
    other = copied(case, f"{case.name}-other")
    shutil.rmtree(other / "net")
    message = "checkpoint: net has no model.json"
    assert_all_end(launch([case, other], ANSWERS), f"Error: rank 1 failed: {message}", f"Error: {message}")
    assert_nothing_written(case, other)


def test_processes_that_meet_and_cannot_connect(case):
    faults = {0: "connects_within_2_seconds", 1: "cannot_connect"}
    first, other = launch([case] * 2, ANSWERS, faults=faults)
    assert_all_end([first], "Error: torchrun: the processes have met, but cannot connect to each other; wants ports")
    assert other.status != 0, other
    assert_nothing_written(case)


def test_pictures_that_are_unlike(case):
    other = copied(case, f"{case.name}-other")
    write_other_picture(other / "pictures" / "lying" / "4.png")
    assert_all_end(launch([case, other], ANSWERS), *["images: rank 1 has other ones than rank 0; wants the same"] * 2)
    assert_all_end(launch([case, other], CALIBRATE), *["images: rank 0 has 30 images of pictures ("] * 2)
    assert_nothing_written(case, other)


def test_the_first_difference_is_named():
    facts = [{"a": "1", "b": "2"}, {"a": "1", "b": "2"}, {"a": "1", "b": "3"}]
    assert first_difference(facts) == "b: rank 0 has 2, rank 2 has 3; wants the same in all processes"
    assert first_difference(facts[:2]) is None
    assert first_difference([{"a": "1"}, {}]) == "a: rank 0 has 1, rank 1 has None; wants the same in all processes"
