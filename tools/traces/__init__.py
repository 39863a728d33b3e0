"""Request traces: reading them, whatever wrote them, and generating them.

``open_trace`` of ``opening`` finds out what a file is and streams it in one normal form.
"""
