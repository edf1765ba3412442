"""`penstock batch`: runs every row of a file through a model.

commands and their options, run (inside the guard: plan, run, report), terminal (what it shows).
"""
