"""The namespaces of one model: one for each salt that a request comes with."""

from collections import OrderedDict

from hicache.engine.caching import Cache
from hicache.engine.model import LoadedModel
from hicache.keys import NamespaceDigest
from hicache.layout import KVLayout

MAX_NAMESPACES = 10_000
"""Salts whose digest is remembered; a forgotten one is only opened again."""


class Namespaces:
    """Digests by salt, each opened when it is first asked for. Step thread only."""

    def __init__(self, cache: Cache, model: LoadedModel, layout: KVLayout) -> None:
        self._cache = cache
        self._model = model
        self._layout = layout
        self._digests: OrderedDict[str | None, NamespaceDigest] = OrderedDict()

    def digest(self, salt: str | None) -> NamespaceDigest:
        """Return the digest of a salt's namespace."""
        digest = self._digests.get(salt)
        if digest is None:
            digest = self._cache.open_namespace(self._model.namespace(self._layout, salt))
            self._digests[salt] = digest
            if len(self._digests) > MAX_NAMESPACES:
                self._digests.popitem(last=False)
        self._digests.move_to_end(salt)
        return digest
