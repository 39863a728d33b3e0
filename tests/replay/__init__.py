"""Replays, against numbers that were worked out elsewhere, and against the server."""
