"""The benchmark of functions with a head: forward and backward of hidden states, a weight and targets.

`cases` has their cases, `peers` the ways to compute them, `reference` the exact results of some rows; `run` measures.
"""
