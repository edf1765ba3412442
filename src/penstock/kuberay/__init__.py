"""`penstock kuberay`: configs in, the manifest of a Kubernetes cluster out. Asks neither Kubernetes nor Ray.

options (the site), secrets (what must not stand in a manifest), worker_groups (how many pods of which size),
manifest (all documents), template (what stands in all of them, `manifest.yaml`).
"""
