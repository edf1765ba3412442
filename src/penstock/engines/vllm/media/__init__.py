"""Media that requests name by URL: `connector` plugs into vLLM, `fetch` reads public addresses only."""
