"""`penstock batch`: runs every row of a file through a model.

commands and their options, run (inside the guard: plan, run, report), progress_bar (while it runs), summary
(the report as lines).
"""
