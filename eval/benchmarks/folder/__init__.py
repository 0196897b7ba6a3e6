"""A folder of photos and a spreadsheet: a retrieval set of one's own."""
