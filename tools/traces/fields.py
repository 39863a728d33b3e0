"""Taking fields out of a record, or saying what is wrong with them."""

from collections.abc import Mapping
from datetime import UTC, datetime

from hicache.tools.traces.errors import BadRecord

MAX_TOKENS = 2**31 - 1

Fields = Mapping[str, object]


def mapping(value: object) -> Fields:
    """Return ``value`` if it is a JSON object."""
    if not isinstance(value, dict):
        raise BadRecord(f"expected an object, found {_named(value)}")
    return value


def items(fields: Fields, name: str) -> list[object]:
    """Return a list."""
    value = fields.get(name)
    if not isinstance(value, list):
        raise BadRecord(f"{name}: expected a list, found {_named(value)}")
    return value


def whole(fields: Fields, name: str, *, least: int = 0, default: int | None = None) -> int:
    """Return a count of tokens; a float without a fraction is one too."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRecord(f"{name}: expected a whole number, found {_named(value)}")
    if not least <= value <= MAX_TOKENS:
        raise BadRecord(f"{name}: {value} is out of range")
    return value


def number(fields: Fields, name: str) -> float:
    """Return a finite number."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRecord(f"{name}: expected a number, found {_named(value)}")
    if not abs(value) < 1e300:
        raise BadRecord(f"{name}: {value} is out of range")
    return float(value)


def text(fields: Fields, name: str, default: str | None = None) -> str:
    """Return a text."""
    value = fields.get(name, default)
    if not isinstance(value, str):
        raise BadRecord(f"{name}: expected a text, found {_named(value)}")
    return value


def name_of(fields: Fields, name: str) -> str | None:
    """Return a name that may be a number, as a text; ``None`` where there is none."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadRecord(f"{name}: expected a name, found {_named(value)}")
    return str(value)


def moment(value: str, name: str) -> float:
    """Return the seconds of an ISO date and time; without a zone it is UTC."""
    try:
        parsed = datetime.fromisoformat(value.strip())
    except ValueError:
        raise BadRecord(f"{name}: {value[:40]!r} is no date and time") from None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def _named(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return repr(value)[:40]
