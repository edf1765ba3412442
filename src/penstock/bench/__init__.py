"""Load for any OpenAI-compatible service, and what it did with it. `penstock bench` is its command.

    report         a whole command: from `settings` over a `session` to files and an exit code
    probe          before any load: does the service answer, what does it understand, how long is a word
    crew           worker processes; each runs `worker`: when to ask (`load`), what (`work`), over which
                   connection (`client`), and what came back (`stream`) as one `Outcome` per request
    figures        outcomes to percentiles, rates, errors and goodput, which `table` and `page` show

It knows OpenAI's wire only; nothing of Penstock's own service.
"""
