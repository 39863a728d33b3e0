"""HiCache: a hierarchical KV cache for LLM servers.

Keys and values that a server has computed once are kept in GPU memory, host memory and storage,
and move between these tiers, so that what had to be evicted is reloaded instead of recomputed.

``hicache.cache.HiCache`` is the cache; ``hicache.engine.llm.LLM`` is an engine that uses it.
This module loads neither: ``import hicache`` brings in no GPU stack.
"""

__version__ = "0.1.0"
