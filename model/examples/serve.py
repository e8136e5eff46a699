"""Serve it: pictures that come over HTTP within 2 ms make one batch, answered by a runner that one thread owns.

Run it with ``python -m auxhead.model.examples.serve``, after ``pip install 'auxhead[serve]'``: a small network with
random parameters answers. With ``--checkpoint FOLDER --backbone resnet18`` yours does, of a backbone of torchvision, or
of ``package.module:function``, which is imported and called.
"""

import asyncio
import io
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torchvision
import typer
from auxhead.model import EarlyExitNetwork, ExitMonitor, Preprocessing, attach, load_checkpoint, make_runner
from torch import Tensor

LARGEST, WAIT_MS = 32, 2.0  # pictures of a batch at most, and how long the first one waits for others
#: Bytes of a picture's file at most; and how many are decoded at once, each of which may take a quarter of a GiB.
MOST_BYTES, DECODERS = 10 * 2**20, 4


class Gatherer:
    """Gathers pictures into batches; ``thread`` calls ``answer``, and whatever else touches the network."""

    def __init__(self, answer: Callable[[list[Tensor]], Sequence[Any]]) -> None:
        """Begin, in a running event loop; ``answer`` returns what each who asked is told."""
        self.thread, self._answer = ThreadPoolExecutor(1, "runner"), answer
        self.sizes: Counter[int] = Counter()
        self.failure: str | None = None  # of the last batch
        self._asked: asyncio.Queue[tuple[float, Tensor, asyncio.Future[Any]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._gather())

    async def ask(self, pixels: Tensor) -> Any:
        """Return the answer for pixels [C, H, W], or raise the error of its batch."""
        future = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((time.monotonic(), pixels, future))
        return await future

    async def close(self) -> None:
        """Wait until all who asked are answered, and end the thread."""
        await self._asked.join()
        self._task.cancel()
        self.thread.shutdown()

    async def _gather(self) -> None:
        run = asyncio.get_running_loop().run_in_executor
        while True:
            first = await self._asked.get()
            if self._asked.qsize() < LARGEST - 1:  # one that came while the thread was busy has waited already
                await asyncio.sleep(first[0] + WAIT_MS / 1000 - time.monotonic())
            batch = [first, *(self._asked.get_nowait() for _ in range(min(self._asked.qsize(), LARGEST - 1)))]
            self.sizes[len(batch)] += 1
            try:
                answers = await run(self.thread, self._answer, [pixels for _, pixels, _ in batch])
                told, self.failure = [*zip(batch, answers, strict=True)], None
            except Exception as error:  # of the network or the GPU: for those who asked, and for /health
                told, self.failure = [(each, error) for each in batch], repr(error)
            for (_, _, future), one in told:
                if not future.done():  # else its client has gone
                    future.set_exception(one) if isinstance(one, Exception) else future.set_result(one)
                self._asked.task_done()


class Service:
    """A network, its runner and its counts, for one thread; ``preprocessing`` is for any."""

    def __init__(self, network: EarlyExitNetwork, classes: Sequence[str] = ()) -> None:
        """Make a runner, which counts for ``network.monitor`` if there is one by now."""
        if network.preprocessing is None:
            raise ValueError("network: has no preprocessing, wants network.preprocessing = Preprocessing(...)")
        self.network, self.preprocessing = network, network.preprocessing
        self.names = classes or [str(label) for label in range(network.exit_heads[0].num_classes)]
        self.exits = dict.fromkeys([*network.taps, "classifier"], 0)
        # On a GPU runners are measured on this: noise is in the place of pictures like those to come.
        example = self._as_input(noise(LARGEST, self.preprocessing))
        self.runner = make_runner(network, example, batch_sizes=sorted({1, 2, 4, 8, 16, LARGEST}))
        self.calibrated = self.set_rules({})

    def _as_input(self, pixels: Tensor) -> Tensor:
        return self.preprocessing.normalised(pixels.to(self.network.device)).to(self.network.dtype)

    def answer(self, pixels: list[Tensor]) -> list[dict[str, Any]]:
        """Answer for pictures, pixels uint8 [C, H, W]."""
        label, confidence, _, exit_index = self.runner(self._as_input(torch.stack(pixels))).numpy()
        answers = []
        for each, sure, index in zip(label.tolist(), confidence.tolist(), exit_index.tolist(), strict=True):
            left_at = [*self.exits][index]
            self.exits[left_at] += 1
            sure = sure if math.isfinite(sure) else None  # for which JSON has no number
            answers.append({"label": self.names[each], "confidence": sure, "exit": left_at, "exit_index": index})
        return answers

    def set_rules(self, thresholds: Mapping[str, float]) -> dict[str, dict[str, Any]]:
        """Set thresholds by tap, none of them if one is refused by a ``ValueError``; return the rules in force."""
        self.network.set_rules(thresholds)
        if thresholds and self.network.monitor is not None:
            self.network.monitor.reset()  # what it has counted is of other rules
        rules = zip(self.network.taps, (head.rule for head in self.network.exit_heads), strict=True)
        return {tap: {"threshold": rule.threshold, "criterion": rule.criterion} for tap, rule in rules}

    def counts(self) -> dict[str, Any]:
        """Return answers by exit, and the exits that have drifted; None under rules of which nobody knows shares."""
        monitor = self.network.monitor if self.set_rules({}) == self.calibrated else None
        return {"exits": self.exits.copy(), "drift": monitor and [one._asdict() for one in monitor.check()]}


def make_app(service: Service) -> Any:
    """Return an app of FastAPI; its shutdown answers all that was accepted, and closes the runner."""
    from fastapi import FastAPI, HTTPException, Request
    from pydantic import StrictFloat
    from starlette.requests import ClientDisconnect

    decoders = ThreadPoolExecutor(DECODERS)
    gatherer: Gatherer

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        nonlocal gatherer
        gatherer = Gatherer(service.answer)
        yield
        await gatherer.close()
        service.runner.close()

    async def called(thread: ThreadPoolExecutor, function: Callable[..., Any], *given: Any) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, function, *given)
        except ValueError as error:  # says what is wrong, and what is wanted
            raise HTTPException(422, str(error)) from None

    app = FastAPI(title="auxhead", lifespan=lifespan)

    @app.post("/answer")
    async def answer(request: Request) -> Any:
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise HTTPException(413, f"picture: got more than {MOST_BYTES:,} bytes, wants a smaller file")
        except ClientDisconnect:
            raise HTTPException(400, "picture: the client left before its end") from None
        read = service.preprocessing.read_pixels
        return await gatherer.ask(await called(decoders, read, io.BytesIO(body), "picture"))

    @app.put("/rules")
    async def rules(thresholds: dict[str, StrictFloat]) -> Any:
        return await called(gatherer.thread, service.set_rules, thresholds)

    @app.get("/counts")
    async def counts() -> Any:
        return {**await called(gatherer.thread, service.counts), "batches": dict(sorted(gatherer.sizes.items()))}

    @app.get("/health")
    async def health() -> Any:
        if gatherer.failure is not None:
            raise HTTPException(503, f"the last batch failed: {gatherer.failure}")
        return {"status": "ok"}

    return app


