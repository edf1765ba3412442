"""What users see of a run.

command (the whole command, with files and exit code), progress (while it runs), table (terminal), record
(JSON and JSON lines), series (values over time) and page (HTML).
"""
