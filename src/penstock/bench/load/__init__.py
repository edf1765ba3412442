"""Worker processes that send requests and time each event of the responses.

workers (the parent's side), worker (a process, and whether it was in the way), driver (one level), arrivals,
trace, lengths, text, conversations (what to send), target, client (HTTP), stream (events) and outcome (record
of a request).
"""
