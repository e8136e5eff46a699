"""Profiles requests before (naive early exit) and after (a runner): checked, timed, profiled, recorded and printed."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...model import EarlyExitNetwork, make_runner, make_trunk
from ...model.basics.bad_input import BadInput
from ...model.commands.console import plain_console
from ...model.commands.options import make_output_directory
from ...model.commands.user_model import UserModel, load_factory, load_network
from ...model.own_exits.silenced_model import SilencedModel
from ...model.saving.checkpoint_files import own_file, read_description
from ..measuring.cells import OWN, Cell
from ..measuring.cuda_calls import ALLOCATIONS, GRAPH_LAUNCHES, LAUNCHES, SYNCHRONISATIONS
from ..measuring.eager_truth import Comparison, EagerTruth, wrong_in_words
from ..measuring.environment import clocks, environment, this_device
from ..measuring.failures import refuse
from ..measuring.peers import NaiveHead, merged_answer, with_item
from ..measuring.profiled_requests import WARM_UP, RequestProfile, profile_requests, steady_state_problems
from ..measuring.subject import own_cell
from ..measuring.timers import PROTOCOL, Samples, time_captures
from ..records.record import Record, append_record
from ..records.summaries import percentiles, summary
from .tables import exits_table, print_comparison

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True)
class BeforeAndAfter:
    """Measurements of one network and one batch; keys are ``BEFORE`` and ``AFTER``."""

    profiles: dict[str, RequestProfile]
    times: dict[str, Samples]
    """Without a profiler, which outlives its use and slows later launches down; one capture each."""
    counts: dict[str, dict[str, int]]
    """Comparison of the answers with the eager network, as in records: before with the backbone as it is, after with
    the runner's trunk."""
    samples_by_exit: dict[str, int]
    """Samples of the batch that leave at each tap and, last, at the classifier."""

    @property
    def problems(self) -> list[str]:
        """Reasons why the runner is not in a steady state; empty if it is."""
        return steady_state_problems(self.profiles[AFTER])


def compare(
    network: EarlyExitNetwork, x: Tensor, *, exits: str, trunk: str, requests: int, out: Path
) -> BeforeAndAfter:
    """Check, time and profile naive early exit and a runner; writes ``before.json`` and ``after.json`` into ``out``.

    The network is in eval mode, on the device of ``x``, the input of every request.

    Raises:
        BadInput: the network cannot be run like this; says why.
        WrongAnswer: an answer differs from the eager runner's by more than rounding; nothing is timed then.
    """
    try:
        network.check_taps(x)
        backbone = make_trunk(network.backbone, network.taps, x, reading=network.reading)
        runner = make_runner(network, x, exits=exits, batch_sizes=(len(x),), trunk=trunk)
    except (TypeError, ValueError) as error:
        raise BadInput(f"profile: {' '.join(str(error).split())}") from None
    try:
        heads = [NaiveHead(head) for head in network.fused_heads]
        before = torch.no_grad()(partial(with_item, backbone, network.taps, heads))
        calls: dict[str, Callable[[Tensor], Any]] = {BEFORE: before, AFTER: runner}
        own = EagerTruth(network, make_trunk(network.backbone, network.taps, x, trunk, network.reading), [x])
        counts = {}
        for name, truth in {BEFORE: EagerTruth(network, backbone, [x]), AFTER: own}.items():
            comparison, (expected,) = Comparison(), truth.truths()
            comparison.add(merged_answer(calls[name](x)), expected)
            counts[name] = comparison.counts()
            refuse(wrong_in_words(counts[name]), name)
        captures = {name: [call] for name, call in calls.items()}
        times = time_captures(captures, [x], rounds=requests, warm_up=WARM_UP, repeat=1)
        profiles = {name: profile_requests(call, x, requests, out / f"{name}.json") for name, call in calls.items()}
    finally:
        runner.close()
    return BeforeAndAfter(profiles, times, counts, own.samples_by_exit())


def saved_model(
    checkpoint: Path, batch: int, backbone: str | None = None, modules: str | None = None
) -> tuple[UserModel, str]:
    """Load a checkpoint and the sample images of ``auxhead demo``, or random numbers if there are none.

    Returns:
        The network with a batch for it, and in words where the batch is from.

    Raises:
        BadInput: files that are missing or damaged, or as :func:`load_network`, which says what the others are.
    """
    loaded = load_network("auxhead-tune profile", checkpoint, backbone, modules)
    prepare = loaded.preprocessing
    paths = sorted((checkpoint / "examples").glob("*.png"))
    if not paths:  # the demo copies no images that its user has as files
        noise = torch.randn(batch, prepare.channels, prepare.crop, prepare.crop)
        return UserModel(loaded.network, noise), "random numbers"
    images = loaded.read_images([own_file(checkpoint, f"examples/{path.name}") for path in paths])
    return UserModel(loaded.network, repeated(images, batch)), f"pictures of {checkpoint / 'examples'}"


