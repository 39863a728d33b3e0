"""The one exception that reading a record may raise."""


class BadRecord(Exception):
    """A record is not what its format says; the text tells a person what is wrong with it.

    Whoever reads the file counts it and goes on: nothing of the record is used.
    """
