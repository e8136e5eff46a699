"""``auxhead-tune profile``: the cost of one request under naive early exit and under a runner.

In: a user's network or a checkpoint. Out: two records, and Chrome traces of both.
"""
