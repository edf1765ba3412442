"""Worker processes that send requests and time each event of the responses.

workers (the parent's side), worker (a process), driver (one level), arrivals, trace, lengths, text,
conversations (what to send), target, client (HTTP), stream (events), outcome (a request's record), client_health.
"""
