"""``make_runner``: the front door, which turns a network into a runner."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from torch import Tensor

from .auto.auto_runner import ON_DEMAND, AutoRunner
from .auto.candidates import ANY_TRUNK
from .auto.pass_times import STANDARD, check_budget
from .auto.plan import REMEMBERED, PlanFile
from .basics.arguments import check_batch, check_mode
from .listening.batches import Batch
from .network.early_exit_network import EarlyExitNetwork, check_network
from .runners.capture import NotCapturable
from .runners.checks import check_device, check_sizes, is_on_cuda, sizes_of
from .runners.packed import PackedRunner
from .runners.runner import EagerRunner, Runner
from .runners.table import EXITS, kind_of_runner
from .trunk.trunk import TRUNKS, check_kind, make_trunk


def make_runner(
    network: EarlyExitNetwork,
    example_input: Batch,
    *,
    exits: str = "auto",
    batch_sizes: Sequence[int] | str | None = None,
    lengths: Sequence[int] | None = None,
    trunk: str | None = None,
    budget: str = STANDARD,
    compact: bool = False,
    forks: Sequence[str] | None = None,
    plan: str | os.PathLike[str] | None = REMEMBERED,
) -> Runner:
    """Make a runner for a network; without options, the fastest that is found within half a minute.

    That is never slower, beyond noise, than the plain graph: ``exits="overlapped"`` on the backbone as it is, or
    compiled by ``torch.compile``. ``describe()`` says what it is, and by how much it is faster. What was chosen is
    remembered, and the next time made at once.

    Args:
        network: in eval mode.
        example_input: a batch [N, ...] of any size, on the network's device; for "auto" samples like those to come. For
            a backbone of several arguments a tuple or dict of tensors [N, ...], and of constants, which stay: requests
            are such batches then, and come in as rows of bytes; see :class:`PackedRunner`.
        exits: "auto" (for each batch size the one that is fastest on the example, measured now or read from ``plan``;
            "eager" where the example is not on a CUDA device, or no graph can hold the network), or a name of
            ``RUNNERS``: "eager" (no graph, any device), "overlapped" (one graph, every head computed), "polled" (a
            graph a segment, the host stops launching) or "gated" (one graph with conditional nodes, no host).
        batch_sizes: to capture; None is that of the example. For "auto" also "on_demand": that of the example, and each
            other one at its first request; see :class:`AutoRunner`.
        lengths: numbers of tokens, each of which is made ready: a request is padded to the next one, in the mask [N, T]
            that the batch has, by a name that ends in "attention_mask" or "padding_mask", and in all that has as many
            tokens. None is the example's number alone.
        trunk: how the backbone is run, see :func:`make_trunk`; for "auto" also "auto": the fastest of them. None is
            "auto" there, and "as_is" otherwise.
        budget: for "auto", the time to measure in: "standard", 30 s; "quick", 10 s, without the trunk "inductor",
            which has to be compiled; or "thorough", 60 s. What is under way then is not cut short, and the plain graph
            is measured on every trunk that was made.
        compact: for "polled", gather the samples that stay open into the captured batch sizes below, where that pays;
            see :class:`CompactingRunner`.
        forks: for "overlapped", the taps after which a launch of heads leaves the trunk, ``()`` for no overlap; None is
            by rule. See :class:`OverlappedRunner`.
        plan: for "auto", path of a JSON file that keeps what was measured, and is used where its conditions are still
            the same; see :class:`AutoRunner`. "auto" is one for this network in the user's cache folder
            (``$XDG_CACHE_HOME`` or ``~/.cache``, in ``auxhead/plans``). None measures, and keeps nothing.

    Raises:
        ValueError, TypeError: an argument that does not fit.
        RuntimeError: of a runner asked for by name, that the backbone cannot be captured in a CUDA graph, and the
            message names the layer; or autocast is on, or the current stream is being captured, where only "eager" can
            be made.

    Example:
        >>> backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
        >>> x = torch.randn(4, 3, 8, 8)
        >>> network = EarlyExitNetwork(backbone, {"1": FusedAuxHead(8, 5)}, rules=0.9, example_input=x).eval()
        >>> with make_runner(network, x) as runner:  # on a GPU the fastest one
        ...     answer = runner(x)
        >>> answer.label.shape
        torch.Size([4])
    """
    if exits not in EXITS:
        raise ValueError(f"exits: got {exits!r}, wants one of {list(EXITS)}")
    check_network(network)
    for name, given, default, its, why in (
        ("compact", compact, False, "polled", "gathers samples"),
        ("forks", forks, None, "overlapped", "has forks"),
        ("plan", REMEMBERED if plan is None else plan, REMEMBERED, "auto", "has a plan"),
        ("budget", budget, STANDARD, "auto", "measures"),
    ):
        if given != default and exits != its:
            raise ValueError(f"{name}: got {given!r} with exits={exits!r}, wants {default!r}: only {its!r} {why}")
    if trunk == ANY_TRUNK and exits != "auto":
        wanted = f"one of {list(TRUNKS)}: only 'auto' measures"
        raise ValueError(f"trunk: got {trunk!r} with exits={exits!r}, wants {wanted}")

    def make(network: EarlyExitNetwork, example: Tensor) -> Runner:
        if exits == "auto":
            return _measured(network, example, batch_sizes, ANY_TRUNK if trunk is None else trunk, budget, plan)
        kind, how = kind_of_runner(exits, compact=compact), "as_is" if trunk is None else trunk
        if not kind.graphs:
            return eager_runner(network, example, batch_sizes, how, kind=kind.imported_class())
        options = {} if forks is None else {"forks": forks}
        sizes = sizes_of(batch_sizes, example)
        made: Runner = kind.imported_class()(network, example, batch_sizes=sizes, trunk=how, **options)
        return made

    if lengths is not None or isinstance(example_input, (tuple, Mapping)):
        return PackedRunner(network, example_input, make, lengths)
    return make(network, example_input)


def _measured(
    network: EarlyExitNetwork,
    example_input: Tensor,
    batch_sizes: Sequence[int] | str | None,
    trunk: str,
    budget: str,
    plan: str | os.PathLike[str] | None,
) -> Runner:
    """Make the fastest runner; where there can be no graphs, the eager one, whose description says so."""
    device = getattr(example_input, "device", None)
    why = f"the network is on {device}, and CUDA graphs need a GPU."
    if getattr(device, "type", None) == "cpu":
        why += " A batch leaves it as soon as all samples are sure."
    if is_on_cuda(example_input):
        try:
            return AutoRunner(network, example_input, batch_sizes=batch_sizes, trunk=trunk, budget=budget, plan=plan)
        except NotCapturable as error:
            why, batch_sizes = str(error), None  # which were checked, and cannot be read again if they are a generator
    check_kind("trunk", trunk, more=(ANY_TRUNK,))
    check_budget(budget)
    if plan is not None and plan != REMEMBERED:
        PlanFile(plan, {})  # which checks the path
    check_batch("example_input", example_input)
    check_device(network, example_input.device)
    sizes = None if isinstance(batch_sizes, str) and batch_sizes == ON_DEMAND else batch_sizes
    return eager_runner(network, example_input, sizes, "as_is" if trunk == ANY_TRUNK else trunk, f"Eager: {why}")


def eager_runner(
    network: EarlyExitNetwork,
    example_input: Tensor,
    batch_sizes: Sequence[int] | str | None,
    trunk: str,
    *notes: str,
    kind: type[EagerRunner] = EagerRunner,
) -> EagerRunner:
    """Make a runner without graphs, with notes before those of the trunk."""
    if batch_sizes is not None:
        check_sizes(batch_sizes)
    check_kind("trunk", trunk)
    check_mode(network)
    network.check_taps(example_input)
    made = make_trunk(network.backbone, network.taps, example_input, trunk, network.reading)
    return kind(network, trunk=dataclasses.replace(made, notes=(*notes, *made.notes)))
