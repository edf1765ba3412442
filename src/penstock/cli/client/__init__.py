"""Commands that talk to a running service over HTTP; none imports Ray or a config.

address (what `--url` may be), options (that several have), service (the HTTP client of all), chat, status
(and models), ctl (admin endpoints), bench (options of the load generator, which is `penstock.bench`).
"""
