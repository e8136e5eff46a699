"""What the doctor's watcher sees of other threads than its own; on a fake GPU."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from auxhead.autotune.doctor.watching.watcher import Watcher


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as made:
        made.submit(int).result()  # its worker is there before the watcher
        yield made


def in_pool(pool, work):
    pool.submit(work).result()


def in_thread(_pool, work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


WAYS = pytest.mark.parametrize("run", [in_pool, in_thread])


@WAYS
def test_launches_outside_of_the_block_that_the_submitting_thread_enters_are_noticed(main, side, pool, run):
    x = torch.zeros(4)
    with Watcher() as watching:
        with torch.cuda.StreamContext(side):
            run(pool, lambda: x + 1)
    watched = watching.watched(requests=1)
    (noticed,) = watched.noticed
    assert noticed.kind == "default-stream"
    assert "all 1 operators run on the default stream" in noticed.evidence
    assert [(use.handle, use.operators) for use in watched.streams if use.operators] == [(main.cuda_stream, 1)]


@WAYS
def test_a_thread_that_enters_the_block_itself_runs_in_it(main, side, pool, run):
    x = torch.zeros(4)

    def work():
        with torch.cuda.StreamContext(side):
            x + 1

    with Watcher() as watching:
        with torch.cuda.StreamContext(side):
            run(pool, work)
        x.mul(2)
    watched = watching.watched(requests=1)
    assert watched.noticed == () and watched.races == ()
    assert [(use.handle, use.operators) for use in watched.streams] == [(main.cuda_stream, 1), (side.cuda_stream, 1)]


@WAYS
def test_an_empty_block_of_another_thread_is_its_own(main, side, pool, run):
    def work():
        with torch.cuda.StreamContext(side):
            pass

    with Watcher() as watching:
        with torch.cuda.StreamContext(side):
            torch.zeros(4) + 1
            run(pool, work)
        torch.zeros(4) + 1
    assert watching.watched(requests=1).noticed == ()


@WAYS
def test_a_race_of_two_threads_is_told(main, side, pool, run):
    x = torch.zeros(4)

    def work():
        with torch.cuda.StreamContext(side):
            x.sum()

    with Watcher() as watching:
        x.fill_(1)
        run(pool, work)
    (race,) = watching.watched(requests=1).races
    assert race.first.startswith("writes: aten::fill_ on the default stream")
    assert race.second.startswith(f"reads: aten::sum on stream {side.cuda_stream:#x}")


def test_a_pools_own_thread_is_not_watched_for_good(main):
    x = torch.zeros(4)
    with ThreadPoolExecutor(1) as pool:
        with Watcher() as watching:
            pool.submit(lambda: x + 1).result()
        pool.submit(lambda: x + 1).result()
        (use,) = watching.watched(requests=1).streams
    assert use.operators == 1


def test_threads_are_afterwards_as_they_were(main):
    before = ThreadPoolExecutor.submit, threading.Thread.start
    with pytest.raises(KeyError), Watcher():
        raise KeyError
    assert (ThreadPoolExecutor.submit, threading.Thread.start) == before
