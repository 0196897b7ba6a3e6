"""What all three parts share: records and pictures, fingerprints, command lines, files."""
