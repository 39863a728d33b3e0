"""The brain: what to do about an event, with no clock, thread, tensor or file."""
