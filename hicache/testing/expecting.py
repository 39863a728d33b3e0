"""What was expected and what happened, in words that need no traceback."""

_MOST_CHARS = 300
_MOST_ITEMS = 8


class CheckFailed(AssertionError):
    """A backend does not do what its contract says."""

    def __init__(self, what: str, expected: str, found: str) -> None:
        super().__init__(f"{what}: expected {expected}, found {found}")
        self.what = what
        self.expected = expected
        self.found = found


def expect(what: str, found: object, expected: object) -> None:
    """Raise ``CheckFailed`` unless what was found is what was expected."""
    if found != expected:
        told = show(found)
        if isinstance(found, bytes) and isinstance(expected, bytes):
            told = f"{told}, {_difference(found, expected)}"
        raise CheckFailed(what, show(expected), told)


def expect_that(is_so: bool, what: str, expected: str, found: object) -> None:
    """Raise ``CheckFailed`` unless it is so. ``expected`` is told in words."""
    if not is_so:
        raise CheckFailed(what, expected, show(found))


def show(value: object) -> str:
    """Return a value in few words: bytes by their number and their first ones."""
    match value:
        case bytes() | bytearray() | memoryview():
            start = bytes(value[:6]).hex(" ")
            return f"{len(value)} bytes ({start}{' …' if len(value) > 6 else ''})"
        case list() | tuple():
            shown = [show(item) for item in value[:_MOST_ITEMS]]
            if len(value) > _MOST_ITEMS:
                shown.append(f"… {len(value)} in all")
            return f"[{', '.join(shown)}]"
        case _:
            text = str(value)
            return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]} …"


def _difference(found: bytes, expected: bytes) -> str:
    same, end = 0, min(len(found), len(expected)) + 1
    while end - same > 1:  # ``same`` bytes agree, ``end`` do not
        middle = (same + end) // 2
        same, end = (middle, end) if found[:middle] == expected[:middle] else (same, middle)
    is_prefix = same == min(len(found), len(expected))
    return "right as far as it goes" if is_prefix else f"wrong from byte {same} on"
