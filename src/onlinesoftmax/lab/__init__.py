"""All that measures and checks: verify (every kernel against float64), bench and tune (times), report (their page).

These folders import the library; only the command line imports them.
"""
