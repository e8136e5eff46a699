"""``auxhead-tune profile``: what one request costs, with naive early exit before and a runner after.

In: a user's network or a checkpoint. Out: two records, and Chrome traces of both.
"""
