"""Small PDF documents, written by hand."""

from collections.abc import Sequence

RED, GREEN, BLUE = (255, 0, 0), (0, 128, 0), (0, 0, 255)
PASSWORD_NEEDED = (
    b"/Encrypt<</Filter/Standard/V 1/R 2/P -4/O<" + b"28" * 32 + b">/U<" + b"29" * 32 + b">>>"
    b"/ID[<00112233445566778899aabbccddeeff><00112233445566778899aabbccddeeff>]"
)
"""For `trailer`: no password is right."""


def page(
    words: str = "", colour: tuple[int, int, int] | None = None, size=(200, 100), **entries: str
) -> tuple[bytes, bytes]:
    """A page: its dictionary and its content. `colour` fills the upper left quarter; `entries` such as Rotate=90."""
    width, height = size
    more = "".join(f"/{key} {value}" for key, value in entries.items())
    content = ""
    if colour:
        r, g, b = (value / 255 for value in colour)
        content += f"{r} {g} {b} rg 0 {height / 2} {width / 2} {height / 2} re f "
    lines = "".join(f"({line}) Tj 0 -14 Td " for line in words.split("\n"))
    content += f"0 g BT /F 12 Tf 10 {height - 20} Td {lines}ET" if words else ""
    font = "/Resources<</Font<</F<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>>>"
    return f"/MediaBox[0 0 {width} {height}]{font}{more}".encode(), content.encode()


def pdf(
    pages: Sequence[tuple[bytes, bytes]],
    trailer: bytes = b"",
    bookmarks: Sequence[tuple[str, int]] = (),
    num_roman: int = 0,
) -> bytes:
    """A document of these pages, the first `num_roman` of them with Roman numbers; a bookmark has a title and a page from 1."""
    kids = b" ".join(b"%d 0 R" % (3 + 2 * i) for i in range(len(pages)))
    outline = 3 + 2 * len(pages)
    more = b"/Outlines %d 0 R" % outline if bookmarks else b""
    if num_roman:
        more += b"/PageLabels<</Nums[0<</S/r>>%d<</S/D>>]>>" % num_roman
    objects = [
        b"<</Type/Catalog/Pages 2 0 R%s>>" % more,
        b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, len(pages)),
    ]
    for i, (about, content) in enumerate(pages):
        objects.append(b"<</Type/Page/Parent 2 0 R/Contents %d 0 R%s>>" % (4 + 2 * i, about))
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(content), content))
    if bookmarks:
        objects.append(b"<</First %d 0 R/Last %d 0 R>>" % (outline + 1, outline + len(bookmarks)))
    for place, (title, number) in enumerate(bookmarks, start=1):
        following = b"/Next %d 0 R" % (outline + place + 1) if place < len(bookmarks) else b""
        target = b"/Dest[%d 0 R/Fit]" % (1 + 2 * number)
        objects.append(b"<</Title(%s)/Parent %d 0 R%s%s>>" % (title.encode(), outline, target, following))
    file, offsets = b"%PDF-1.4\n", b""
    for number, content in enumerate(objects, 1):
        offsets += b"%010d 00000 n \n" % len(file)
        file += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, offsets)
    end = b"trailer<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF" % (
        len(objects) + 1,
        trailer,
        len(file),
    )
    return file + table + end
