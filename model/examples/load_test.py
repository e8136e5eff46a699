"""Load test of ``serve``: clients that ask again as soon as they are answered; prints requests a second, latencies.

Run it with ``python -m auxhead.model.examples.load_test --clients 16 --seconds 10`` while the server runs.
"""

import asyncio
import time
from typing import Any

import torch
import typer
from torchvision.io import encode_png


async def measure(url: str, clients: int, seconds: float) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Return milliseconds of each request, and the server's counts before and after."""
    import httpx

    times: list[float] = []
    noise = torch.randint(256, (64, 3, 64, 64), dtype=torch.uint8)  # in its place take pictures like those to come
    files = [encode_png(pixels).numpy().tobytes() for pixels in noise]
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=clients)) as http:

        async def ask(number: int) -> None:
            while (began := time.perf_counter()) < ends:
                (await http.post("/answer", content=files[number % len(files)])).raise_for_status()
                times.append(1000 * (time.perf_counter() - began))
                number += clients

        before, ends = (await http.get("/counts")).json(), time.perf_counter() + seconds
        await asyncio.gather(*map(ask, range(clients)))
        return times, before, (await http.get("/counts")).json()


def main(url: str = "http://127.0.0.1:8000", clients: int = 16, seconds: float = 10.0) -> None:
    """Put a server of pictures under load, and print what comes of it."""
    import httpx

    try:
        times, before, after = asyncio.run(measure(url, clients, seconds))
    except httpx.ConnectError as error:
        raise typer.BadParameter(f"{url} does not answer ({error}): run the example serve there") from None
    median, p99 = torch.tensor(times).quantile(torch.tensor([0.5, 0.99])).tolist()
    print(f"{clients} clients: {len(times) / seconds:,.0f} requests a second, median {median:.1f} ms, p99 {p99:.1f} ms")
    for what, told in (("batches", "of size"), ("exits", "left at")):
        for name, count in after[what].items():
            here, every = count - before[what].get(name, 0), sum(after[what].values()) - sum(before[what].values())
            print(f"{what:<9}{told:>9} {name:<40.40} {here:>9,} {here / every:>9.1%}")


if __name__ == "__main__":
    typer.run(main)
