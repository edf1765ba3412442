"""What follows from a config: `accelerators`, `placement`, `data_parallel`, `serve_options`, `prefill`,
`adapters`, `server_class`.
"""
