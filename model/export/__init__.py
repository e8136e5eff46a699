"""``auxhead export``: a network as one file of all exits' logits, or as a file a stage, in ONNX or for PyTorch.

In: a network with early exits. Out: its files, compared with the network, and a JSON that says how to run them and
when to stop.
"""
