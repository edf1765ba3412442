"""Commands that talk to a running service over HTTP; none imports Ray or a config.

options (that several have), service (the HTTP client of all), chat, status (and models), ctl (admin
endpoints), bench (the load generator, which is `penstock.bench`).
"""
