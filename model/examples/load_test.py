"""Load test of ``serve``: clients that ask again as soon as they are answered; prints requests a second, latencies.

Run it with ``python -m auxhead.model.examples.load_test --clients 16 --seconds 10`` while the server runs.
"""

import asyncio
import time
from typing import Annotated, Any

import torch
import typer
from torchvision.io import encode_png


async def measure(url: str, clients: int, seconds: float) -> tuple[list[float], float, dict[str, Any], dict[str, Any]]:
    """Return milliseconds of each request, seconds that all took, and the server's counts before and after."""
    import aiohttp

    times: list[float] = []
    noise = torch.randint(256, (64, 3, 64, 64), dtype=torch.uint8)  # in its place take pictures like those to come
    files = [encode_png(pixels).numpy().tobytes() for pixels in noise]
    everyone = aiohttp.TCPConnector(limit=clients)
    async with aiohttp.ClientSession(url, connector=everyone, raise_for_status=True) as http:

        async def counts() -> dict[str, Any]:
            async with http.get("/counts") as response:
                told: dict[str, Any] = await response.json()
                return told

        async def ask(number: int) -> None:
            while (began := time.perf_counter()) < ends:
                async with http.post("/answer", data=files[number % len(files)]) as response:
                    await response.read()
                times.append(1000 * (time.perf_counter() - began))
                number += clients

        before, ends = await counts(), time.perf_counter() + seconds
        await asyncio.gather(*map(ask, range(clients)))
        took = time.perf_counter() - ends + seconds  # the last answers come later
        return times, took, before, await counts()


def main(
    url: str = "http://127.0.0.1:8000",
    clients: Annotated[int, typer.Option(min=1)] = 16,
    seconds: Annotated[float, typer.Option(min=0.1)] = 10.0,
) -> None:
    """Put a server of pictures under load, and print what comes of it."""
    import aiohttp

    try:
        times, took, before, after = asyncio.run(measure(url, clients, seconds))
    except aiohttp.ClientConnectorError:
        raise typer.BadParameter(f"{url} does not answer: run the example serve there") from None
    except (aiohttp.ClientError, ValueError) as error:  # of the server, or of what is no address
        raise typer.BadParameter(f"{url}: {error}") from None
    median, p99 = torch.tensor(times).quantile(torch.tensor([0.5, 0.99])).tolist()
    print(f"{clients} clients: {len(times) / took:,.0f} requests a second, median {median:.1f} ms, p99 {p99:.1f} ms")
    for what, told in (("batches", "of size"), ("exits", "left at")):
        here = {name: count - before[what].get(name, 0) for name, count in after[what].items()}
        for name, count in here.items():
            print(f"{what:<9}{told:>9} {name:<40.40} {count:>9,} {count / max(1, sum(here.values())):>9.1%}")


if __name__ == "__main__":
    typer.run(main)
