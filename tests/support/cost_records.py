"""Hand-made records of the cost of heads, exits and requests; no number was measured."""

from auxhead.autotune.records.record import Record

ENVIRONMENT = {
    "gpu": "NVIDIA X100", "driver": "580", "cuda": "13.0", "cudnn": 91900, "torch": "2.11.0", "triton": "3.6.0",
    "auxhead": "0.1.0", "commit": "0123456789abcdef",
}  # fmt: skip


def record(kind, cell, variant, run="r1", exits="own", **rest):
    rest = {"protocol": {}, "environment": ENVIRONMENT, **rest}
    return Record(kind=kind, cell=cell, exits=exits, variant=variant, run=run, utc="2026-11-21T12:00:00+00:00", **rest)


#: Channels and side of the map at each tap.
TAPS = {"layer1": (64, 56), "layer2": (128, 28), "layer3": (256, 14), "layer4": (512, 7)}


def head_records(floor=3.0, run="r1"):
    """The heads of a ResNet-18 in float16; the fused one takes a floor and 1.5 times what its bytes take."""
    found, bandwidth = [], 4.0e12
    for batch in (1, 8, 32, 128):
        for classes in (10, 1000):
            for tap, (channels, side) in TAPS.items():
                cell = {
                    "samples": batch, "channels": channels, "height": side, "width": side, "grid_h": 1, "grid_w": 1,
                    "layout": "channels_last", "pool": "avg", "classes": classes, "dtype": "float16",
                    "model": "resnet18", "tap": tap,
                }  # fmt: skip
                moved = 2 * (batch * channels * side * side + channels * classes) + 4 * batch * classes
                least = moved / bandwidth * 1e6
                us = {"fused": floor + 1.5 * least, "eager": 14 + 3 * least, "compiled": 6 + 2 * least, "bytes": least}
                for variant, taken in us.items():
                    protocol = {"bytes": moved, "bytes_per_second": round(bandwidth)} if variant == "bytes" else {}
                    device = {"median": taken, "p20": taken, "p80": taken, "captures": [taken]}
                    key = f"{run}-{batch}-{classes}-{tap}"
                    found.append(record("heads", cell, variant, key, "never", protocol=protocol, device_us=device))
    return found


def profile_records(run="r1", before_us=1872.0, after_us=214.0):
    """A request that becomes one launch."""
    cell = {
        "model": "mine:factory", "dtype": "float16", "batch": 1, "classes": 10, "taps": ["layer1", "layer2", "layer3"],
        "input": [3, 224, 224], "placement": "own",
    }  # fmt: skip
    api = {
        "before": [
            ("cudaLaunchKernel", 80, 400.0), ("cuLaunchKernelEx", 17, 90.0), ("cudaMemcpyAsync", 6, 60.0),
            ("cudaStreamSynchronize", 3, 45.0), ("cudaMemsetAsync", 1, 5.0), ("cudaEventRecordWithFlags", 4, 4.0),
            ("cudaStreamIsCapturing", 8, 3.0),
        ],
        "after": [
            ("cudaGraphLaunch", 1, 31.0), ("cudaMemcpyAsync", 2, 9.0), ("cudaStreamWaitEvent", 2, 1.5),
        ],
    }  # fmt: skip
    counts = {
        "before": {"launches": 97.0, "graph_launches": 0.0, "kernels": 97.0, "copies": 6.0, "memsets": 1.0,
                   "kernel_us": 268.6, "busy_us": 268.6, "allocations": 0, "waits": 60},
        "after": {"launches": 1.0, "graph_launches": 1.0, "kernels": 23.0, "copies": 2.0, "memsets": 0.0,
                  "kernel_us": 160.6, "busy_us": 152.0, "allocations": 0, "waits": 0},
    }  # fmt: skip
    found = []
    sides = (("before", "eager-naive-item@as_is", before_us), ("after", "overlapped@cudnn", after_us))
    for side, variant, us in sides:
        pair = {"role": "before", "variant": sides[0][1], "host_us": before_us, "host_ratio": after_us / before_us}
        rows = [{"name": name, "calls": calls, "host_us": host} for name, calls, host in api[side]]
        call = {"median": us / 2, "p20": us / 2.2, "p80": us / 1.8}
        found.append(
            record(
                "profile", cell, variant, run,
                protocol={"requests": 20, "samples_by_exit": {"layer1": 0, "layer2": 0, "layer3": 0, "classifier": 1}},
                host_us={"median": us, "p20": 0.9 * us, "p80": 1.1 * us, "captures": [us]},
                paired=[pair] if side == "after" else [],
                measured={"call_us": call, **counts[side], "api": rows},
                correctness={"samples": 1, "differing": 0, "differing_near": 0, "near": 0, "confidence_off": 0},
            )
        )  # fmt: skip
    return found