def noise(count: int, preprocessing: Preprocessing) -> Tensor:
    """Return pixels of pictures of noise, uint8 [N, C, H, W]."""
    return torch.randint(256, (count, preprocessing.channels, *[preprocessing.crop] * 2), dtype=torch.uint8)


def small_network(device: str) -> EarlyExitNetwork:
    """Return a ResNet-18 of random parameters for 64 x 64 pixels, each of whose heads is sure of half of all noise."""
    torch.manual_seed(0)
    preprocessing = Preprocessing(crop=64, resize=64)
    images = preprocessing.normalised(noise(256, preprocessing)).to(device)
    backbone = torchvision.models.resnet18(num_classes=10).to(device).eval()
    network = attach(backbone, ["layer1", "layer2", "layer3"], example_input=images[:2])
    network.preprocessing = preprocessing
    sure = [logits.detach().softmax(1).amax(1).median().item() for logits in network.logits(images)]
    network.set_rules(dict(zip(network.taps, sure[:-1], strict=True)))
    shares = torch.bincount(network(images).exit_index, minlength=4) / len(images)
    network.monitor = ExitMonitor(shares.tolist(), len(images))
    return network


def saved_service(checkpoint: str, backbone: str, device: str) -> Service:
    """Return the service of a checkpoint, whose backbone is package.module:function, or one of torchvision by name."""
    if ":" in backbone:
        made = resolve_name(backbone)()
    else:
        classes = json.loads(Path(checkpoint, "model.json").read_text())["classes"]
        made = torchvision.models.get_model(backbone, num_classes=len(classes))
    loaded = load_checkpoint(checkpoint, made.to(device))
    if report := loaded.calibration:
        loaded.network.monitor = ExitMonitor([one["share"] for one in report["exits"]], report["samples"]["test"])
    return Service(loaded.network, loaded.classes)


def main(checkpoint: str = "", backbone: str = "resnet18", port: int = 8000) -> None:
    """Answer pictures on loopback, until a signal ends it, by a checkpoint or by a small network."""
    import uvicorn

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        service = saved_service(checkpoint, backbone, device) if checkpoint else Service(small_network(device))
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(str(error)) from None
    print(service.runner.describe(), flush=True)
    uvicorn.run(  # clients that never end are not waited for
        make_app(service), port=port, log_level="warning", limit_concurrency=1000, timeout_graceful_shutdown=10
    )


if __name__ == "__main__":
    typer.run(main)
