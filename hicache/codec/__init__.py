"""What pages look like in storage: records that prove what they are."""

from hicache.codec.record import (
    CODEC_NONE,
    CODEC_ZSTD,
    FIXED_NBYTES,
    FORMAT_VERSION,
    KIND_NAMESPACE,
    KIND_PAGE,
    MAGIC,
    Header,
    PageCodec,
    decode_namespace,
    encode_namespace,
    header_nbytes,
    parse,
    peek,
    prove,
)

__all__ = [
    "CODEC_NONE",
    "CODEC_ZSTD",
    "FIXED_NBYTES",
    "FORMAT_VERSION",
    "KIND_NAMESPACE",
    "KIND_PAGE",
    "MAGIC",
    "Header",
    "PageCodec",
    "decode_namespace",
    "encode_namespace",
    "header_nbytes",
    "parse",
    "peek",
    "prove",
]
