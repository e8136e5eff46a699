"""``auxhead export``: a network as a file of all exits' logits, a file a stage, or its answer; in ONNX or for PyTorch.

In: a network with early exits. Out: its files, compared with the network, and a JSON that says how to run them and
when to stop; the file of an answer stops by itself.
"""
