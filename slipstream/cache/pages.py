"""Paged KV bookkeeping: who holds which page, and which pages other requests may reuse.

A page is `page_size` consecutive cache positions. This file moves no data and imports no torch: the
target turns page numbers into memory. Two ideas beyond the usual:

- *Homes.* Attention on a CPU reads pages in place, so a row whose pages are one contiguous run
  costs one plain view. Each table therefore gets a soft claim on an aligned extent sized for the
  tokens it expects. Claims bend before requests fail: when nothing else is left, anyone takes a
  claimed page.
- *Prefixes.* Only full pages of verified tokens are ever published. The key of a page is a keyed
  hash of its tokens chained to its parent's key, so equal keys mean equal token prefixes.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from slipstream.errors import InvalidConfig

_FREE, _BUSY = 0, 1


class PagePool:
    """A fixed number of pages with reference counts, a prefix index and LRU reuse.

    A page is *held* (referenced by tables), *cached* (unreferenced, content reusable by prefix) or
    *free*. Cached pages are evicted least recently used first, children before their parents.
    Raises `InvalidConfig` on sizes below 1.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise InvalidConfig(
                f"A page pool of {num_pages} pages of {page_size} tokens is empty; "
                "use 1 or more of each."
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._refs = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._index: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        # One byte a page so that searches run at C speed: `_state` is busy for held or cached
        # pages, `_closed` also for pages inside somebody's home.
        self._state = bytearray(num_pages)
        self._closed = bytearray(num_pages)
        self._homes = bytearray(num_pages)
        self._free = num_pages
        self._root = secrets.token_bytes(16)

    @property
    def available(self) -> int:
        """Pages that can be handed out now: free ones and cached ones nobody holds."""
        return self._free + len(self._cached)

    @property
    def cached(self) -> int:
        """Unreferenced pages whose content can still be adopted by prefix."""
        return len(self._cached)

    def refs(self, page: int) -> int:
        """How many tables hold `page`."""
        return self._refs[page]

    def reset_prefixes(self) -> None:
        """Forget all reusable content; pages held by running tables stay theirs."""
        for key in self._index.values():
            self._keys[key] = None
        self._index.clear()
        for page in self._cached:
            self._set_free(page)
        self._cached.clear()

    # --- for PageTable only -------------------------------------------------------------------

    def chain(self, parent: bytes | None, tokens: Sequence[int]) -> bytes:
        """Key of a full page: hash of its tokens under the key of the page before it."""
        content = array("q", tokens).tobytes()
        return hashlib.blake2b(content, digest_size=16, key=parent or self._root).digest()

    def adopt(self, key: bytes) -> int | None:
        """Hold the page published under `key`, or None."""
        page = self._index.get(key)
        if page is not None:
            if self._refs[page] == 0:
                del self._cached[page]
            self._refs[page] += 1
        return page

    def publish(self, page: int, key: bytes) -> None:
        """Make a held page's content reusable; the first publisher of equal content wins."""
        if self._keys[page] is None and key not in self._index:
            self._keys[page] = key
            self._index[key] = page

    def take(self, wanted: int | None, *, at_home: bool) -> int:
        """A page to write to: `wanted` if it is there to be had, else the least painful other one.

        Inside the caller's home a cached page is evicted to keep the run contiguous; outside, only
        a page that is free and unclaimed counts as there to be had. The caller checked `available`.
        """
        page = -1
        if wanted is not None and wanted < self.num_pages:
            usable = self._refs[wanted] == 0 if at_home else self._closed[wanted] == _FREE
            page = wanted if usable else -1
        if page < 0:
            page = self._closed.find(_FREE)
        if page < 0:
            page = self._state.find(_FREE)
        if page < 0:
            page = next(iter(self._cached))
        self._hold(page)
        return page

    def drop(self, pages: Sequence[int]) -> None:
        """Give up one reference to each page, deepest first so that parents are evicted last."""
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self._keys[page] is None:
                    self._set_free(page)
                else:
                    self._cached[page] = None

    def claim(self, pages: int, after: int | None) -> range:
        """A home of about `pages` pages, as long as possible; an empty range if the pool is
        crowded.

        After adopted pages (`after` is the last) the home continues them if it can. Otherwise homes
        are powers of two at aligned places: rows of like size then sit at equal strides, which lets
        the target attend to many rows through one view.
        """
        if after is not None:
            run = range(after + 1, min(after + 1 + pages, self.num_pages))
            if len(run) == pages and not self._closed.find(_BUSY, run.start, run.stop) >= 0:
                return self._mark(run, 1)
        size = 1 << max(pages - 1, 0).bit_length()
        while size > self.num_pages:
            size //= 2
        while size >= 2:
            home = self._open_block(size, pages)
            if home is not None:
                return self._mark(home, 1)
            size //= 2
        return range(0)

    def unclaim(self, home: range) -> None:
        """End a claim; pages still held keep their holders."""
        self._mark(home, 0)

    def _open_block(self, size: int, pages: int) -> range | None:
        """An extent without held or claimed pages: an empty aligned block of `size`, else any empty
        run of `pages`, else the aligned block whose cached content was used least recently.
        """
        for start in range(0, self.num_pages - size + 1, size):
            if self._closed.find(_BUSY, start, start + size) < 0:
                return range(start, start + size)
        if pages <= size:
            start = self._closed.find(bytes(pages))
            if start >= 0:
                return range(start, start + pages)
        tried: set[int] = set()
        for page in self._cached:
            start = page // size * size
            if start in tried or start + size > self.num_pages:
                continue
            tried.add(start)
            block = range(start, start + size)
            if not any(self._homes[p] or self._refs[p] for p in block):
                return block
        return None

    def _mark(self, home: range, value: int) -> range:
        for page in home:
            self._homes[page] = value
            self._closed[page] = self._state[page] | value
        return home

    def _hold(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._index[key]
            self._keys[page] = None
            del self._cached[page]
        else:
            self._free -= 1
        self._refs[page] = 1
        self._state[page] = self._closed[page] = _BUSY

    def _set_free(self, page: int) -> None:
        self._free += 1
        self._state[page] = _FREE
        self._closed[page] = self._homes[page]


class PageTable:
    """The pages of one request, in order: page i covers positions [i, i + 1) * page_size.

    `expected_tokens` sizes the home (see the module text); growing past it is fine. Read `pages`,
    never write to it.
    """

    def __init__(self, pool: PagePool, *, expected_tokens: int) -> None:
        self.pages: list[int] = []
        self._pool = pool
        self._expected = -(-max(expected_tokens, 1) // pool.page_size)
        self._home: range | None = None
        self._keys: list[bytes] = []

    def match(self, tokens: Sequence[int], *, spare: int = 0) -> int:
        """Adopt the longest published prefix of `tokens`; returns how many tokens it covers.

        Full pages only, and always fewer tokens than given: the last one has to be computed,
        because its logits are wanted. The last `spare` matching pages are left out. Call it once,
        on an empty table.
        """
        if self.pages:
            raise RuntimeError("match() needs an empty page table")
        size = self._pool.page_size
        for start in range(0, len(tokens) - size, size):
            key = self._pool.chain(
                self._keys[-1] if self._keys else None, tokens[start : start + size]
            )
            page = self._pool.adopt(key)
            if page is None:
                break
            self.pages.append(page)
            self._keys.append(key)
        if spare:
            self.trim(max(0, len(self.pages) - spare) * size)
        return len(self.pages) * size

    def reserve(self, tokens: int) -> bool:
        """Make the pages cover `tokens` positions. False, and nothing changed, if the pool is
        out.
        """
        need = -(-tokens // self._pool.page_size) - len(self.pages)
        if need <= 0:
            return True
        if need > self._pool.available:
            return False
        if self._home is None:
            last = self.pages[-1] if self.pages else None
            self._home = self._pool.claim(max(self._expected - len(self.pages), need), last)
        for _ in range(need):
            wanted = self._next_wanted(self._home)
            at_home = wanted is not None and wanted in self._home
            self.pages.append(self._pool.take(wanted, at_home=at_home))
        return True

    def publish(self, tokens: Sequence[int], verified: int) -> None:
        """Let others reuse the full pages of the first `verified` tokens.

        These must be committed and in the cache; a draft token's page must never be reachable.
        """
        size = self._pool.page_size
        for i in range(len(self._keys), min(verified, len(tokens)) // size):
            key = self._pool.chain(
                self._keys[-1] if self._keys else None, tokens[i * size : (i + 1) * size]
            )
            self._keys.append(key)
            self._pool.publish(self.pages[i], key)

    def trim(self, tokens: int) -> None:
        """Give back pages wholly past `tokens` positions."""
        keep = -(-tokens // self._pool.page_size)
        self._pool.drop(self.pages[keep:])
        del self.pages[keep:]
        del self._keys[keep:]

    def release(self) -> None:
        """Give everything back; published pages stay reusable until evicted."""
        self.trim(0)
        if self._home is not None:
            self._pool.unclaim(self._home)
            self._home = None

    def _next_wanted(self, home: range) -> int | None:
        if self.pages and self.pages[-1] + 1 not in home and self.pages[-1] in home:
            return self.pages[-1] + 1  # the home is full: go on right behind it
        if self.pages and self.pages[-1] + 1 in home:
            return self.pages[-1] + 1
        if home and not any(page in home for page in self.pages):
            return home.start
        return self.pages[-1] + 1 if self.pages else None
