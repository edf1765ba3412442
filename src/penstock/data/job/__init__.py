"""`penstock batch`: runs every row of an input once, through any crash, and writes one output.

In the order of a row: api, spec, manifest, validation (preview), job, pending, prefix, queue, driver,
protocol, worker, ray_workers, report, output.
"""
