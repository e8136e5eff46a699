"""One observed forward of a model: every operator, every call of a layer, and what each value was made from.

In: a module and a batch. Out: a ``Recording``, which others ask where heads may stand, what exits a model has, and how
much work is done where.
"""
