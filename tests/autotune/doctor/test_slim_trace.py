"""Slim traces keep what findings are made from, in order, and drop the rest."""

import gzip
import json
from pathlib import Path
from typing import Any

from support.example_traces import event, kernel, request, runtime, trace_of
from support.slim_trace import slim, write_slim


def frame(name: str, begin: float) -> dict[str, Any]:
    return event("python_function", name, begin, 5.0, **{"Python id": 4, "Python parent id": 3, "Ev Idx": 9})


def a_trace() -> dict[str, Any]:
    """A request of 50 us from 1000 us on, with everything around it that a profiler writes."""
    launch = event("cuda_runtime", "cudaLaunchKernel", 1010.5, 4.0, cbid=211, correlation=7, **{"External id": 3})
    flow = {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 7, "pid": 0, "tid": 7, "ts": 1020.0, "bp": "e"}
    frames = ("my_net.py(12): forward", "nn.Module: Net_0", "torch/nn/functional.py(3): relu", "<built-in method mul>")
    events = [kernel(1020.0, 10.0), launch, flow, runtime("cudaPeekAtLastError", 1015.0, 0.3), request(1000.0, 50.0)]
    events += [frame(name, 1001.0 + index) for index, name in enumerate((*frames, "typing.py(9): cast"))]
    whole = trace_of(*events)
    whole["traceEvents"] = [each for each in whole["traceEvents"] if each.get("ts", 0) >= 1000 or each["ph"] != "X"]
    return {**whole, "traceName": "/somebody/trace.json", "auxheadDoctor": {"requests": 3}, "deviceProperties": [{}]}


def test_what_findings_need_stays() -> None:
    kept = slim(a_trace())
    assert kept["auxheadDoctor"] == {"requests": 3} and kept["deviceProperties"] == [{}] and "traceName" not in kept
    said = [(each["ts"], each["cat"], each["name"]) for each in kept["traceEvents"]]
    assert said == [
        (0.0, "user_annotation", "auxhead request"),
        (1.0, "python_function", "my_net.py(12): forward"),
        (2.0, "python_function", "nn.Module: Net_0"),
        (10.5, "cuda_runtime", "cudaLaunchKernel"),
        (20.0, "kernel", "void some_kernel(float*)"),
    ]
    assert kept["traceEvents"][3]["args"] == {"correlation": 7}
    assert kept["traceEvents"][4]["args"] == {"device": 0, "stream": 7}


def test_one_trace_gives_the_same_bytes_each_time(tmp_path: Path) -> None:
    files = [tmp_path / "one.json.gz", tmp_path / "another.json.gz"]
    trace = a_trace()
    sizes = [write_slim(trace, file) for file in files]
    reordered = {**dict(reversed(trace.items())), "traceEvents": trace["traceEvents"][::-1]}
    write_slim(reordered, files[1])
    assert files[0].read_bytes() == files[1].read_bytes() and sizes[0] == files[0].stat().st_size
    assert json.loads(gzip.decompress(files[0].read_bytes())) == slim(trace)
