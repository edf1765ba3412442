"""What answers rows: an engine in this process, a fleet behind Ray Serve, a URL, any deployment's method.

Above it: the window, which knows the protocol only. Each file here is one backend, beside what they share.
"""
