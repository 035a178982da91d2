"""A bounded memory of blocks that were asked for, whether or not any tier still has them.

It answers how often a block was seen, whether one that was pushed out comes back, and why a block
is missing. It remembers names and token ids, never KV. What it says are hints for decisions and
explanations: a block is known by its hash alone. Not thread-safe: the step loop owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import xxhash

from cache.block import BlockKey, Tier
from cache.report import Miss

_TOKEN_BYTES_PER_BLOCK = 256
_MOST_SIBLINGS = 64
_TOKEN_BYTES = 4


class _Sighting:
    """One remembered block. `text` hashes the prompt's tokens up to its end, without any salt, or
    is None where they are not all known. `mark`: pushed out of that tier and not asked for since.
    `was_pushed_out`: ever, as far as remembered."""

    __slots__ = ("key", "mark", "seen", "text", "was_pushed_out")

    def __init__(self, key: BlockKey, text: int | None) -> None:
        self.key = key
        self.text = text
        self.seen = 0
        self.mark: Tier | None = None
        self.was_pushed_out = False


class Sightings:
    """Remembers the `capacity` blocks that were last asked for or pushed out, fewer if their token
    ids are more than 256 bytes each on average."""

    def __init__(
        self,
        capacity: int = 32_768,
        *,
        on_forgotten: Callable[[BlockKey, Tier], None] | None = None,
    ) -> None:
        """`on_forgotten` gets each block that was pushed out of a tier and ages out of this memory,
        or is pushed out of another tier, before it was asked for again."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self.on_forgotten = on_forgotten
        self._capacity = capacity
        self._most_token_bytes = _TOKEN_BYTES_PER_BLOCK * capacity
        self._token_bytes = 0
        self._known: OrderedDict[bytes, _Sighting] = OrderedDict()  # next to forget first
        self._children: dict[bytes, list[bytes]] = {}  # by parent; the latest few links
        self._texts: dict[int, int] = {}  # how many known blocks end the same text

    def __len__(self) -> int:
        return len(self._known)

    def see(self, keys: Sequence[BlockKey]) -> None:
        """A request asked for these: a prompt's keys from its first block on. Once per request."""
        known = self._known
        before = known.get(keys[0].parent) if keys else None
        for key in keys:
            sighting = known.get(key.link)
            if sighting is None:
                sighting = self._remember(key, before)
            sighting.seen += 1
            before = sighting
        # a prompt's end is forgotten before its beginning
        for key in reversed(keys):
            known.move_to_end(key.link)
        self._forget_surplus()

    def times_seen(self, key: BlockKey) -> int:
        """How many requests asked for the block, as far as is remembered."""
        sighting = self._known.get(key.link)
        return sighting.seen if sighting is not None else 0

    def pushed_out(self, key: BlockKey, tier: Tier) -> None:
        """The block left `tier`. From now on it is watched whether it is asked for again; where it
        was watched already, for another tier, that has ended."""
        sighting = self._known.get(key.link)
        if sighting is None:
            sighting = self._remember(key, self._known.get(key.parent))
        self._give_up_mark(sighting)
        sighting.mark = tier
        sighting.was_pushed_out = True
        self._known.move_to_end(key.link)
        self._forget_surplus()

    def came_back(self, key: BlockKey) -> Tier | None:
        """The tier that the block was pushed out of since it was last asked for; clears that."""
        sighting = self._known.get(key.link)
        if sighting is None:
            return None
        tier, sighting.mark = sighting.mark, None
        return tier

    def erase(self, tenant: bytes | None, scope: bytes | None) -> None:
        """Forget an owner's blocks. None: of every tenant, of every scope."""
        gone = [
            sighting
            for sighting in self._known.values()
            if (tenant is None or sighting.key.owner.tenant == tenant)
            and (scope is None or sighting.key.owner.scope == scope)
        ]
        for sighting in gone:
            self._forget(sighting)

    def why_missing(self, keys: Sequence[BlockKey], index: int) -> tuple[Miss, int | None]:
        """Why keys[index] of a prompt, in no tier, is missing; before or after `see` of the prompt.

        EVICTED: it was pushed out of a tier. OTHER_SALT: the same text from the prompt's start is
        known under another link. DIVERGED, with the position of the first token that differs: the
        blocks before it are known and go on differently, or it is the first block and begins like
        another one. NEVER_SEEN otherwise.
        """
        key = keys[index]
        own = self._known.get(key.link)
        if own is not None and own.was_pushed_out:
            return Miss.EVICTED, None
        if self._known_under_others(keys, index, own):
            return Miss.OTHER_SALT, None
        same = self._most_tokens_in_common(key)
        if same is None or (index == 0 and same == 0):
            return Miss.NEVER_SEEN, None
        return Miss.DIVERGED, key.start + same

    def _known_under_others(
        self, keys: Sequence[BlockKey], index: int, own: _Sighting | None
    ) -> bool:
        """Whether the prompt's text up to the end of this block is known under another link."""
        if own is not None and own.text is not None:
            return self._texts[own.text] > 1
        text = 0
        for key in keys[: index + 1]:
            text = _extend_text(text, key)
        return text in self._texts

    def _most_tokens_in_common(self, key: BlockKey) -> int | None:
        """How many tokens the most similar sibling begins with that this block does too; None
        without siblings."""
        best = None
        for link in self._children.get(key.parent, ()):
            if link != key.link:
                same = _tokens_in_common(key.token_bytes, self._known[link].key.token_bytes)
                best = same if best is None else max(best, same)
        return best

    def _remember(self, key: BlockKey, before: _Sighting | None) -> _Sighting:
        """`before` is the sighting of the block before it in its prompt."""
        text = None
        if key.start == 0:
            text = _extend_text(0, key)
        elif before is not None and before.text is not None:
            text = _extend_text(before.text, key)
        sighting = _Sighting(key, text)
        self._known[key.link] = sighting
        self._token_bytes += len(key.token_bytes)
        if text is not None:
            self._texts[text] = self._texts.get(text, 0) + 1
        siblings = self._children.get(key.parent)
        if siblings is None:
            self._children[key.parent] = [key.link]
        else:
            siblings.append(key.link)
            if len(siblings) > _MOST_SIBLINGS:
                del siblings[0]
        return sighting

    def _forget_surplus(self) -> None:
        while len(self._known) > self._capacity or self._token_bytes > self._most_token_bytes:
            sighting = next(iter(self._known.values()))
            self._forget(sighting)
            self._give_up_mark(sighting)

    def _give_up_mark(self, sighting: _Sighting) -> None:
        tier, sighting.mark = sighting.mark, None
        if tier is not None and self.on_forgotten is not None:
            self.on_forgotten(sighting.key, tier)

    def _forget(self, sighting: _Sighting) -> None:
        key, text = sighting.key, sighting.text
        del self._known[key.link]
        self._token_bytes -= len(key.token_bytes)
        if text is not None:
            self._texts[text] -= 1
            if not self._texts[text]:
                del self._texts[text]
        siblings = self._children.get(key.parent)
        if siblings is not None and key.link in siblings:
            siblings.remove(key.link)
            if not siblings:
                del self._children[key.parent]


def _extend_text(text: int, key: BlockKey) -> int:
    return xxhash.xxh3_64_intdigest(key.token_bytes, text)


def _tokens_in_common(ours: bytes, theirs: bytes) -> int:
    """How many tokens two blocks begin with alike."""
    difference = int.from_bytes(ours, "little") ^ int.from_bytes(theirs, "little")
    if not difference:
        return min(len(ours), len(theirs)) // _TOKEN_BYTES
    lowest_bit = (difference & -difference).bit_length() - 1
    return lowest_bit // (8 * _TOKEN_BYTES)
