"""Which mixer each layer of a decoder has, as a short text.

    A  causal softmax attention    F  Full Relation    L  Linear Relation

A number repeats the letter or group before it: "F10", "(LLLF)3", "(LF)2A".
"""

from collections.abc import Sequence

LETTERS = ("A", "F", "L")


def parse_layout(layout: str | Sequence[str]) -> tuple[str, ...]:
    """The letter of each layer, such as L, F, L, F, A for "(LF)2A".

    Args:
        layout: a layout as text, or a sequence of them, one after the other.

    Raises:
        ValueError: if it is empty, or what of it is wrong and where.
    """
    parts = [layout] if isinstance(layout, str) else layout
    letters = tuple(letter for part in parts for letter in _parse(part))
    if not letters:
        raise ValueError(f"a layout needs at least one layer, got {layout!r}.")
    return letters


def period(letters: Sequence[str]) -> tuple[str, ...]:
    """The shortest group that gives all letters when it is repeated."""
    letters = tuple(letters)
    for size in range(1, len(letters) + 1):
        if letters[:size] * (len(letters) // size) == letters:
            return letters[:size]
    return letters


def _parse(text: str) -> list[str]:
    def wrong(place: int, what: str) -> ValueError:
        return ValueError(f"layout {text!r}, character {place + 1}: {what}.")

    # Groups that are open, each with its place and its units, which a number repeats.
    open_groups: list[tuple[int, list[list[str]]]] = [(-1, [])]
    place = 0
    while place < len(text):
        char, start = text[place], place
        units = open_groups[-1][1]
        place += 1
        if char in LETTERS:
            units.append([char])
        elif char == "(":
            open_groups.append((start, []))
        elif char == ")":
            if len(open_groups) == 1:
                raise wrong(start, "')' closes no group")
            open_groups.pop()
            if not units:
                raise wrong(start, "the group is empty")
            open_groups[-1][1].append(sum(units, []))
        elif char in "0123456789":
            while place < len(text) and text[place] in "0123456789":
                place += 1
            if start == 0 or text[start - 1] == "(":
                raise wrong(start, "a number follows a letter or a group")
            if (times := int(text[start:place])) == 0:
                raise wrong(start, "0 repeats")
            units[-1] = units[-1] * times
        else:
            raise wrong(
                start, f"{char!r} is none of {', '.join(LETTERS)}, a number or ( )"
            )
    if len(open_groups) > 1:
        raise wrong(open_groups[-1][0], "'(' is not closed")
    return sum(open_groups[0][1], [])
