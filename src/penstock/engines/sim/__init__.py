"""The simulated engine: real HTTP, real streams, modelled time. For tests, load and capacity questions."""
