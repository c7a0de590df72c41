"""The benchmark of sharded rows: every process of a group measures its shard, and the slowest process counts.

The command line runs it under torchrun, and the report reads its results.  Read measure.py first.
"""
