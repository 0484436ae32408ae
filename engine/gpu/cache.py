"""Keep what was used last, bounded in bytes: the states after screenshots that may come again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """Anything that knows its size."""

    @property
    def size_bytes(self) -> int: ...


Item = TypeVar("Item", bound=Sized)


@dataclass
class ByteBoundCache(Generic[Item]):
    """Least recently used goes first; what is larger than the whole bound is never kept. A bound of 0 keeps nothing."""

    bound_bytes: int
    size_bytes: int = 0
    hits: int = 0
    misses: int = 0
    _items: OrderedDict[bytes, Item] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: bytes) -> Item | None:
        """The item, now the most recently used, or None."""
        item = self._items.get(key)
        if item is None:
            self.misses += 1
            return None
        self._items.move_to_end(key)
        self.hits += 1
        return item

    def make_room(self, size_bytes: int) -> bool:
        """Drop the least recently used until an item of this size fits; False if it never can."""
        if size_bytes > self.bound_bytes:
            return False
        while self.size_bytes + size_bytes > self.bound_bytes:
            _, dropped = self._items.popitem(last=False)
            self.size_bytes -= dropped.size_bytes
        return True

    def put(self, key: bytes, item: Item) -> None:
        """Keep an item that `make_room` found room for."""
        old = self._items.pop(key, None)
        self.size_bytes += item.size_bytes - (old.size_bytes if old else 0)
        self._items[key] = item

    def clear(self) -> None:
        """Drop everything."""
        self._items.clear()
        self.size_bytes = 0
