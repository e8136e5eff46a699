"""Script: makes every runner of a small network, and prints what became of each as JSON: "same", or its error.

A process of its own, because the allocator is chosen when CUDA starts.
"""

import json

import torch
from auxhead.model import make_runner
from support.graph_runner_cases import WAYS, assert_same, clear_batches, network
from support.one_by_one import one_by_one

EVERY = {"eager": {"exits": "eager"}, **WAYS}


def outcome(options: dict[str, object]) -> str:
    """Make a runner, let it answer ten requests of changing sizes amid allocations, and compare with eager mode."""
    net = network()
    batches = clear_batches(net, [1, 8, 3, 5])
    wanted = [one_by_one(net, x) for x in batches]
    try:
        with make_runner(net, batches[1], batch_sizes=(1, 4, 8), **options) as runner:
            for request in range(10):
                beside = [torch.full((1 << size,), float("nan"), device="cuda") for size in (6, 12, 18, 22)]
                found = runner(batches[request % 4])
                del beside
                assert_same(found, wanted[request % 4])
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "same"


def main() -> None:
    """Print the allocator's name and the outcomes."""
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    outcomes = {name: outcome(options) for name, options in EVERY.items()}
    print(json.dumps({"allocator": torch.cuda.get_allocator_backend(), **outcomes}))


if __name__ == "__main__":
    main()
