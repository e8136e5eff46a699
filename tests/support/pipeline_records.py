"""Made-up records of pipelines over two GPUs: two batches, two split sizes, every variant."""

from auxhead.autotune.records.record import Record

TAPS = ["layer1", "layer2", "layer3", "layer4"]
ENVIRONMENT = {"gpu": "X", "driver": "1", "torch": "2", "triton": "3", "cudnn": 9, "cuda": "13"}
PROTOCOL = {"rounds": 15, "captures": 5, "devices": 2, "cut": "layer2", "processes": 2}
#: Images a second without micro-batches; with them, of both split sizes, by variant.
LEVELS = {"one-gpu": 5000.0, "one-gpu-cudnn": 8000.0, "model-parallel": 4000.0}
SPLIT = {"tutorial": (5000.0, 4500.0), "pipelined-one-head": (7100.0, 7300.0), "pipelined-heads": (7000.0, 7200.0)}


def cell(batch):
    return {
        "model": "resnet50", "dtype": "float16", "batch": batch, "classes": 1000, "placement": "stages", "taps": TAPS,
        "input": [3, 224, 224],
    }  # fmt: skip


def measured(images, split_size):
    return {
        "images_s": {"median": images, "p20": images - 50, "p80": images + 50, "captures": [images] * 5},
        "batch": 120,
        "split_size": split_size,
    }


def pipeline_records():
    made = []
    for batch in (120, 512):
        rows = [(variant, images, None) for variant, images in LEVELS.items()]
        rows += [
            (f"{variant}@{size}", images, size)
            for variant, by_size in SPLIT.items()
            for size, images in zip((20, 40), by_size, strict=True)
        ]
        for variant, images, size in rows:
            of_batch = ("pipeline", cell(batch), variant, f"run {batch}", ENVIRONMENT, PROTOCOL)
            made.append(Record(*of_batch, exits="never", measured=measured(images, size)))
    return made
