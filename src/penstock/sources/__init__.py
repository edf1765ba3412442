"""Folders of files from anywhere: this node, a hub, a bucket, any URL that fsspec knows.

Engines fetch models with it, replicas adapters. `fetch` returns a folder on this node; downloads are cached
once per node, completely or not at all. All calls block: run them in threads.

In the order of a call: `every_node`, `fetch`, `protocol` and folders, the kinds (`hub`, `bucket`,
`fsspec_store`), `cache`, `transfer`, `failures`; for models `fetch_model`.
"""

from penstock.sources.cache import pin
from penstock.sources.fetch import Only, children, fetch, fetch_with_version, sizes, version_of
from penstock.sources.fetch_model import is_here, model_files, tokenizer_files, with_local_sources
from penstock.sources.hub import use_fast_transfers

__all__ = [
    "Only",
    "children",
    "fetch",
    "fetch_with_version",
    "is_here",
    "model_files",
    "pin",
    "sizes",
    "tokenizer_files",
    "use_fast_transfers",
    "version_of",
    "with_local_sources",
]
