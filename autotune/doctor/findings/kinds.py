"""``KINDS``: the kinds of findings, what each is, and what helps against it; and how two of a kind are told apart."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple


class Kind(NamedTuple):
    """What a kind of finding is, and what helps."""

    what: str
    remedy: str = ""
    snippet: str = ""


#: What findings are about; those that make answers wrong first.
KINDS = {
    "race": Kind(
        "streams read and write one tensor without order",
        "Let the stream that comes second wait for the one that comes first: else the answer is right by luck.",
        "other = torch.cuda.current_stream()\nother.wait_stream(side)  # before what side has written is read\n",
    ),
    "freed-in-use": Kind(
        "a tensor is freed while another stream uses it",
        "Tell the allocator that the other stream uses the tensor, or keep it until the streams are joined.",
        "x.record_stream(side)  # its memory is reused only when side has done with it; or keep x until then\n",
    ),
    "unrecorded-event": Kind(
        "an event is waited for before it is recorded",
        "An event that was never recorded is no wait: record it behind the work, and wait for it after that.",
        """\
event = torch.cuda.Event()
event.record(producer)  # behind what is waited for
consumer.wait_event(event)  # only then
""",
    ),
    "mixed-devices": Kind(
        "streams of several devices mixed up",
        "Make each device's streams and events on it, and be on it while work is launched there.",
        """\
with torch.cuda.device(x.device):
    stream = torch.cuda.Stream(x.device)
    with torch.cuda.stream(stream):
        y = f(x)
""",
    ),
    "default-stream": Kind(
        "work meant for another stream runs on the one that all else runs on",
        "Launch what is to run beside the rest inside of the context of its stream, between a wait of that "
        "stream for its input and a wait for its result.",
        """\
side = torch.cuda.Stream(priority=0)  # once; the trunk's has priority=-1
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    answer = head(x)
y = next_block(x)  # beside it
torch.cuda.current_stream().wait_stream(side)
""",
    ),
    "stream-class": Kind(
        "the class torch.cuda.Stream(s) in place of the context torch.cuda.stream(s)",
        "`torch.cuda.Stream(s)` makes a stream; `torch.cuda.stream(s)` is the context that runs a block on s.",
        "with torch.cuda.stream(s):  # a small s\n    y = head(x)\n",
    ),
    "priority": Kind(
        "the side stream is not lower in priority than the trunk",
        "Run the trunk on a stream of higher priority: the default stream has the lowest there is, so that none can be "
        "lower.",
        """\
trunk = torch.cuda.Stream(priority=-1)  # sooner
side = torch.cuda.Stream(priority=0)  # later
trunk.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(trunk):
    y = model(x)  # forks its heads to side
torch.cuda.current_stream().wait_stream(trunk)
""",
    ),
    "launch-bound": Kind(
        "kernels are shorter than their launches",
        "Launch the request as one CUDA graph, or less and larger kernels: torch.compile, a larger batch, "
        "heads of one launch. Streams gain nothing while launches are what takes the time.",
        """\
# 1. an EarlyExitNetwork: a runner is such a graph
from auxhead.model import make_runner

runner = make_runner(network, x)
out = runner(x)  # in each request

# 2. any other model
graph, static = torch.cuda.CUDAGraph(), x.clone()
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.no_grad(), torch.cuda.stream(side):
    model(static)  # warm-up
torch.cuda.current_stream().wait_stream(side)
with torch.no_grad(), torch.cuda.graph(graph):
    out = model(static)
static.copy_(x)  # in each request
graph.replay()
""",
    ),
    "host-wait": Kind("the host waits for the device within a request"),  # what helps depends on how it waits
    "allocation": Kind(
        "memory is taken from the driver within a request",
        "Take it once, before the first request, and write into it; call neither torch.cuda.empty_cache() "
        "nor pin_memory() in the loop, which make PyTorch give back what it would use again.",
        """\
pinned = torch.empty(batch.shape, dtype=batch.dtype, pin_memory=True)  # once
x = torch.empty(batch.shape, dtype=batch.dtype, device=device)
pinned.copy_(batch)  # in each request
x.copy_(pinned, non_blocking=True)
""",
    ),
    "pageable-copy": Kind(
        "copies from or to pageable memory within a request",
        "Keep what is copied in pinned memory, and copy with non_blocking=True; a DataLoader does it with "
        "pin_memory=True.",
        """\
pinned = batch.pin_memory()  # once, or DataLoader(..., pin_memory=True)
x = pinned.to(device, non_blocking=True)
""",
    ),
    "full-device": Kind(
        "kernels fill all SMs, so that nothing runs beside them",
        "No stream makes room on a full device: make the side's work smaller (one launch a head), or run it "
        "where the trunk is small, behind later layers or at smaller batches.",
        """\
