"""Made-up records of pipelines over two GPUs: two batches, two split sizes, every variant, and timelines."""

from auxhead.autotune.records.record import Record

TAPS = ["layer1", "layer2", "layer3", "layer4"]
ENVIRONMENT = {"gpu": "X", "driver": "1", "torch": "2", "triton": "3", "cudnn": 9, "cuda": "13"}
PROTOCOL = {"rounds": 15, "captures": 5, "devices": 2, "cut": "layer2", "processes": 2}
#: Images a second without micro-batches; with them, of both split sizes, by variant and exits.
LEVELS = {"one-gpu": 5000.0, "one-gpu-cudnn": 6000.0, "model-parallel": 4000.0}
SPLIT = {
    ("tutorial", "never"): (5000.0, 4500.0),
    ("pipelined-one-head", "never"): (7100.0, 7300.0),
    ("pipelined-heads", "never"): (7000.0, 7200.0),
    ("pipelined-exits", "25/75"): (7500.0, 8000.0),
    ("pipelined-exits", "50/50"): (8800.0, 9600.0),
    ("pipelined-exits", "75/25"): (8900.0, 9700.0),
}


def cell(batch):
    return {
        "model": "resnet50", "dtype": "float16", "batch": batch, "classes": 1000, "placement": "stages", "taps": TAPS,
        "input": [3, 224, 224],
    }  # fmt: skip


def measured(images, split_size):
    found = {
        "images_s": {"median": images, "p20": images - 50, "p80": images + 50, "captures": [images] * 5},
        "batch": 120,
        "split_size": split_size,
    }
    if split_size is not None:
        found |= {"pieces": {"graph_ms": [4.5, 3.5], "link_ms": [0.25]}, "bound_images_s": 10000.0}
    return found


def pipeline_records():
    made = []
    for batch in (120, 512):
        rows = [(variant, "never", images, None) for variant, images in LEVELS.items()]
        rows += [
            (f"{variant}@{size}", exits, images, size)
            for (variant, exits), by_size in SPLIT.items()
            for size, images in zip((20, 40), by_size, strict=True)
        ]
        for variant, exits, images, size in rows:
            of_batch = ("pipeline", cell(batch), variant, f"run {batch}", ENVIRONMENT, PROTOCOL)
            made.append(Record(*of_batch, exits=exits, measured=measured(images, size)))
    return made
