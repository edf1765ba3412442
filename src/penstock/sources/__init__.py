"""Folders of files, wherever they are: on this node, on a hub, in a bucket, at any URL fsspec knows.

The engines fetch models by it and replicas adapters. `fetch` gives a folder on this node; what it had to
download lies in a cache, complete or not at all, once per node. Knows nothing of adapters, and of models only
which files of a repository are weights twice. All calls block: use them in threads.
"""

from penstock.sources.fetch import Only, children, fetch, fetch_all, fetch_stamped, stamp
from penstock.sources.fetch_model import brought, is_here
from penstock.sources.hub import use_fast_transfers
from penstock.sources.pin import hold
from penstock.sources.read_bytes import read
from penstock.sources.weights import model_files, tokenizer_files

__all__ = [
    "Only",
    "brought",
    "children",
    "fetch",
    "fetch_all",
    "fetch_stamped",
    "hold",
    "is_here",
    "model_files",
    "read",
    "stamp",
    "tokenizer_files",
    "use_fast_transfers",
]
