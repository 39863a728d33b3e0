"""``hicache serve``: a server over one model."""

from hicache.config import Config
from hicache.engine.serving import serve


def run(config: Config) -> int:
    """Serve until told to end; return the exit code."""
    return serve(config)
