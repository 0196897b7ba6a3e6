"""The parts of an item (text, pictures, clips, documents), and how files of each kind are read."""
