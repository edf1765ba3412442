"""The KV cache: blocks that running requests share, and that stay cached until their space is needed.

The rules are those of vLLM's block pool. Only full blocks can be found, by a hash over all tokens up to their
end. An unused block keeps its tokens; the block freed first is overwritten first, and of one request the last
block before the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.engines.sim.reply import PlannedReply


class Hashes(Protocol):
    """Hash of each full block of a sequence; equal hashes mean equal tokens from the start to its end."""

    def __getitem__(self, index: int, /) -> int: ...


class Chain:
    """Hashes of a prompt and an adapter's reply to it, each computed on demand."""

    def __init__(
        self, prompt: Sequence[int], reply: PlannedReply, block_size: int, adapter: str | None = None
    ) -> None:
        self._prompt = prompt
        self._reply = reply
        self._size = block_size
        self._root = hash(adapter) if adapter else 0
        self._hashes: list[int] = []

    def __getitem__(self, index: int, /) -> int:
        while len(self._hashes) <= index:
            self._append()
        return self._hashes[index]

    def _append(self) -> None:
        start = len(self._hashes) * self._size
        tokens = tuple(self._prompt[start : start + self._size])
        if len(tokens) < self._size:
            said, begun = self._reply.token_ids, start + len(tokens) - len(self._prompt)
            tokens += tuple(said[i % len(said)] for i in range(begun, begun + self._size - len(tokens)))
        before = self._hashes[-1] if self._hashes else self._root
        self._hashes.append(hash((before, tokens)))


@dataclass(eq=False, slots=True)
class Block:
    """A block of `block_size` tokens. hash: of its tokens and all before them, once it is full."""

    users: int = 1
    hash: int | None = None


class Cache:
    """All blocks of one engine. Each sequence has the list of its own blocks."""

    def __init__(self, size: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        """size: in blocks."""
        self._size = size
        self._block_size = block_size
        self._sharing = enable_prefix_caching
        self._blank = size
        self._unused: OrderedDict[Block, None] = OrderedDict()
        self._known: dict[int, Block] = {}
        self._twins: dict[int, list[Block]] = {}

    @property
    def usage(self) -> float:
        """Share of the blocks in use; the others may hold tokens, but can be reused."""
        return 1 - (self._blank + len(self._unused)) / self._size

    def admit(self, hashes: Hashes, tokens: int) -> list[Block] | None:
        """Cached blocks at the start of a sequence of `tokens`, now in use; None without room for the rest.

        They never include the last token, which must be computed to make the next one.
        """
        found = self._find(hashes, (tokens - 1) // self._block_size)
        unused = sum(1 for block in found if not block.users)
        missing = self._blocks(tokens) - len(found)
        if missing > self._blank + len(self._unused) - unused:
            return None
        for block in found:
            if not block.users:
                del self._unused[block]
            block.users += 1
        return found

    def extend(self, blocks: list[Block], hashes: Hashes, begin: int, end: int) -> bool:
        """Makes room for the tokens from `begin` to `end`; False, without effect, when there is none.

        Full blocks can be found from now on, also by a request of the same step.
        """
        missing = self._blocks(end) - len(blocks)
        if missing > self._blank + len(self._unused):
            return False
        for _ in range(missing):
            blocks.append(self._fresh())
        if self._sharing:
            for index in range(begin // self._block_size, end // self._block_size):
                self._list(blocks[index], hashes[index])
        return True

    def free(self, blocks: list[Block]) -> None:
        """Frees the blocks, the last one first, and empties the list."""
        while blocks:
            block = blocks.pop()
            block.users -= 1
            if block.users:
                continue
            if block.hash is None:
                self._blank += 1
            else:
                self._unused[block] = None

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _find(self, hashes: Hashes, most: int) -> list[Block]:
        found: list[Block] = []
        if self._sharing:
            for index in range(most):
                block = self._known.get(hashes[index])
                if block is None:
                    break
                found.append(block)
        return found

    def _fresh(self) -> Block:
        if self._blank:
            self._blank -= 1
        else:
            self._unlist(self._unused.popitem(last=False)[0])
        return Block()

    def _list(self, block: Block, hash: int) -> None:
        block.hash = hash
        if self._known.setdefault(hash, block) is not block:
            self._twins.setdefault(hash, []).append(block)

    def _unlist(self, block: Block) -> None:
        """Removes it from lookup. Another block with the same tokens, computed beside it, remains."""
        assert block.hash is not None
        twins = self._twins.get(block.hash, [])
        if self._known[block.hash] is not block:
            twins.remove(block)
        elif twins:
            self._known[block.hash] = twins.pop(0)
        else:
            del self._known[block.hash]
        if not twins:
            self._twins.pop(block.hash, None)
