"""Layouts of decoders, as text."""

import pytest

from flaxmix import models


@pytest.mark.parametrize(
    "layout, letters",
    [
        ("A", "A"),
        ("A6", "AAAAAA"),
        ("F10", "FFFFFFFFFF"),
        ("(LLLF)3", "LLLFLLLFLLLF"),
        ("L3F", "LLLF"),
        ("(LF)2A", "LFLFA"),
        ("((L2F)2A)2", "LLFLLFALLFLLFA"),
        ("(A)", "A"),
        ("A2F2L2", "AAFFLL"),
        (["L", "F"], "LF"),
        (("(LF)2", "A3"), "LFLFAAA"),
    ],
)
def test_letters(layout, letters):
    assert models.parse_layout(layout) == tuple(letters)


@pytest.mark.parametrize(
    "layout, message",
    [
        ("", "at least one layer, got ''"),
        ([], r"at least one layer, got \[\]"),
        ("FxL", "'FxL', character 2: 'x' is none of A, F, L"),
        ("f3", "'f3', character 1: 'f'"),
        ("A 2", "'A 2', character 2: ' '"),
        ("A-1", "'A-1', character 2: '-'"),
        ("A²", "character 2: '²'"),
        ("(LF", r"'\(LF', character 1: '\(' is not closed"),
        ("L(F(A)", r"character 2: '\(' is not closed"),
        ("LF)2", r"'LF\)2', character 3: '\)' closes no group"),
        ("L()2", "character 3: the group is empty"),
        ("F0", "'F0', character 2: 0 repeats"),
        ("(LF)00", "character 5: 0 repeats"),
        ("3F", "'3F', character 1: a number follows"),
        ("L(2F)", "character 3: a number follows"),
        (["L", "Z"], "'Z', character 1: 'Z'"),
    ],
)
def test_malformed(layout, message):
    with pytest.raises(ValueError, match=message):
        models.parse_layout(layout)


@pytest.mark.parametrize(
    "letters, group",
    [
        ("AAAAAA", "A"),
        ("LLLFLLLFLLLF", "LLLF"),
        ("LFLFA", "LFLFA"),
        ("LFL", "LFL"),
        ("F", "F"),
        ("LLFLLF", "LLF"),
    ],
)
def test_period(letters, group):
    assert models.period(letters) == tuple(group)
