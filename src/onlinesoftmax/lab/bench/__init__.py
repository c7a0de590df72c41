"""Benchmarks: cases, inputs, the other libraries, a check against float64, clocks and the record of a run.

Only the command line imports this folder.  Read measure.py first: it measures one case with the other files.
"""
