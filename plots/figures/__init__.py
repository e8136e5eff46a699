"""The figures, a module each with one function ``draw``; ``registry`` lists them."""
