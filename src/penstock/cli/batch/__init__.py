"""`penstock batch`: runs every row of a file through a model.

commands (the options), run (inside the guard: plan, run, report), progress_bar (while it runs), summary (the
report as lines).
"""
