"""``OwnedLock`` under interrupts: they come while it waits, and right after it was taken."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from auxhead.model.basics.streams import OwnedLock

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer here")


class _Interrupt(Exception):
    pass


@pytest.fixture
def interrupt_after():
    """Raises in this thread, so many seconds later."""

    def interrupt(*_):
        raise _Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupt_leaves_the_lock_to_the_thread_that_holds_it(interrupt_after):
    lock = OwnedLock()
    with ThreadPoolExecutor(1) as other_thread:
        assert other_thread.submit(lock.acquire).result()
        with pytest.raises(_Interrupt):
            interrupt_after(0.05)
            with lock:
                pytest.fail("two threads have it")
        assert not lock.acquire(blocking=False)
        other_thread.submit(lock.release).result()
        with lock:
            assert not other_thread.submit(lock.acquire, False).result()
        assert other_thread.submit(lock.acquire, False).result()


def test_no_interrupt_leaves_it_held(interrupt_after):
    lock = OwnedLock()
    with ThreadPoolExecutor(1) as other_thread:
        for turn in range(300):
            with pytest.raises(_Interrupt):
                interrupt_after(1e-5 * (1 + turn % 30))
                while True:
                    with lock:
                        pass
            if free := other_thread.submit(lock.acquire, False).result():
                other_thread.submit(lock.release).result()
            assert free
