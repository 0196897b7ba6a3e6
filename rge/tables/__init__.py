"""Reading tables, and folders and archives of pictures, from this machine or any store that fsspec knows."""
