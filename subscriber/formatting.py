"""Numbers formatted for people."""

from __future__ import annotations


def in_bytes(number: float) -> str:
    """Format a size: 1536 → `1.5 KiB`; whole bytes below one KiB; negative numbers keep their sign."""
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def in_seconds(seconds: float) -> str:
    """Format a duration with its two largest units: 0.25 → `0.25 s`, 75 → `1 min 15 s`, 90061 → `1 d 1 h`."""
    if seconds < 10:
        return f"{seconds:.2f}".rstrip("0").rstrip(".") + " s"
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next(index for index, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)


def count(number: int, thing: str, things: str = "") -> str:
    """Format a count: 1, "table" → `1 table`; 2000, "table" → `2,000 tables`. `things` is an irregular plural."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"
