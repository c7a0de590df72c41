"""The benchmark of sharded rows: every process of a group measures its shard, and the slowest process counts.

Only the command line imports this folder, under torchrun.  Read run.py first.
"""
