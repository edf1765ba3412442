"""Fixed limits on what clients send; configurable ones are fields of `GatewayConfig`.

docs/reference/limits.md lists all of them. Sizes in bytes, times in seconds.
"""

from __future__ import annotations

HEAD_BYTES = 64 * 1024
"""A request's head: its line and header fields together. The same again for the trailer of a chunked body."""

FIELDS = 256
"""Header fields of a request, trailer included."""

ADDED_BYTES, ADDED_FIELDS = 16 * 1024, 16
"""What ports of Penstock's own processes take beyond both: what a gateway adds to its client's head."""

FIELD_COST_BYTES = 128
"""What a header field takes in memory beside its own bytes."""

HEAD_S = 30.0
"""From the start of a connection, or of its next request, to the end of the request's head. Also how long a
client may take to read the end of its last answer, and to stop sending."""

PIPELINED = 16
"""Requests that a connection may send ahead while one of its answers is under way."""

WORK_AT_ONCE = 4096
"""Work with what clients send in one iteration of the event loop; between two, streams go on. A header field,
a chunk and a KiB count 1 each."""

REQUESTS_AT_ONCE = 16
"""New requests in one iteration: each counts as this part of `WORK_AT_ONCE`."""

CHUNKS_BEFORE_ACCEPTED = 64
"""Chunks of a body that are parsed before its request is accepted; the others wait for that."""

CHUNKS, CHUNK_BYTES = 16_384, 64
"""Chunks of a body: so many, and one more for each `CHUNK_BYTES` of it."""

HANDSHAKES_PER_ADDRESS, HANDSHAKES = 128, 512
"""TLS handshakes under way whose client has sent its first message: of one address, and of all."""

HEADS_PER_ADDRESS_BYTES = 16 * 2**20
"""Heads of requests not accepted yet, of one address together."""

BODY_PROGRESS_BYTES = 64 * 1024
"""This much of a request's body, or the rest of it, must arrive within each `HEAD_S`."""

JSON_ITEMS = 4_000_000
"""Commas of a JSON body, those inside of strings included: its values are about as many."""

FORM_PARTS = 64
"""Parts of a multipart form up to the one that names the model."""

NAME_CHARS = 512
"""The name of a model with its adapter."""

QUERY_PARAMETERS = 100
"""Parameters of a query."""

DISCARDED_BYTES = 64 * 2**20
"""What a client may still send after its answer; then the connection is reset."""
