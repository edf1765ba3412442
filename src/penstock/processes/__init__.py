"""Processes of one machine: who ends with whom (`lifeline`), ending all below one (`tree`), and which the
kernel runs first (`cpu_turns`). Knows nothing of engines.
"""
