"""Processes of one machine: who ends with whom (`lifeline`), ending all below one (`tree`), which the kernel
runs first (`cpu_turns`), what a Ray of our own runs without (`lean_ray`), and what it prints (`quiet`). Knows
nothing of engines.
"""
