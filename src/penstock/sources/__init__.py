"""Folders of files from anywhere: this node, a hub, a bucket, any URL that fsspec knows.

Engines fetch models with it, replicas adapters. `fetch` returns a folder on this node; downloads are cached
once per node, completely or not at all. All calls block: run them in threads.

In the order of a call: `every_node`, `fetch`, `protocol` and folders, the kinds (`hub`, `bucket`,
`fsspec_store`), `cache`, `transfer`, `failures`; for models `fetch_model`.
"""

from penstock.sources.cache import pin as pin
from penstock.sources.fetch import Only as Only
from penstock.sources.fetch import children as children
from penstock.sources.fetch import fetch as fetch
from penstock.sources.fetch import fetch_with_version as fetch_with_version
from penstock.sources.fetch import version_of as version_of
from penstock.sources.fetch_model import is_here as is_here
from penstock.sources.fetch_model import model_files as model_files
from penstock.sources.fetch_model import tokenizer_files as tokenizer_files
from penstock.sources.fetch_model import with_local_sources as with_local_sources
from penstock.sources.hub import use_fast_transfers as use_fast_transfers
