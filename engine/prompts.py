"""Which prompts can run at all."""

from array import array
from collections.abc import Sequence

from hicache.errors import InputError


class PromptTooLong(InputError):
    """More tokens than the context, or L1, can hold."""


def checked(
    prompt_ids: Sequence[int], vocab_size: int, context_tokens: int, device_tokens: int
) -> "array[int]":
    """Return a prompt as an array; raise ``InputError`` where it cannot run.

    One token more than the prompt must fit into the context, and the prompt into L1.
    """
    if len(prompt_ids) == 0:
        raise InputError("the prompt is empty")
    if len(prompt_ids) >= context_tokens:
        raise PromptTooLong(
            f"the prompt has {len(prompt_ids)} tokens, and with one more it must fit into the "
            f"context of {context_tokens}"
        )
    if len(prompt_ids) > device_tokens:
        raise PromptTooLong(
            f"the prompt has {len(prompt_ids)} tokens and L1 holds {device_tokens}: "
            "raise cache.device.size"
        )
    try:
        tokens = array("i", prompt_ids)
    except (OverflowError, TypeError):
        tokens = array("i", [-1])
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise InputError(f"a token id is not from 0 to {vocab_size - 1}")
    return tokens
