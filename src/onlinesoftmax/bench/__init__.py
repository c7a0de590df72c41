"""Benchmarks: cases, a clock, peers, a check against float64, a record.  Only the command line imports this.

Read run.py first: it measures one case, and every other file answers one of its questions.
"""
