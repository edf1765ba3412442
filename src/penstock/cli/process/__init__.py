"""What a command does with its own process, whatever its subject.

guard (runs the work in a child and leaves nothing behind), output (terminal and log file), failure (exit
codes and sentences).
"""
