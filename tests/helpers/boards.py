"""The rows of a leaderboard page, read back."""

from html.parser import HTMLParser


class Text(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.rows, self.cells, self.ids, self.uses = [], None, set(), set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.add(attrs.get("id"))
        if tag == "use":
            self.uses.add(attrs["href"][1:])
        if tag == "tr":
            self.cells = []
            self.rows.append((attrs.get("class"), self.cells))
        if tag in ("td", "th") and self.cells is not None:
            self.cells.append("")

    def handle_data(self, data):
        if self.cells:
            self.cells[-1] += data


def rows_of(page, kind):
    return [[" ".join(cell.split()) for cell in cells] for name, cells in Text(page).rows if name == kind]