from auxhead.model import fuse_aux_heads

report = fuse_aux_heads(model)  # each head one launch of a few blocks
print(report.replaced.keys(), report.left_alone)
""",
    ),
    "gate-waits": Kind(
        "a head is on the critical path of a gate",
        "Let the segment after the head run beside it, and ask for the answer one segment later: a gate "
        "then costs nothing, and skips all but that segment; or take a runner that is measured.",
        """\
from auxhead.model import EarlyExitNetwork, make_runner

network = EarlyExitNetwork(backbone, heads, rules=0.9)
with make_runner(network, images) as runner:
    answer = runner(images)
""",
    ),
    "fusible-heads": Kind(
        "heads that could be fused",
        "Swap them in place, with their parameters; or let an EarlyExitNetwork run them beside the trunk.",
        """\
from auxhead.model import fuse_aux_heads

report = fuse_aux_heads(model, include={names})
print(report.replaced.keys(), report.left_alone)
""",
    ),
    "recapture": Kind(
        "a graph is captured or instantiated within a request",
        "Capture once for each shape of input, keep the graph, and write each request's input into the "
        "tensor that it was captured with.",
        """\
graphs = {}  # by shape, kept
if x.shape not in graphs:
    static, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(static)
    graphs[x.shape] = static, graph, out
static, graph, out = graphs[x.shape]
static.copy_(x)
graph.replay()
""",
    ),
    "cudnn-benchmark": Kind(
        "cuDNN tries its algorithms within a request",
        "Give inputs of few shapes, each once before the requests that count, or turn the trials off.",
        """\
torch.backends.cudnn.benchmark = False  # or, for shapes that are known:
for size in sizes:
    model(torch.zeros(size, device=device))  # once, before the first request
""",
    ),
    "synchronous-copy": Kind(
        "copies or fills without Async within a request",
        "Call the function that ends in Async, on a stream, with pinned memory of the host; or let PyTorch copy and "
        "fill.",
        """\
runtime.cudaMemcpyAsync(target, source, size, kind, torch.cuda.current_stream().cuda_stream)
y.copy_(x, non_blocking=True)  # or in PyTorch; y.zero_() in place of cudaMemset
""",
    ),
    "garbage-collection": Kind(
        "Python collects garbage within a request",
        "Collect between requests, and not within: freeze what was made before the first one.",
        """\
gc.collect()  # once, before the first request
gc.freeze()  # what is there now is not looked through again
gc.disable()  # and gc.collect() where nobody waits
""",
    ),
    "code-loading": Kind(
        "CUDA loads code within a request",
        "Kernels are loaded when they are first launched, and those of Triton or NVRTC are compiled before: run each "
        "path and each shape once before the first request that counts.",
        """\
for example in examples:  # of each shape, and of each way through the model
    model(example)
torch.cuda.synchronize()
""",
    ),
    "jitter": Kind(
        "some requests take much longer than most",
        "Look for what they alone have: a collection of garbage, a new shape, another process on the host's cores; a "
        "graph leaves the host least to do.",
        """\
os.sched_setaffinity(0, {4, 5})  # cores that nothing else runs on
torch.set_num_threads(2)
""",
    ),
    "layout-transposes": Kind(
        "cuDNN transposes what convolutions read or write",
        "Keep the model and its input in channels_last, for which cuDNN's kernels of tensor cores are made.",
        """\
model = model.to(memory_format=torch.channels_last)  # once
x = x.to(memory_format=torch.channels_last)  # where it is made
""",
    ),
    "dtype-casts": Kind(
        "tensors are converted to another dtype within a request",
        "Convert weights once, before the first request, and make the input in the dtype that the model computes in; "
        "autocast converts weights anew in each request.",
        """\
model = model.half()  # once, in place of torch.autocast in each request
x = torch.empty(shape, dtype=torch.float16, device=device)  # where it is made
""",
    ),
    "tf32-off": Kind(
        "float32 is multiplied without tensor cores",
        "Let matrix products and convolutions take TF32, which rounds what they read to 10 bits of mantissa: compare "
        "the answers.",
        """\
torch.set_float32_matmul_precision("high")  # matrix products
torch.backends.cudnn.conv.fp32_precision = "tf32"  # convolutions
""",
    ),
}
#: Kinds that make answers wrong.
WRONG = ("race", "freed-in-use", "unrecorded-event", "mixed-devices")


def place_of_finding(kind: str, lines: Sequence[str]) -> tuple[str, str]:
    """Return the kind and the name of the file that it is in, "" if unknown: numbers of lines change with each edit."""
    place = lines[0].partition(" in ")[0] if lines else ""
    file, colon, number = place.rpartition(":")
    return kind, PurePath(file if colon and number.isdecimal() else place).name
