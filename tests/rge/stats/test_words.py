"""Words of a text."""

import pytest

from rge.stats.words import content_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Dog, the dog and 2 cats", ["dog", "dog", "2", "cats"]),
        (None, []),
        ("这是钥匙", ["这", "是", "钥", "匙"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),  # not letter by letter
        ("un cafe\u0301", ["un", "café"]),
        ("ශ්\u200dරී ලංකා", ["ශ්\u200dරී", "ලංකා"]),  # joined letters are one word
        ("5\ufe0f\u20e3", ["5"]),
    ],
)
def test_words_keep_order_and_repeats_in_every_script(text, words):
    assert content_words(text) == words
