"""``auxhead-tune bench``: this project's runners against naive heads, plain graphs and torch.compile.

In: cells, or a user's network. Out: records of every variant's time on the device and to the answer.
"""
