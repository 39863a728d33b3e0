"""What pages look like in storage: records that prove what they are."""

from hicache.codec.keyfile import open_keyring
from hicache.codec.page import PageCodec
from hicache.codec.record import (
    CODEC_NONE,
    FIXED_NBYTES,
    FORMAT_VERSION,
    KIND_NAMESPACE,
    KIND_PAGE,
    KIND_SEALED,
    MAGIC,
    Header,
    decode_namespace,
    encode_namespace,
    header_nbytes,
    parse,
    peek,
    prove,
)
from hicache.codec.sealing import Keyring

__all__ = [
    "CODEC_NONE",
    "FIXED_NBYTES",
    "FORMAT_VERSION",
    "KIND_NAMESPACE",
    "KIND_PAGE",
    "KIND_SEALED",
    "MAGIC",
    "Header",
    "Keyring",
    "PageCodec",
    "decode_namespace",
    "encode_namespace",
    "header_nbytes",
    "open_keyring",
    "parse",
    "peek",
    "prove",
]
