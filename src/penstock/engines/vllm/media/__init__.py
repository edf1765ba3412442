"""Media that requests name by URL: `connector` is vLLM's way to them, `fetch` reads public addresses only."""
