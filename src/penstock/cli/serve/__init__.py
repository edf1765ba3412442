"""`penstock serve`, once its models are known.

port (is the address free), run (inside the guard: start, show, wait, stop), startup (its blocking steps),
ray_cluster (Ray and Serve), display (the terminal while it starts), greeting (what it prints when it serves),
durations (of an earlier start), started (which services run here; `penstock stop`), logs (`penstock logs`),
fleet_models (`penstock add` and `remove`).
"""
