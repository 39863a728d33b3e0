"""Pages that only who has the key can read: AES-256-GCM, a key for each namespace.

From a master key come, by HKDF-SHA256, each for one purpose: an id, by which a record says what it
was sealed with; a key that names are made with; and for each namespace, and so for each tenant,
one key for headers and one for payloads.

*Names.* A page key is a hash of tokens: who guesses a prompt could see whether its pages are
there. So a sealed page is stored under the name of its key, HMAC-SHA256 of it, and says the name
of its parent. Who has no key sees which pages follow each other, and not what they are of. With
another key every name is another: nothing is found, and nothing of others is touched.

*Nonces* are 96 random bits of the system, one for each record, for its header and its payload,
whose keys differ. No process keeps count, so any number of them may write, stop and start again.
With 2**32 records sealed by one key, the chance that two share a nonce is below 2**-32.

*What is authenticated.* The header's seal covers all that it says in plain but the checksum; the
payload's seal covers the whole header but the checksum. So a payload belongs to its header, a
header to its tokens, and both to their namespace.

This module reads no file. It needs ``cryptography`` as soon as a ``Keyring`` is made.
"""

import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from hicache.codec.record import CHECKSUM_START, FIXED_NBYTES, SEALED_FIXED_NBYTES, SUMMED_START
from hicache.errors import CorruptPage
from hicache.keys import KEY_NBYTES, NamespaceDigest, PageKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MASTER_NBYTES = 32
TAG_NBYTES = 16
_ID = slice(FIXED_NBYTES, FIXED_NBYTES + 8)
_NONCE = slice(_ID.stop, _ID.stop + 12)
_GAP = slice(_NONCE.stop, _NONCE.stop + 4)
_TAG = slice(_GAP.stop, _GAP.stop + TAG_NBYTES)
_SEALED_START = _TAG.stop
_MAX_NAMESPACES = 1024
"""Whose keys are remembered."""

assert _SEALED_START + KEY_NBYTES == SEALED_FIXED_NBYTES


@dataclass(frozen=True, slots=True)
class Sealed:
    """What was sealed in a header."""

    parent: bytes
    tokens: bytes


class Keyring:
    """Seals with the first of its master keys, opens with whichever fits. Thread-safe."""

    def __init__(self, masters: Sequence[bytes]) -> None:
        """Raise ``ImportError`` where ``cryptography`` is not installed."""
        assert masters
        assert all(len(master) == MASTER_NBYTES for master in masters)
        self.masters = [Master(master) for master in masters]

    @property
    def first(self) -> "Master":
        """The one that seals."""
        return self.masters[0]

    def find(self, header: memoryview) -> "Master | None":
        """Return the master key that a record was sealed with, if it is here."""
        key_id = bytes(header[_ID])
        return next((master for master in self.masters if master.key_id == key_id), None)

    def of(self, header: memoryview) -> "Master":
        """Return the same; raise ``CorruptPage`` where it is not here."""
        master = self.find(header)
        if master is None:
            raise CorruptPage(f"key: sealed with {bytes(header[_ID]).hex()}, which is not here")
        return master


class Master:
    """A master key, and what follows from it."""

    def __init__(self, master: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher_type, self._broken = AESGCM, InvalidTag
        self._master = master
        self.key_id = self._derive(b"id", 8)
        self._name_key = self._derive(b"names", 32)
        self._ciphers = lru_cache(_MAX_NAMESPACES)(self._make_ciphers)

    def name(self, key: bytes) -> PageKey:
        """Return what the page of this key is stored under."""
        return PageKey(hmac.digest(self._name_key, key, "sha256"))

    def parent_name(self, parent: bytes, namespace: NamespaceDigest) -> bytes:
        """Return what a sealed page says of its parent; a namespace digest says itself."""
        return parent if parent == namespace else self.name(parent)

    def seal_header(
        self, header: memoryview, parent: bytes, tokens: bytes, namespace: NamespaceDigest
    ) -> None:
        """Write all from byte 152 on. What is before, but the checksum, must be there already."""
        header[_ID] = self.key_id
        header[_NONCE] = os.urandom(12)
        header[_GAP] = bytes(4)
        cipher, _ = self._ciphers(namespace)
        sealed = cipher.encrypt(bytes(header[_NONCE]), parent + tokens, _in_plain(header))
        end = _SEALED_START + len(sealed) - TAG_NBYTES
        header[_SEALED_START:end] = sealed[:-TAG_NBYTES]
        header[_TAG] = sealed[-TAG_NBYTES:]
        header[end:] = bytes(len(header) - end)

    def open_header(
        self, header: memoryview, tokens_nbytes: int, namespace: NamespaceDigest
    ) -> Sealed:
        """Return what is sealed; raise ``CorruptPage`` where the seal is broken."""
        end = _SEALED_START + KEY_NBYTES + tokens_nbytes
        sealed = bytes(header[_SEALED_START:end]) + bytes(header[_TAG])
        cipher, _ = self._ciphers(namespace)
        try:
            opened = cipher.decrypt(bytes(header[_NONCE]), sealed, _in_plain(header))
        except self._broken:
            raise CorruptPage("seal: the header's is broken") from None
        return Sealed(opened[:KEY_NBYTES], opened[KEY_NBYTES:])

    def seal_payload(
        self, header: memoryview, payload: memoryview, slot: memoryview, namespace: NamespaceDigest
    ) -> memoryview:
        """Write the sealed payload into ``slot``; return that part, with the tag at its end.

        The header must be whole, but for the checksum.
        """
        _, cipher = self._ciphers(namespace)
        stored = slot[: len(payload) + TAG_NBYTES]
        cipher.encrypt_into(bytes(header[_NONCE]), payload, _whole(header), stored)
        return stored

    def open_payload(
        self, header: memoryview, stored: memoryview, room: memoryview, namespace: NamespaceDigest
    ) -> memoryview:
        """Write the payload into ``room``; return that part.

        Raises ``CorruptPage`` where the seal is broken; what is in ``room`` means nothing then.
        The header's seal, which covers the length, must have been opened before.
        """
        assert len(stored) >= TAG_NBYTES
        _, cipher = self._ciphers(namespace)
        payload = room[: len(stored) - TAG_NBYTES]
        try:
            cipher.decrypt_into(bytes(header[_NONCE]), stored, _whole(header), payload)
        except self._broken:
            raise CorruptPage("seal: the payload's is broken") from None
        return payload

    def _make_ciphers(self, namespace: NamespaceDigest) -> "tuple[AESGCM, AESGCM]":
        """Return the ciphers of headers and of payloads."""
        keys = self._derive(b"namespace" + namespace, 64)
        return self._cipher_type(keys[:32]), self._cipher_type(keys[32:])

    def _derive(self, purpose: bytes, nbytes: int) -> bytes:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return HKDF(SHA256(), nbytes, salt=None, info=b"hicache v1 " + purpose).derive(self._master)


def _in_plain(header: memoryview) -> bytes:
    """Return what the header's seal covers, beside what it hides."""
    return bytes(header[:CHECKSUM_START]) + bytes(header[SUMMED_START : _GAP.stop])


def _whole(header: memoryview) -> bytes:
    """Return what the payload's seal covers, beside the payload."""
    return bytes(header[:CHECKSUM_START]) + bytes(header[SUMMED_START:])
