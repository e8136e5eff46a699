"""Findings of timed requests, one beside the other: some that take much longer, garbage collected and code loaded."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import fmean, median

from ...records.summaries import p99, percentiles
from ..trace import Trace
from .finding import Finding, found, times, us

#: Fewer requests tell nothing of one in a hundred.
_LEAST_REQUESTS = 20
#: The 99th percentile is a finding from so many medians on, and if it is so many microseconds longer.
_LEAST_RATIO, _LEAST_LONGER_US = 2.0, 100.0
#: A request is a long one from so many medians on.
_LONG_RATIO = 1.5
#: Collections and loads that take less of the requests' time, or fewer microseconds of each, are no finding.
_LEAST_SHARE, _LEAST_US = 0.01, 5.0


def find_jitter(trace: Trace) -> Iterator[Finding]:
    """Find that the longest of many timed requests take a multiple of the median."""
    samples = trace.seen.samples_us
    if len(samples) < _LEAST_REQUESTS:
        return
    middle, low, high = percentiles(samples)
    last = p99(samples)
    if last < _LEAST_RATIO * middle or last - middle < _LEAST_LONGER_US:
        return
    long = sum(one >= _LONG_RATIO * middle for one in samples)
    yield found(
        "jitter",
        f"Some requests take much longer than most: the 99th percentile is {last / middle:.1f} times the median.",
        (
            f"{len(samples)} requests without a profiler: median {us(middle)}, 99th percentile {us(last)}, longest "
            f"{us(max(samples))}",
            f"{long} of them took {_LONG_RATIO} times the median or more",
            "cost: the mean over the median",
        ),
        max(0.0, fmean(samples) - middle),
        spread_us=(low - middle, high - middle),
    )


def find_collections(trace: Trace) -> Iterator[Finding]:
    """Find that Python collects garbage within timed requests."""
    samples, collections = trace.seen.samples_us, trace.seen.collections
    if not samples or not collections:
        return
    by_request: dict[int, float] = defaultdict(float)
    for one in collections:
        by_request[one.request] += one.us
    cost = sum(by_request.values()) / len(samples)
    if cost < max(_LEAST_US, _LEAST_SHARE * median(samples)):
        return
    taken = [by_request[request] for request in range(len(samples))]
    yield found(
        "garbage-collection",
        f"Python collects garbage in {len(by_request)} of {len(samples)} requests, {us(max(taken))} in the longest.",
        [
            f"generation {generation}: {times(count)} in {len(samples)} requests, "
            f"{us(sum(one.us for one in collections if one.generation == generation))} together"
            for generation, count in sorted(Counter(one.generation for one in collections).items(), reverse=True)
        ],
        cost,
        (one.line for one in sorted(collections, key=lambda one: -one.us)),
        spread_us=(min(taken), max(taken)),
    )


def find_loads(trace: Trace) -> Iterator[Finding]:
    """Find that CUDA loads code within timed requests, beside those that load none."""
    samples = trace.seen.samples_us
    loads = [one for one in trace.seen.loads or () if one.request < len(samples)]  # else as the last one had ended
    if not loads:
        return
    loading = {one.request for one in loads}
    took = [samples[request] for request in sorted(loading)]
    others = [sample for request, sample in enumerate(samples) if request not in loading]
    cost, compared = None, f"requests take {us(median(took))}, the median"
    if others:
        usual = median(others)
        cost = sum(sample - usual for sample in took) / len(samples)
        compared = f"requests that load code take {us(median(took))}, others {us(usual)}; medians"
        if cost < max(_LEAST_US, _LEAST_SHARE * usual):
            return
    yield found(
        "code-loading",
        f"CUDA loads code in {len(loading)} of {len(samples)} requests, the longest of which takes {us(max(took))}.",
        (f"modules that were loaded: {len(loads)}, {sum(one.size for one in loads) / 1e6:,.2f} MB together", compared),
        cost,
        (one.line for one in sorted(loads, key=lambda one: -one.size)),
    )