def repeated(x: Tensor, batch: int) -> Tensor:
    """Return ``batch`` samples of x, starting over after the last one."""
    return torch.cat([x] * -(-batch // len(x)))[:batch]  # keeps channels_last, which indexing would not


#: The kind of these records.
KIND = "profile"
#: The variant before, by its name in the benchmark.
NAIVE = "eager-naive-item@as_is"


def profile_records(found: BeforeAndAfter, cell: Cell, runner: str, environment: dict[str, Any]) -> list[Record]:
    """Return two records of one run: of naive early exit, and of ``runner`` (kind of runner, "@", kind of trunk)."""
    run = secrets.token_hex(6)
    answers = {name: summary(times.host) for name, times in found.times.items()}
    before = {"role": BEFORE, "variant": NAIVE, "host_us": answers[BEFORE]["median"]}
    before["host_ratio"] = answers[AFTER]["median"] / answers[BEFORE]["median"]
    return [
        Record(
            KIND,
            cell.as_json(),
            variant,
            run,
            environment,
            exits=OWN,
            protocol={
                "requests": found.profiles[name].requests,
                "warm_up": WARM_UP,
                **PROTOCOL,
                "order": f"{PROTOCOL['order']}, without a profiler; then one after the other under it",
                "samples_by_exit": found.samples_by_exit,
            },
            host_us=answers[name],
            paired=[before] if name == AFTER else [],
            measured={"call_us": percentiles(found.times[name].call[0])._asdict(), **_of_profile(found.profiles[name])},
            correctness=found.counts[name],
            notes=found.problems if name == AFTER else [],
        )
        for name, variant in ((BEFORE, NAIVE), (AFTER, runner))
    ]


def _of_profile(profile: RequestProfile) -> dict[str, Any]:
    return {
        "launches": sum(profile.calls_by_request(LAUNCHES)) / profile.requests,
        "graph_launches": sum(profile.calls_by_request(GRAPH_LAUNCHES)) / profile.requests,
        "kernels": profile.kernels,
        "copies": profile.copies,
        "memsets": profile.fills,
        "kernel_us": profile.kernel_us,
        "busy_us": profile.busy_us,
        "api": [{"name": row.name, "calls": row.calls, "host_us": row.host_us} for row in profile.api],
        "allocations": sum(profile.calls_by_request(ALLOCATIONS)),
        "waits": sum(profile.calls_by_request(SYNCHRONISATIONS)),
    }


def run_profile(
    model: str | None,
    checkpoint: Path | None,
    *,
    backbone: str | None,
    modules: str | None,
    exits: str,
    trunk: str,
    batch: int | None,
    requests: int,
    out: Path,
) -> bool:
    """Measure, print and keep; returns whether the runner is in a steady state. The arguments are the options.

    Raises:
        BadInput: no CUDA device, no such factory or checkpoint, or a network that cannot be run like this.
    """
    console = plain_console()
    saved = None if checkpoint is None else saved_model(checkpoint, batch or 1, backbone, modules)
    factory = None if model is None else load_factory(model)
    device = this_device(KIND, ": launches and CUDA API calls are counted there")
    make_output_directory(out)
    if saved is not None:
        subject, made_of = saved
    else:
        assert factory is not None
        subject, made_of = factory(), "the factory's batch"
    x = subject.example_input.to(device)
    x = x if batch in (None, len(x)) else repeated(x, batch)
    network = subject.network.to(device).eval()
    console.print(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; batches of {len(x)}, {made_of}\n"
        "before: eager PyTorch, plain heads in line, .item() after each, left once all samples are sure\n"
        f"after: {exits}, trunk {trunk}",
        soft_wrap=True,
    )
    if isinstance(network.backbone, SilencedModel):
        console.print(exits_table(network.backbone.exits))
    found = compare(network, x, exits=exits, trunk=trunk, requests=requests, out=out)
    where = {**environment(device), "clocks": clocks(device)}
    described = "" if checkpoint is None else str(read_description(checkpoint)["backbone"])
    cell = own_cell(model or backbone or described.rpartition(":")[2], network, x)
    records = profile_records(found, cell, f"{exits}@{trunk}", where)
    for record in records:
        append_record(out / "profile.jsonl", record)
    print_comparison(console, records)
    console.print(
        f"\nSaved in {out}: before.json, after.json (Chrome traces, for ui.perfetto.dev or chrome://tracing), "
        "profile.jsonl (appended: records)",
        soft_wrap=True,
    )
    return not found.problems
