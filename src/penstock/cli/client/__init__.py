"""Commands that talk to a running service over HTTP; none imports Ray or a config.

service (the HTTP client of all), chat, status (and models), batches, ctl (admin endpoints), fleet (by its
file), keys (a file of them), litellm (keys of its proxy, for that file), usage, bench (the load generator,
which is `penstock.bench`).
"""
