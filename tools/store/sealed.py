"""What is sealed in records: opened where the settings have the key, else left as it is."""

import mmap
from hashlib import sha256

from hicache.codec import KIND_SEALED, Header, Keyring, peek
from hicache.errors import CorruptPage
from hicache.keys import TOKEN_NBYTES


def tokens_of(head: bytes | None, keyring: Keyring | None) -> bytes | None:
    """Return the tokens that a header has: none where it is no header, or has gone.

    ``None`` where they are sealed, and the key is not here.
    """
    try:
        header = None if head is None else peek(head)
        if header is None or head is None:
            return b""
        if header.kind != KIND_SEALED:
            return header.tokens
        master = None if keyring is None else keyring.find(memoryview(head))
        if master is None:
            return None
        view = memoryview(head)[: header.header_nbytes]
        return master.open_header(view, TOKEN_NBYTES * header.num_tokens, header.namespace).tokens
    except CorruptPage:
        return b""


def open_seals(header: Header, record: memoryview, keyring: Keyring | None) -> bool:
    """Open a record's seals, to see that they hold; whether that could be tried.

    Raises ``CorruptPage`` where one is broken, or the page belongs under another name.
    """
    master = None if keyring is None else keyring.find(record)
    if header.kind != KIND_SEALED or master is None:
        return False
    head, stored = record[: header.header_nbytes], record[header.header_nbytes :]
    sealed = master.open_header(head, TOKEN_NBYTES * header.num_tokens, header.namespace)
    key = sha256(sealed.parent + sealed.tokens).digest()
    names = (master.name(key), master.parent_name(sealed.parent, header.namespace))
    if names != (header.key, header.parent):
        raise CorruptPage("tokens: with the parent key they do not name this record")
    room = memoryview(mmap.mmap(-1, len(stored)))
    master.open_payload(head, stored, room, header.namespace)
    return True
