"""Repeats: what was checked, chosen and launched once is made again with other tensors in a fraction of the time.

In: a launch of a head or of a network's exits that was made. Out: the same for other inputs of the same layout, bit for
bit, on the same stream. Whoever keeps one knows whether what it rests on is unchanged: model/heads/repeats.py.
"""
