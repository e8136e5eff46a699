"""``PipelinedRunner``: answers of a network whose stages run in several processes; ends with an error if one fails.

Whatever may wait for another process runs in threads: the caller hears of a failure elsewhere while they still wait.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...answers.exit_result import ExitResult
from ...basics.bad_input import one_line
from ...network.early_exit_network import EarlyExitNetwork
from ...processes.process_group import Processes
from ...processes.rank_failures import RankFailed
from ...processes.worker import Worker
from ...runners.captured_network import CapturedNetwork
from ...runners.checks import check_request
from ...runners.runner import Runner
from .exchange import Exchange
from .stage import StageFailed

_T = TypeVar("_T")

#: Seconds between two looks at what has failed elsewhere.
_LOOK_S = 0.1


class PipelinedRunner(Runner):
    """One stage of a pipelined network; every rank has a runner, and calls it as the others do."""

    def __init__(
        self,
        network: EarlyExitNetwork,
        example: Tensor,
        exchange: Exchange,
        description: str,
        timeout_s: float,
        processes: Processes,
        opened: ExitStack,
    ) -> None:
        """Run a stage; :func:`pipelined` makes what it takes. What is ``opened`` is closed in the end."""
        self.network = network
        self._exchange, self._index = exchange, exchange.index
        self._stage = self.stage = exchange.stage
        """What this rank runs, for who measures it between requests."""
        own = (*self._stage.modules_run.parameters(), *self._stage.modules_run.buffers())
        used = {tensor.data_ptr() for tensor in own if not tensor.is_meta}
        # without rules, which are sent with each request
        self._network_then = CapturedNetwork(network, rules=False, read=used)
        self._shape, self._dtype, self._description = example.shape[1:], example.dtype, description
        self._timeout_s, self._processes, self._opened = timeout_s, processes, opened
        opened.callback(self._network_then.clear)
        self._running = Worker("auxhead stage")
        self._asking: Future[Any] = self._running.submit(lambda: None)
        """The latest request, of which later stages may be at it when it is answered."""
        self._ended = False  # on the first rank, as another one has heard
        self._closed: str | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that is given batches and gets the answers."""
        return self._index == 0

    def __call__(self, x: Tensor | None) -> ExitResult | None:  # type: ignore[override]
        """Answer for a batch, together with the other ranks.

        Args:
            x: on the first rank a batch [N, ...] like the example, with any N, on the CPU or the stage's device; None
                on the others.

        Returns:
            On the first rank the answer, on the stage's device; None on the others.

        Raises:
            ValueError, TypeError: a batch unlike the example, or on another rank; the other ranks go on waiting.
            RuntimeError: the network's heads are no longer those of the runner; likewise.
            StageFailed: the own stage has failed, or takes too long.
            RankFailed: that of another rank has, or its process has died. The runner is then closed on all ranks.
            RuntimeError: the runner is closed, here or on the first rank.
        """
        if self.is_first:
            self._refuse_closed()
            self._check_unchanged()
            check_request(x, self._shape, self._dtype, self._stage.device)  # type: ignore[arg-type]
            assert x is not None
            batch, early = x.detach(), Future[Tensor]()
            self._first_of(self._asking)
            self._asking = self._running.submit(self._on_stream(lambda: self._exchange.ask(self.network, batch, early)))
            result = self._stage.form.result(self._first_of(early, self._asking))
            if self.network.monitor is not None:
                self.network.monitor.count(result.exit_index, result.confidence)
            return result
        if x is not None:
            raise TypeError(
                f"x: got {type(x).__name__} on rank {self._index} of the pipeline, wants None but on rank 0"
            )
        if not self._take_part():
            raise RuntimeError("this runner is closed on the first rank")
        return None

    def serve(self) -> None:
        """Take part in requests until the first rank closes its runner; for the other ranks."""
        if self.is_first:
            raise RuntimeError("serve: called on rank 0 of the pipeline, wants another one: rank 0 asks")
        while self._take_part():
            pass

    def describe(self) -> str:
        """Say in a line a stage where it begins and what it takes for a micro-batch."""
        self._refuse_closed()
        return self._description

    def refresh(self) -> None:
        """Take over parameters of this rank's part that were changed in place, where folded copies are read.

        Raises:
            RuntimeError: one that the stage's graph reads lies in other memory than when it was captured.
        """
        self._refuse_closed()
        if self._stage.device.type == "cuda":  # elsewhere layers run, and find what they are given
            self._network_then.check_unmoved(self.network)
        self._stage.refresh()

    def close(self) -> None:
        """Wait until all ranks close, and free what is held; closing twice is fine.

        Until the first rank closes, the others take part in its requests.

        Raises:
            RankFailed: another rank has failed meanwhile.
        """
        if self._closed is None and self.is_first:
            self._first_of(self._asking)
            self._first_of(self._running.submit(self._exchange.end))
        while self._closed is None and not self.is_first and not self._ended:
            self._take_part()
        if self._closed is None:
            self._closed = "this runner is closed"
            self._running.end()
            self._opened.close()

    def __exit__(self, *raised: object) -> None:
        error = next((each for each in raised if isinstance(each, BaseException)), None)
        if error is None:
            self.close()
        else:
            self._fail(error)

    def _refuse_closed(self) -> None:
        if self._closed is not None:
            raise RuntimeError(self._closed)

    def _check_unchanged(self) -> None:
        """Raise if the network is no longer what the stage runs."""
        self._network_then.check_unchanged()
        self._network_then.resizable = self._stage.resizable
        self._network_then.check_not_resized()

    def _take_part(self) -> bool:
        """Take part in a request; returns False if none comes, since the first rank has closed its runner."""
        self._refuse_closed()
        if self._ended:
            return False
        with self._failing():
            self._check_unchanged()
        goes_on: bool = self._first_of(self._running.submit(self._on_stream(self._exchange.answer_next)))
        self._ended = not goes_on
        return goes_on

    def _first_of(self, *futures: "Future[Any]") -> Any:
        """Return the result of the first of some futures that has one, unless something fails elsewhere meanwhile."""
        with self._failing():
            while True:
                for done in wait(futures, timeout=_LOOK_S, return_when=FIRST_COMPLETED).done:
                    return done.result()
                self._look()

    def _look(self) -> None:
        """Raise what has failed elsewhere, or that the own stage takes too long."""
        self._processes.watch.check()
        since = self._stage.busy_since
        if since is not None and time.monotonic() - since > self._timeout_s:
            raise StageFailed(f"{self._stage.name}: a micro-batch took longer than {self._timeout_s:g} s")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Tell the other ranks of an error, or find out which of them it comes from, and close."""
        try:
            yield
        except (RankFailed, StageFailed) as error:
            self._fail(error)
            raise
        except RuntimeError as error:  # a lost connection, of any wording
            cause = self._processes.watch.cause_elsewhere(error)
            said = one_line(error)
            if "timed out" in said.lower():
                said = f"some other rank does not take part in the request: nothing was heard of it ({said:.80})"
            named = StageFailed(f"{self._stage.name}: {said}") if cause is None else RankFailed(cause)
            self._fail(named)
            raise named from error
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Close after an error, of which the others are told if it is the own one."""
        if self._closed is None:
            self._closed = f"this runner is closed since {error}"
            self._running.end()
            with suppress(type(error)):  # it goes through all that is open, and comes out again
                self._opened.__exit__(type(error), error, error.__traceback__)
            self._running.leave_behind()

    def _on_stream(self, work: Callable[[], _T]) -> Callable[[], _T]:
        """Return work that goes to the caller's current stream, wherever it is called."""
        if self._stage.device.type != "cuda":
            return work
        stream = torch.cuda.current_stream(self._stage.device)

        def on_stream() -> _T:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                return work()

        return on_stream
