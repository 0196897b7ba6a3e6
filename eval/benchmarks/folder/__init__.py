"""Your own retrieval set from a folder of photos and a spreadsheet."""
