"""``exits="auto"``: measures the runners on the user's own samples and picks the fastest for each batch size.

In: a network and samples, or a plan file. Out: a plan (what was measured and chosen) and its runner.
"""
