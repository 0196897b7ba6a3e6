"""Words of a text in every script, for scores that count them. Free of torch."""

import re
import unicodedata

_STOP_WORDS = frozenset(
    "a an the of on in at to for from with and or is are was were be it its this that these those".split()
)
SIGNS = "\u3005\u3041-\u3096\u30a1-\u30fa\u30fc-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
"""Scripts without spaces between words, as a range of a pattern: each sign counts as a word."""
_MARKS = "".join(
    sign
    for sign in map(chr, range(0x300, 0x1F000))
    if unicodedata.category(sign) in ("Mn", "Mc")
    and not "\ufe00" <= sign <= "\ufe0f"  # those belong to emoji
)
LETTERS = rf"[^\W{SIGNS}](?:[^\W{SIGNS}]|(?![\0-\u02ff])[{_MARKS}\u200d])"
"""First character of a word of other scripts, and one that may follow: in ``\\W``, Python counts the vowel signs of Hindi or Arabic.

U+200D joins the letters of a word. The look-ahead spares most signs the long class, which is slow.
"""
_WORD = re.compile(rf"[{SIGNS}]|{LETTERS}*")


def content_words(text: str | None) -> list[str]:
    """Words of a text in lower case, without stop words."""
    text = unicodedata.normalize("NFC", (text or "").casefold())
    return [word for word in _WORD.findall(text) if word not in _STOP_WORDS]
