"""MMEB-V2, its image and visual-document parts."""
